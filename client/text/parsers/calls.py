"""Tool calls as their format writes them, read and compared with the tools that are declared.

Invariants: arguments are a JSON object, given back as the model wrote it where it wrote JSON. A format
without types takes them from the tool's schema. A call that cannot be read, or whose function is not
declared, is :class:`MalformedError`, with the reason.
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ....io_struct.field_errors import shown
from ...schemas import kinds_of
from .patterns import Pattern

T = TypeVar("T")
Tools = Mapping[str, Mapping[str, Any]]
"""Schema of the parameters of each declared function."""
NOTHING = Pattern("")
_LITERALS = {"True": True, "False": False, "None": None}
_KEY = re.compile(r"(?<=[{,])(\s*)(\w+)(?=\s*:)")
_STRINGS = ("true", "string")
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class MalformedError(ValueError):
    """The text is no call of a declared function."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call; ``arguments`` is a JSON object as text, ``id`` what the model wrote, if it did."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a format writes the inside of a call: ``header``, then JSON, or ``tags`` that each are an argument.

    Attributes:
        name, arguments: where they are: a group of the header, or members of the JSON, ``content.function``.
            Of several places the first that exists counts.
        tail: text that may follow the arguments; None allows any beside tags.
        unquoted_keys, string_delimiters: of JSON that is not quite JSON.
        escaped: names and keys are attributes in which ``&quot;`` and ``&amp;`` stand for ``"`` and ``&``.

    A tag may say by its group ``kind`` that its value is a string (``true``, ``string``), or else JSON.
    """

    header: Pattern = NOTHING
    tags: Pattern | None = None
    tail: str | None = None
    name: str = "content.name"
    arguments: tuple[str, ...] = ("content.arguments",)
    unquoted_keys: bool = False
    escaped: bool = False
    string_delimiters: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> bool:
        """True if the inside is JSON, whose strings may contain anything."""
        return self.tags is None and not self.string_delimiters

    @property
    def literals(self) -> frozenset[str]:
        """Texts that are read in the inside of a call."""
        return self.header.literals.union(self.tags.literals if self.tags else (), *self.string_delimiters)


def declared(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of OpenAI's tools by name; what has no name is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def read_calls(
    forms: Sequence[CallForm], body: str, tools: Tools, known: Mapping[str, str]
) -> list[ToolCall]:
    """Return the calls of a body, at least one, by the first form whose header it has.

    ``known`` are groups of what stands before it.
    """
    matches = ((each, match) for each in forms if (match := each.header.match(body)) is not None)
    form, found = next(matches, (None, None))
    if form is None or found is None:
        raise MalformedError("it names no function")
    groups, end = {**known, **found[0]}, found[1]
    text = body[end:].strip()
    if "id" in groups and "name" not in groups:  # functions.get_weather:0
        identity, colon, number = groups["id"].strip().rpartition(":")
        if not colon or not number.isdecimal():
            raise MalformedError(f"its id {shown(groups['id'])} has no function and number")
        groups |= {"id": groups["id"].strip(), "name": identity.removeprefix("functions.")}
    if form.escaped:
        groups = {key: _unescaped(value) for key, value in groups.items()}
    if form.tags is not None:
        parameters = tools.get(groups.get("name", "").strip(), {})
        text = msgspec.json.encode(_tagged(form, text, parameters)).decode()
    elif form.string_delimiters or form.unquoted_keys:
        text = _as_json(form, text)
    elif form.tail:
        text = text.removesuffix(form.tail).rstrip()
    several = text.startswith("[") and form.name.startswith("content.")
    values = [_raw(each) for each in _json(text, list[msgspec.Raw])] if several else [text]
    if not values:
        raise MalformedError("it has no call")
    return [_call(form, value, tools, groups) for value in values]


def _call(form: CallForm, value: str, tools: Tools, groups: Mapping[str, str]) -> ToolCall:
    name = groups.get(form.name)
    if name is None:
        written = _at(form.name, value)
        name = None if written is None else _json(written, str)
    if not name or not name.strip():
        raise MalformedError("it names no function")
    name = name.strip()
    if name not in tools:
        raise MalformedError(f"{shown(name)} is no declared function")
    arguments = next((found for path in form.arguments if (found := _at(path, value)) is not None), "{}")
    _json(arguments, dict[str, Any])
    return ToolCall(name=name, arguments=arguments, id=groups.get("id", ""))


def _at(path: str, value: str) -> str | None:
    """Return the JSON at ``content``, ``content.function``, … of a value; None if there is no such member."""
    for key in path.split(".")[1:]:
        members = _json(value, dict[str, msgspec.Raw])
        if key not in members:
            return None
        value = _raw(members[key])
    return value


def _raw(value: msgspec.Raw) -> str:
    return bytes(value).decode()


def _json(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise MalformedError(f"its JSON has another form: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"it is not JSON: {error}") from error


def _unescaped(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def _tagged(form: CallForm, text: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    assert form.tags is not None
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    values: dict[str, Any] = {}
    at, between = 0, []
    while (begin := text.find(form.tags.begin, at)) >= 0:
        found = form.tags.match(text, begin)
        if found is None:
            raise MalformedError(f"an argument after {len(values)} others does not end")
        between.append(text[at:begin])
        groups, at = found
        key = _unescaped(groups["key"]) if form.escaped else groups["key"].strip()
        if (kind := groups.get("kind")) is None:
            values[key] = _typed(groups["value"], kinds_of(properties.get(key), parameters))
        elif kind in _STRINGS:
            values[key] = groups["value"]
        else:
            values[key] = _typed(groups["value"], _KINDS.keys())
    between.append(text[at:])
    if form.tail is not None and "".join(between).strip() not in ("", form.tail):
        raise MalformedError(f"it has text outside of its arguments: {shown(''.join(between).strip())}")
    return values


def _typed(text: str, kinds: AbstractSet[str]) -> Any:
    """Return an argument written without a type as one of the ``kinds`` of its schema, else as a string."""
    wanted = [kind for name in kinds for kind in _KINDS.get(name, ())]
    if "string" in kinds:
        wanted = [type(None)] if "null" in kinds else []
    elif not kinds:
        wanted = [dict, list]
    if not wanted:
        return text
    try:
        bare = text.strip()
        value = _LITERALS[bare] if bare in _LITERALS else msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and float not in wanted:
        value = int(value)
    return value if type(value) in wanted else text


def _as_json(form: CallForm, text: str) -> str:
    """Return JSON for text with other string delimiters and bare keys."""
    closings = dict(form.string_delimiters or [('"', '"')])
    opening = re.compile("|".join(map(re.escape, closings)))
    parts, at = [], 0
    while True:
        begun = opening.search(text, at)
        outside = text[at : begun and begun.start()]
        parts.append(_KEY.sub(r'\1"\2"', outside) if form.unquoted_keys else outside)
        if begun is None:
            return "".join(parts)
        closing = closings[begun.group()]
        end = text.find(closing, begun.end())
        if end < 0:
            raise MalformedError("a string in it does not end")
        parts.append(msgspec.json.encode(text[begun.end() : end]).decode())
        at = end + len(closing)
