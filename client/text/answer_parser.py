"""``AnswerParser``: content, reasoning and tool calls in the text of an answer, as it arrives.

Invariants:
- However the text is divided, all pieces together are those of the whole text.
- A call is one piece, which comes when it is complete. One that cannot be read, or whose function is not
  declared, stays in the content as the model wrote it, and :attr:`ParsedAnswer.malformed` says why.
- The time is linear in the text. Only a call that is not complete is held back, space between parts, and
  what may become a mark.
- Marks count neither in the strings of a call's JSON nor in reasoning, which precedes the content: marks of
  reasoning after it are text.
- Special tokens that are no part of marks are not shown, as with ``skip_special_tokens``: the text that is
  fed has them. Space around reasoning and calls is layout, and is not shown either.
"""

import re
import string
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec

from ...io_struct import new_id
from ..grammar import Lead
from .parsers.calls import MalformedError, Tools, declared, read_calls
from .parsers.calls import ToolCall as ToolCall
from .parsers.formats import Format, Kind, Region, find_format
from .stop_strings import StopStrings
from .tokenizer import TextTokenizer

_IN_STRING = re.compile(r'["\\\n]')
_BRACKETS = frozenset("{}[]")
_CHANNEL = "<|channel|>"
_RECIPIENT = re.compile(r" to=([^\s<]+)")
_TAIL = 512
"""Tokens at the end of a prompt among which reasoning may have begun."""


class Piece(msgspec.Struct, frozen=True):
    """New text of one kind, or a complete call."""

    kind: Kind
    text: str = ""
    call: ToolCall | None = None


class ParsedAnswer(msgspec.Struct):
    content: str
    reasoning: str
    calls: list[ToolCall]
    malformed: list[str]
    """Reasons, one for each call that was left in the content."""


class AnswerFormat:
    """The regions of a tokenizer's answers, with automata that find their marks."""

    def __init__(self, calls: Format | None, reasoning: Format | None, special: frozenset[str]) -> None:
        """Leave calls in the text if ``calls`` is None; ``special`` tokens are dropped."""
        complete = next((each for each in (calls, reasoning) if each and (each.message or each.hidden)), None)
        regions = [
            region
            for each, wanted in ((reasoning, "reasoning"), (calls, "call"))
            for region in (each.regions if each else ())
            if region.kind == wanted
        ]
        if complete is not None:
            regions = [
                region if calls or region.kind != "call" else replace(region, kind="content")
                for region in complete.regions
            ]
        self.complete = complete is not None
        """True if all that is shown is in regions."""
        self.message, self.starts = (complete.message, complete.starts) if complete else ("", ())
        self.bare = calls.bare if calls else None
        self.short_ids = bool(calls and calls.short_ids)
        self.reasoning = next((region for region in regions if region.kind == "reasoning"), None)
        self.calls = next((region for region in regions if region.kind == "call"), None)
        self.content = next((region for region in regions if region.kind == "content"), None)
        self.lead = _lead(reasoning, self.reasoning, self.content)
        self.opens = {mark: region for region in regions for mark in region.open}
        marks = {mark for region in regions for mark in (*region.open, *region.close)}
        layout = {mark for each in (calls, reasoning) if each for mark in each.dropped}
        read = marks.union(layout, *(form.literals for region in regions for form in region.forms))
        self.dropped = ({each for each in special if not any(each in text for text in read)} | layout) - marks
        ends = {mark for region in regions for mark in region.close} - set(self.starts)
        self.outside = _finder({self.message, *ends} if self.message else self.dropped | self.opens.keys())
        self.inside = {region: self._inside(region) for region in (*regions, self.bare) if region is not None}

    def new_call_id(self) -> str:
        """Return an identifier for a call that the model gave none."""
        return new_id()[:9] if self.short_ids else f"call_{new_id()}"

    def _inside(self, region: Region) -> StopStrings | None:
        marks = {*region.close, *self.dropped}
        if region.kind == "call" and all(form.plain for form in region.forms):
            marks |= {'"'} if region.close else {'"', "{", "}", "[", "]"}
        return _finder(marks)


