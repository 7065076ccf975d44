"""Grammars for ``SamplingParams.grammar``, made of JSON schemas, regular expressions, choices and tags.

They are text that the engine compiles: nothing here needs llguidance, which says there what it refuses.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .exceptions import InvalidRequest

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between the tokens of JSON: bounded, as a model may repeat it for ever."""
_TEXT = r"/(.|\n)*/"
_ESCAPED = {
    "/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t",
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip

TokenOf = Callable[[str], int | None]
"""Returns the id of a special token, or None for other text."""


def json_schema(schema: Any) -> str:
    """Return the grammar of the JSON values that fit ``schema``, an object, a boolean, or JSON text of one.

    Whitespace is limited to 32 characters in one place, unless the schema's ``x-guidance`` says otherwise.
    """
    return _text(json_schema=_schema("json_schema", schema))


def json_object() -> str:
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of the texts that ``pattern``, in the syntax of Rust's regex crate, matches whole.

    Digits and word characters are those of ASCII, as in patterns of a schema.
    """
    return _lark(f"start: {_regex(_string('regex', pattern))}")


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of one of ``texts``."""
    if isinstance(texts, str) or not texts:
        raise InvalidRequest("choice must be a list of at least one text", field="choice")
    return _lark("start: " + " | ".join(_literal(_string("choice", text)) for text in texts))


def structural_tag(tag: Any) -> str:
    """Return the grammar of text with structures in it, as vLLM and SGLang write them, or JSON text of that.

    Either ``structures`` (``begin``, ``schema``, ``end``) that may begin with their ``triggers``, or a
    ``format`` of ``const_string``, ``any_text``, ``json_schema``, ``regex``, ``sequence``, ``or``, ``tag``
    and ``triggered_tags``.
    """
    found = _object("structural_tag", tag)
    if "structures" in found:
        tags = [
            {
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema")},
                "end": each.get("end"),
            }
            for each in _objects("structures", found["structures"])
        ]
        found = {"type": "triggered_tags", "triggers": found.get("triggers"), "tags": tags}
    else:
        found = _object("format", found.get("format"))
    rules: list[str] = []
    start = _format(found, rules)
    return _lark("\n".join([f"start: {start}", *rules]))


def _format(given: Mapping[str, Any], rules: list[str]) -> str:
    """Return an expression of Lark for one ``format``; rules that it needs are appended to ``rules``."""
    kind = given.get("type")
    if kind == "const_string":
        return _literal(_string("value", given.get("value")))
    if kind == "any_text":
        return _text_rule(rules)
    if kind == "regex":
        return _regex(_string("pattern", given.get("pattern")))
    if kind == "json_schema":
        return f"%json {json.dumps(_schema('json_schema', given.get('json_schema')))}"
    if kind in ("sequence", "or"):
        parts = [_format(each, rules) for each in _objects("elements", given.get("elements"))]
        return f"({(' ' if kind == 'sequence' else ' | ').join(parts)})"
    if kind == "tag":
        begin, end = (_string(name, given.get(name)) for name in ("begin", "end"))
        return _tag(begin, _object("content", given.get("content")), end, rules)
    if kind == "triggered_tags":
        return _triggered(given, rules)
    raise InvalidRequest(f"structural_tag: the format {kind!r} is not supported", field="structural_tag")


def _triggered(given: Mapping[str, Any], rules: list[str]) -> str:
    options = []
    triggers = [_string("triggers", each) for each in given.get("triggers") or ()]
    for each in _objects("tags", given.get("tags")):
        begin, end = (_string(name, each.get(name)) for name in ("begin", "end"))
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            reason = f"structural_tag: {begin!r} begins with none of triggers"
            raise InvalidRequest(reason, field="structural_tag")
        body = _tag(begin[len(trigger) :], _object("content", each.get("content")), end, rules)
        name = f"trigger_{len(rules)}"
        rules.append(f"{name}[lazy]: {_TEXT} {_literal(trigger)}")
        options.append(f"{name} {body}")
    tags = f"({' | '.join(options)})"
    if given.get("stop_after_first"):
        return tags
    count = "+" if given.get("at_least_one") else "*"
    return f"{tags}{count} {_text_rule(rules)}"


def _tag(begin: str, content: Mapping[str, Any], end: str, rules: list[str]) -> str:
    name = f"tag_{len(rules)}"
    rules.append("")  # its place: the content may need rules, too
    at = len(rules) - 1
    rules[at] = f"{name}: {_literal(begin)} {_format(content, rules)} {_literal(end)}"
    return name


def _text_rule(rules: list[str]) -> str:
    if (rule := f"TEXT: {_TEXT}") not in rules:
        rules.append(rule)
    return "TEXT"


def grammar_for_tools(
    format: str,
    tools: Sequence[Mapping[str, Any]],
    choice: Any = "required",
    *,
    parallel: bool = True,
    thought: tuple[str, str] | None = None,
    token_of: TokenOf = lambda text: None,
) -> str:
    """Return the grammar of calls of ``tools`` (OpenAI's form), in the ``format`` of a parser of answers.

    ``choice``: ``required``, or OpenAI's form of the one function to call. ``thought``: the marks of the
    reasoning that may come first; an empty opening one is in the prompt. Raises InvalidRequest.
    """
    functions = [_object("function", each.get("function")) for each in tools]
    if choice != "required":
        name = _object("function", _object("tool_choice", choice).get("function")).get("name")
        functions = [each for each in functions if each.get("name") == name]
        if not functions:
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}", field="tool_choice")
    if not functions:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if format not in _CALLS:
        known = ", ".join(sorted(_CALLS))
        reason = f"tool_choice {choice!r} is not supported with calls in the form {format!r}, only {known}"
        raise InvalidRequest(reason, field="tool_choice")
    key, begin, end, opened, between, closed = _CALLS[format]
    rules = []
    for at, function in enumerate(functions):
        name = json.dumps(_string("name", function.get("name")), ensure_ascii=False)
        schema = function.get("parameters") or {"type": "object"}
        head = _literal(f'{{"name": {name}, "{key}": ')
        rules.append(f"call_{at}: {head} %json {json.dumps(_schema('parameters', schema))} {_literal('}')}")

    def marker(text: str) -> str:
        found = re.match(r"<[^>]+>|\[[A-Z_]+\]", text)
        token = None if found is None else token_of(found[0])
        if found is None or token is None:
            return _literal(text)
        return f"<[{token}]> {_literal(text[found.end() :])}"

    def closing(text: str) -> str:
        rest = text.lstrip("\n")
        return f"{_literal(text[: len(text) - len(rest)])} {marker(rest)}" if rest != text else marker(text)

    one = f"{marker(opened)} any_call {closing(closed)}"
    more = f" ({_literal(between)} one_call)*" if parallel and between else ""
    calls = " | ".join(f"call_{at}" for at in range(len(functions)))
    before = ""
    if thought is not None:
        opens, closes = thought
        if token_of(closes) is None:
            rules.append(f"thought[lazy]: {_TEXT} {_literal(closes)}")
            before = "thought SPACE"
        else:
            before = f"{_text_rule(rules)} {marker(closes)} SPACE"
        rules.append(r"SPACE: /\s*/")
        before = f"({marker(opens)} {before})?" if opens else before
    start = f"start: {before} {marker(begin)} one_call{more} {closing(end)}"
    return _lark("\n".join([start, f"one_call: {one}", f"any_call: {calls}", *rules]))


