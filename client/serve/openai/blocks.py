"""Pieces of an answer as blocks, which ``/v1/responses`` calls items and ``/v1/messages`` content blocks.

Invariants: a block is a run of pieces of one kind, or one call; blocks come one after another. The blocks of
a stream are those of the whole answer.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from ....io_struct import new_id
from ...text.answer_parser import Piece, ToolCall


class Block(msgspec.Struct, kw_only=True):
    index: int
    kind: Literal["content", "reasoning", "call"]
    id: str
    call: ToolCall | None
    texts: list[str]

    @property
    def text(self) -> str:
        """The text, or the arguments of a call."""
        return "".join(self.texts)


class Step(NamedTuple):
    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one sample, as its pieces arrive."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, pieces: Iterable[Piece]) -> Iterator[Step]:
        for piece in pieces:
            last = self.all[-1] if self.all else None
            if last is None or piece.call is not None or last.kind != piece.kind:
                yield from self.end()
                last = Block(index=len(self.all), kind=piece.kind, id=new_id(), call=piece.call, texts=[])
                self.all.append(last)
                yield Step("begin", last)
            text = piece.text if piece.call is None else piece.call.arguments
            last.texts.append(text)
            yield Step("add", last, text)

    def end(self) -> Iterator[Step]:
        if self.all:
            yield Step("end", self.all[-1])