def _lead(form: Format | None, reasoning: Region | None, content: Region | None) -> Lead:
    if form is not None and form.lead is not None:
        return form.lead
    mark = content.open[0] if content is not None and content.open else ""
    if reasoning is None or not (reasoning.open and reasoning.close):
        return Lead(content=mark)
    return Lead(reasoning.open[0], reasoning.close[0], content=mark)


def _finder(marks: AbstractSet[str]) -> StopStrings | None:
    return StopStrings(sorted(marks)) if marks else None


class AnswerParser:
    def __init__(
        self, form: AnswerFormat, tools: Tools, *, in_reasoning: bool = False, separate: bool = True
    ) -> None:
        """Begin in reasoning if the prompt does. Without ``separate`` reasoning is content, marks and all."""
        self._form = form
        self._tools = tools
        self._separate = separate or form.complete
        self._text = ""
        self._at = 0  # what is before it has been read
        self._region: Region | None = None
        self._head: list[str] = []  # what opened the region, or will
        self._groups: Mapping[str, str] = {}
        self._body: list[str] = []  # of a call
        self._quoted = False
        self._depth = 0
        self._begun = False
        self._space: list[str] = []  # shown if text of the same kind follows
        self._lead = False  # space before the next text is not shown
        self._layout = False  # nor is space at the end: no text has followed reasoning or a call
        self._spoken = False  # content has begun
        self._shown: dict[Kind, list[str]] = {"content": [], "reasoning": []}
        self.calls: list[ToolCall] = []
        """Calls so far."""
        self._malformed: list[str] = []
        self._pieces: list[Piece] = []
        if in_reasoning and form.reasoning is not None:
            self._enter(form.reasoning, "")

    @property
    def answer(self) -> ParsedAnswer:
        content, reasoning = ("".join(self._shown[kind]) for kind in ("content", "reasoning"))
        return ParsedAnswer(content, reasoning, list(self.calls), list(self._malformed))

    def feed(self, text: str) -> list[Piece]:
        """Add text; return what is certain now."""
        return self._read(text, final=False)

    def end(self, last: str = "") -> list[Piece]:
        """Return the rest; ``last`` is the stop token's text, if it is not a part of the answer's."""
        return self._read(last, final=True)

    def _read(self, text: str, *, final: bool) -> list[Piece]:
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._step(final):
            pass
        if final:
            self._finish()
        pieces, self._pieces = self._pieces, []
        return _merged(pieces)

    def _step(self, final: bool) -> bool:
        """Read up to the next mark; return False if there is none yet."""
        region = self._region
        if region is None:
            return self._outside(final)
        if region.kind == "call":
            return self._in_call(region, final)
        text, mark = self._next(self._form.inside[region], final)
        self._show(self._kind_of(region), text)
        if mark in region.close:
            self._leave(region, mark)
        return bool(mark)

    def _next(self, marks: StopStrings | None, final: bool) -> tuple[str, str]:
        """Return what is certain before the next mark, and the mark or nothing."""
        start = self._at
        end, mark = (len(self._text), "") if marks is None else marks.find(self._text, start)
        if final and not mark:
            end = len(self._text)
        self._at = end + len(mark)
        return self._text[start:end], mark

    def _outside(self, final: bool) -> bool:
        form, start = self._form, self._at
        text, mark = self._next(form.outside, final)
        if form.message:
            return self._header(text, mark)
        if form.bare is not None and not self._spoken:
            rest = text.lstrip(string.whitespace + ";" if self.calls else string.whitespace)
            if not rest or rest.startswith("{"):
                text = text[: len(text) - len(rest)]
                self._space += [text] if text else []
            if rest.startswith("{"):
                self._at = start + len(text)
                self._enter(form.bare, "")
                return True
            text = rest and text
        if not form.complete:
            self._say(text)
        region = form.opens.get(mark)
        if region is not None and region.kind == "reasoning" and self._spoken:
            self._say(mark)
        elif region is not None:
            self._enter(region, mark)
        return bool(mark)

    def _header(self, text: str, mark: str) -> bool:
        """Add to the header of a message, which says what the message is."""
        self._head.append(text)
        if mark == self._form.message:
            form, head = self._form, "".join(self._head)
            recipient = _RECIPIENT.search(head)
            if recipient is not None and form.calls is not None:
                self._enter(form.calls, head + mark)
                self._groups = {"name": recipient[1].removeprefix("functions.")}
            elif recipient is None and head.partition(_CHANNEL)[2].startswith("analysis"):
                self._enter(form.reasoning, head + mark)
            else:
                self._enter(form.content, head + mark)
        elif mark:
            self._say("".join(self._head))
            self._head = []
        return bool(mark)

    def _enter(self, region: Region | None, head: str) -> None:
        self._region, self._head, self._groups = region, [head], {}
        self._body, self._quoted, self._depth, self._begun = [], False, 0, False
        if region is None or region.kind == "call":
            return
        kind = self._kind_of(region)
        if kind == region.kind:
            again = bool(self._shown[kind])
            self._space, self._lead = ["\n"] if again else [], kind == "reasoning" and not again
        else:
            self._show(kind, head)

    def _leave(self, region: Region, mark: str) -> None:
        self._region, self._head = None, [mark] if mark in self._form.starts else []
        if region.kind == "reasoning" and self._separate:
            self._skip_space()
        elif region.kind == "reasoning":
            self._show("content", mark)

    def _in_call(self, region: Region, final: bool) -> bool:
        if self._quoted:
            return self._in_string(final)
        text, mark = self._next(self._form.inside[region], final)
        self._body.append(text)
        if mark == '"':
            self._body.append(mark)
            self._quoted = bool(region.close) or self._depth > 0
        elif mark in _BRACKETS:
            first = not self._begun and not "".join(self._body).strip()
            self._body.append(mark)
            if mark == "{" or (mark == "[" and (first or self._depth)):
                self._depth += 1
            elif mark in "]}" and self._depth:
                self._depth -= 1
                if not self._depth:
                    self._leave_call(region, "")
        elif mark:
            self._leave_call(region, mark, complete=mark in region.close)
        self._begun |= bool(mark)
        return bool(mark)

    def _in_string(self, final: bool) -> bool:
        text, start = self._text, self._at
        found = _IN_STRING.search(text, start)
        end = len(text) if found is None else found.end()
        if found is not None and found.group() == "\\":
            if end == len(text) and not final:
                self._at = end - 1
            else:
                self._at = min(end + 1, len(text))
        else:
            self._at = end
            self._quoted = found is None
        self._body.append(text[start : self._at])
        return found is not None and self._at >= end

    def _leave_call(self, region: Region, mark: str, *, complete: bool = True) -> None:
        form, body = self._form, "".join(self._body)
        written = "".join(self._head) + body + ("" if mark in form.dropped or mark in form.starts else mark)
        self._region, self._head = None, [mark] if mark in form.starts else []
        calls: list[ToolCall] = []
        reason = "it does not end"
        if complete or all(each.plain for each in region.forms):
            try:
                calls = read_calls(region.forms, body, self._tools, self._groups)
            except MalformedError as error:
                reason = str(error)
        if calls:
            calls = [
                each if each.id else msgspec.structs.replace(each, id=form.new_call_id()) for each in calls
            ]
            self.calls += calls
            self._pieces += [Piece("call", call=call) for call in calls]
            self._skip_space()
            return
        if region is not form.bare or '"name"' in body:
            self._malformed.append(reason)
        self._say(written)

    def _skip_space(self) -> None:
        self._space, self._layout = [], True
        self._lead = not self._shown["content"]

    def _kind_of(self, region: Region) -> Kind:
        return region.kind if self._separate else "content"

    def _say(self, text: str) -> None:
        """Show content outside of the regions."""
        self._spoken |= bool(text) and not text.isspace()
        self._show("content", text)

    def _show(self, kind: Kind, text: str) -> None:
        """Show text, but not the space at its end before more follows."""
        if not text or text.isspace():
            self._space += [text] if text else []
            return
        text = "".join((*self._space, text))
        if self._lead:
            text = text.lstrip()
        kept = text.rstrip()
        self._space, self._lead, self._layout = [text[len(kept) :]], False, False
        self._put(kind, kept)

    def _put(self, kind: Kind, text: str) -> None:
        if text:
            self._shown[kind].append(text)
            self._pieces.append(Piece(kind, text))

    def _finish(self) -> None:
        region = self._region
        if region is not None and region.kind == "call":
            self._leave_call(region, "", complete=False)
        elif region is None and self._head:
            self._say("".join(self._head))
        if not self._layout and (region is None or self._kind_of(region) != "reasoning"):
            self._put("content", "".join(self._space))


