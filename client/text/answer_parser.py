"""Answers of models as the parts that clients know: content, reasoning and tool calls."""

from typing import Literal

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it; encoded anew only where the format is not JSON."""


class Piece(msgspec.Struct, frozen=True):
    """New visible part of an answer. A call comes whole."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


class ParsedAnswer(msgspec.Struct):
    content: str
    reasoning: str
    calls: list[ToolCall]
    malformed: list[str]
    """A reason for each call that is left as text."""
