"""Formats of answers: where reasoning and tool calls stand in a model's text.

Invariants: a format is data. :data:`TOOL_FORMATS` and :data:`REASONING_FORMATS` have those by name, with
the names that SGLang and vLLM give them; the ``response_template`` of a tokenizer's configuration becomes
one, too. ``auto`` takes that template, else the first format whose marks the chat template has.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ....io_struct.field_errors import shown
from ...exceptions import InvalidRequest
from ...grammar import Lead
from .calls import CallForm
from .patterns import Pattern, UnsupportedError, heads

_log = logging.getLogger(__name__)
Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Text between two marks; a call without ``close`` ends where its JSON does."""

    kind: Kind
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    forms: tuple[CallForm, ...] = ()
    """Forms of a call's inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Regions of an answer; outside of them is content.

    Attributes:
        dropped: marks that are not shown, such as those around a list of calls.
        bare: a call that begins an answer without a mark, as a JSON object.
        hidden: nothing outside of the regions is shown.
        message: mark that ends the header of each part of an answer, whose channel says what the part is, and
            whose recipient which function it calls (gpt-oss).
        starts: marks that begin such a header.
        short_ids: identifiers of calls have nine characters, on which the chat template insists.
        lead: what a grammar finds before the content, if the regions do not say it.
    """

    regions: tuple[Region, ...]
    dropped: tuple[str, ...] = ()
    bare: Region | None = None
    hidden: bool = False
    message: str = ""
    starts: tuple[str, ...] = ()
    short_ids: bool = False
    lead: Lead | None = None


def _call(opening: str, closing: str, *forms: CallForm) -> Region:
    return Region(kind="call", open=(opening,), close=(closing,) if closing else (), forms=forms)


def _reasoning(opening: str, closing: str, *dropped: str) -> Format:
    return Format(regions=(Region(kind="reasoning", open=(opening,), close=(closing,)),), dropped=dropped)


_named = partial(CallForm, name="name", arguments=("content",))
"""Form of a call whose header has the name, so that all the rest are the arguments."""
_PARAMETERS = CallForm(arguments=("content.parameters", "content.arguments"))
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", *_STARTS)
_HARMONY = Format(
    regions=(
        Region(kind="reasoning", close=_ENDS),
        Region(kind="content", close=_ENDS),
        Region(kind="call", close=_ENDS, forms=(_named(),)),
    ),
    message="<|message|>",
    starts=_STARTS,
    lead=Lead(
        opens="<|channel|>analysis<|message|>",
        closes="<|end|><|start|>assistant",
        again=True,
        content="<|channel|>final<|message|>",
    ),
)
_FENCED = _named(header=Pattern(r"function<｜tool▁sep｜>(?P<name>[^<\n]+)\n```json\n"), tail="```")
_UNFENCED = _named(header=Pattern(r"(?P<name>[^<\n]+)<｜tool▁sep｜>"))
_K3_DROPPED = (
    "<|end_of_msg|>",
    *(f"<|{edge}|>{name}<|sep|>" for edge in ("open", "close") for name in ("response", "tools", "message")),
)