_CALLS = {
    "hermes": ("arguments", "", "", "<tool_call>\n", "\n", "\n</tool_call>"),
    "qwen": ("arguments", "", "", "<tool_call>\n", "\n", "\n</tool_call>"),
    "llama3": ("parameters", "", "", "", "", ""),
    "mistral": ("arguments", "[TOOL_CALLS][", "]", "", ", ", ""),
}
"""Key of the arguments, what is around all calls, and before, between and behind each, by format."""


def _schema(field: str, schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    found = _object(field, schema)
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **found}


def _object(field: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not JSON: {error}", field=field) from error
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field} must be an object", field=field)
    return dict(value)


def _objects(field: str, values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InvalidRequest(f"{field} must be a list of at least one object", field=field)
    return [_object(field, each) for each in values]


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a text", field=field)
    return value


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """Return ``pattern`` as Lark writes it. It matches whole texts anyway, so its anchors are left out."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    if body != pattern and (len(body) - len(body.rstrip("\\"))) % 2 == 0:
        pattern = body
    escaped = re.sub(
        r"\\.|[/\n\r\t]", lambda found: _ESCAPED.get(found[0], found[0]), pattern, flags=re.DOTALL
    )
    return f"/{escaped}/"


def _lark(text: str) -> str:
    return _text(lark_grammar=f"%llguidance {{}}\n{text}\n")


def _text(**grammar: Any) -> str:
    try:
        return json.dumps({"grammars": [grammar]}, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"a grammar is not JSON: {error}", field="grammar") from error