def _merged(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for kind, group in groupby(pieces, lambda piece: piece.kind):
        found = list(group)
        merged += found if kind == "call" else [Piece(kind, "".join(piece.text for piece in found))]
    return merged


def parser_for(
    tokenizer: TextTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    in_reasoning: bool = False,
    skip_special_tokens: bool = True,
) -> AnswerParser | None:
    """Return a parser of one answer, or None if there is nothing to parse.

    Args:
        tokenizer: the model's, whose chat template ``auto`` looks at.
        tools: OpenAI's; without any, calls are text.
        tool_parser: name of a format, ``auto``, or ``none`` or None for calls as text.
        reasoning_parser: the same for reasoning. Reasoning that stays in the content has no calls, either.
        in_reasoning: :func:`opens_reasoning` of the prompt.
        skip_special_tokens: show no special tokens but those of a malformed call.
    """
    calls = tool_parser if tools and tool_parser != "none" else None
    separate = reasoning_parser not in (None, "none")
    form = _answer_format(tokenizer, calls, reasoning_parser if separate else None, skip_special_tokens)
    if form is None:
        return None
    return AnswerParser(form, declared(tools or ()), in_reasoning=in_reasoning, separate=separate)


def opens_reasoning(
    tokenizer: TextTokenizer, prompt_ids: Sequence[int], reasoning_parser: str | None
) -> bool:
    """Return True if a prompt ends within reasoning, which its template has opened."""
    return lead_of(tokenizer, prompt_ids, reasoning_parser).opened


def lead_of(tokenizer: TextTokenizer, prompt_ids: Sequence[int], reasoning_parser: str | None) -> Lead:
    """Return what may come before the content of the answer to a prompt."""
    name = "auto" if reasoning_parser in (None, "none") else reasoning_parser
    form = _answer_format(tokenizer, None, name, True)
    if form is None or form.reasoning is None:
        return Lead()
    end, lead = tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False), form.lead
    for mark in form.reasoning.open or (lead.opens,):
        _, found, after = end.rpartition(mark)
        if found and not any(other in after for other in (*form.reasoning.close, *tokenizer.special_texts)):
            return replace(lead, opened=True)
    if lead.content and end.endswith(lead.content):
        return Lead()
    return replace(lead, closes="") if lead.closes and end.rstrip().endswith(lead.closes) else lead


@lru_cache(maxsize=16)
def _answer_format(
    tokenizer: TextTokenizer, calls: str | None, reasoning: str | None, skip_special_tokens: bool
) -> AnswerFormat | None:
    templates = tokenizer.chat_templates, tokenizer.response_template
    of_calls = None if calls is None else find_format("call", calls, *templates)
    if of_calls is None and reasoning is None:
        return None
    of_reasoning = find_format("reasoning", reasoning or "auto", *templates)
    if of_calls is None and of_reasoning is None:
        return None
    return AnswerFormat(
        of_calls, of_reasoning, tokenizer.special_texts if skip_special_tokens else frozenset()
    )