def _deepseek(*forms: CallForm) -> Format:
    return Format(
        regions=(_call("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", *forms),),
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


def _dsml(around: str) -> Format:
    """Return the format of DeepSeek's markup whose calls are in an element ``around``."""
    form = _named(
        header=Pattern(r'(?P<name>[^"]+)">'),
        tags=Pattern(
            r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<kind>[^"]+)">'
            r"(?P<value>.*?)</｜DSML｜parameter>"
        ),
        tail="",
    )
    return Format(
        regions=(_call('<｜DSML｜invoke name="', "</｜DSML｜invoke>", form),),
        dropped=(f"<｜DSML｜{around}>", f"</｜DSML｜{around}>"),
    )


_TOOL_FORMATS = {
    "kimi_k2": Format(
        regions=(
            _call(
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                _named(header=Pattern(r"(?P<id>[^<]+)<\|tool_call_argument_begin\|>")),
            ),
        ),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek_v3 deepseekv3": _deepseek(_FENCED, _UNFENCED),
    "deepseek_v31 deepseekv31": _deepseek(_UNFENCED, _FENCED),
    "deepseek_v32 deepseekv32": _dsml("function_calls"),
    "deepseek_v4 deepseekv4": _dsml("tool_calls"),
    "kimi_k3": Format(
        regions=(
            _call(
                "<|open|>call",
                "<|close|>call<|sep|>",
                _named(
                    header=Pattern(r' tool="(?P<name>[^"]+)"[^<]*<\|sep\|>'),
                    tags=Pattern(
                        r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<kind>[^"]+)"<\|sep\|>'
                        r"(?P<value>.*?)<\|close\|>argument<\|sep\|>"
                    ),
                    tail="",
                    escaped=True,
                ),
            ),
        ),
        dropped=_K3_DROPPED,
    ),
    "mistral": Format(
        regions=(
            _call(
                "[TOOL_CALLS]",
                "",
                _named(header=Pattern(r"\s*(?P<name>[^\s\[{]+)\[CALL_ID\](?P<id>\w+)\[ARGS\]")),
                _named(header=Pattern(r"\s*(?P<name>[^\s\[{]+)\[ARGS\]")),
                _named(header=Pattern(r"\s*(?P<name>[^\s\[{]+)\s*")),
                CallForm(),
            ),
        ),
        short_ids=True,
    ),
    "gpt-oss openai": _HARMONY,
    "glm45 glm47": Format(
        regions=(
            _call(
                "<tool_call>",
                "</tool_call>",
                _named(
                    header=Pattern(r"\s*(?P<name>[^<\n]+)"),
                    tags=Pattern(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
                    tail="",
                ),
            ),
        ),
    ),
    "qwen3_coder qwen3_xml": Format(
        regions=(
            _call(
                "<tool_call>",
                "</tool_call>",
                _named(
                    header=Pattern(r"\s*<function=(?P<name>[^<>\n]+)>"),
                    tags=Pattern(r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
                    tail="</function>",
                ),
            ),
        ),
    ),
    "hermes qwen qwen25": Format(regions=(_call("<tool_call>", "</tool_call>", CallForm()),)),
    "llama3 llama3_json": Format(
        regions=(_call("<|python_tag|>", "", _PARAMETERS),), bare=_call("", "", _PARAMETERS)
    ),
}
_REASONING_FORMATS = {
    "gpt-oss openai_gptoss": _HARMONY,
    "mistral": _reasoning("[THINK]", "[/THINK]"),
    "kimi_k3": replace(
        _reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>", *_K3_DROPPED),
        lead=Lead("<|open|>think<|sep|>", "<|close|>think<|sep|>", content="<|open|>response<|sep|>"),
    ),
    "think qwen3 deepseek-r1 deepseek_r1 deepseek-v3 deepseek_v3 glm45 kimi_k2": _reasoning(
        "<think>", "</think>"
    ),
}


def _by_each_name(formats: Mapping[str, Format]) -> dict[str, Format]:
    return {name: each for names, each in formats.items() for name in names.split()}


TOOL_FORMATS = _by_each_name(_TOOL_FORMATS)
REASONING_FORMATS = _by_each_name(_REASONING_FORMATS)
_TOOL_MARKS = {
    ("<|tool_call_argument_begin|>",): "kimi_k2",
    ("<|open|>",): "kimi_k3",
    ("｜DSML｜", "function_calls"): "deepseek_v32",
    ("｜DSML｜",): "deepseek_v4",
    ("<｜tool▁sep｜>", "```json"): "deepseek_v3",
    ("<｜tool▁sep｜>",): "deepseek_v31",
    ("[TOOL_CALLS]",): "mistral",
    ("<|channel|>",): "gpt-oss",
    ("<arg_key>",): "glm45",
    ("<function=",): "qwen3_coder",
    ("<tool_call>",): "hermes",
    ("<|python_tag|>",): "llama3",
    ('"parameters": ',): "llama3",
}
_REASONING_MARKS = {
    ("<|channel|>",): "gpt-oss",
    ("<|open|>",): "kimi_k3",
    ("[THINK]",): "mistral",
    ("<think>",): "think",
    ("</think>",): "think",
}


_FIELDS: dict[str, Kind] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "call",
}
_SPACE = ("", r"\s*", r"\s+", r"\n?", r"\n*")


def find_format(
    kind: Kind, name: str, chat_template: str, response_template: Mapping[str, Any] | None
) -> Format | None:
    """Return the format called ``name`` for calls or reasoning, or the one that ``auto`` finds, or None."""
    known, marks = (TOOL_FORMATS, _TOOL_MARKS) if kind == "call" else (REASONING_FORMATS, _REASONING_MARKS)
    if name != "auto":
        if name not in known:
            field = "tool_call_parser" if kind == "call" else "reasoning_parser"
            raise InvalidRequest(f"{field} {shown(name)} is not known: {', '.join(known)}", field=field)
        return known[name]
    if response_template is not None:
        try:
            given = from_response_template(response_template)
        except (UnsupportedError, AttributeError, KeyError, TypeError) as error:
            _log.warning("the tokenizer's response_template is not used: %s", error)
        else:
            if any(region.kind == kind for region in given.regions):
                return given
    found = next(
        (name for shown, name in marks.items() if all(mark in chat_template for mark in shown)), None
    )
    return None if found is None else known[found]


def name_of(form: Format) -> str:
    """Return the first name of a format of calls."""
    return next((name for name, each in TOOL_FORMATS.items() if each is form), "response_template")


def from_response_template(template: Mapping[str, Any]) -> Format:
    """Return the format that transformers' ``response_template`` describes; UnsupportedError if it cannot.

    https://huggingface.co/docs/transformers/main/chat_response_parsing describes its fields. Their patterns
    must be :class:`Pattern`; a field with another name than an answer's parts is not supported, nor is
    ``content`` other than ``text``, ``json`` and ``xml-inline``.
    """
    if template.get("version", 1) != 1:
        raise UnsupportedError(f"its version is {template['version']!r}")
    regions: list[Region] = []
    dropped: tuple[str, ...] = ()
    hidden = True
    for name, field in template["fields"].items():
        if name not in _FIELDS:
            raise UnsupportedError(f"it has a field {name!r}")
        kind, close = _FIELDS[name], _closing(field)
        if "open" in field:
            opening, header = _literals(field["open"]), ""
        elif "open_pattern" in field:
            opening, header = heads(field["open_pattern"])
        elif kind == "content":
            hidden, dropped = False, close
            continue
        else:
            raise UnsupportedError(f"{name} has no beginning")
        if kind != "call" and header not in _SPACE:
            raise UnsupportedError(f"{name} begins with more than a literal: {header!r}")
        forms = (_call_form(field, Pattern(header)),) if kind == "call" else ()
        regions.append(Region(kind=kind, open=opening, close=close, forms=forms))
    return Format(regions=tuple(regions), dropped=dropped, hidden=hidden)


def _literals(written: str | list[str]) -> tuple[str, ...]:
    return (written,) if isinstance(written, str) else tuple(written)


def _closing(field: Mapping[str, Any]) -> tuple[str, ...]:
    if "close_pattern" not in field:
        return _literals(field.get("close", []))
    pattern = field["close_pattern"].removesuffix("|$").removeprefix(r"\s*").removeprefix(r"\n?")
    close, rest = heads(pattern)
    if rest not in _SPACE:
        raise UnsupportedError(f"a field ends with more than a literal: {pattern!r}")
    return close


def _call_form(field: Mapping[str, Any], header: Pattern) -> CallForm:
    content, options = field.get("content", "text"), field.get("content_args", {})
    if content not in ("json", "xml-inline"):
        raise UnsupportedError(f"its calls are {content!r}")
    tags = Pattern(options["tag_pattern"]) if content == "xml-inline" else None
    if tags is not None and not (tags.begin and tags.names >= {"key", "value"}):
        raise UnsupportedError(f"{options['tag_pattern']!r} does not begin with a literal")
    function = field["transform"]["function"]
    places = {"name": "{content.name}", "arguments": "{content.arguments}"}
    name, arguments = (
        place
        if (place := (places if function == "{content}" else function)[key].strip("{}")) in header.names
        or place.partition(".")[0] == "content"
        else f"content.{place}"
        for key in ("name", "arguments")
    )
    return CallForm(
        header=header,
        tags=tags,
        name=name,
        arguments=(arguments,),
        unquoted_keys=bool(options.get("unquoted_keys")),
        string_delimiters=tuple((begin, end) for begin, end in options.get("string_delims", ())),
    )
