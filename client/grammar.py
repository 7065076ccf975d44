"""Grammars for ``SamplingParams.grammar``, made of JSON schemas, regular expressions, choices and tags.

They are text that the engine compiles: nothing here needs llguidance, which says there what it refuses.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .exceptions import InvalidRequest
from .schemas import KINDS, choices_of, kinds_of, resolved

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between the tokens of JSON: bounded, as a model may repeat it for ever."""
_TEXT = r"/(.|\n)*/"
_ESCAPED = {
    "/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t",
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip

_SPACE = r"/[ \t\r\n]{0,8}/"
_LINE = r'"\n"?'
_MARK = re.compile(r"｜DSML｜|<(?!/?｜DSML)[^<>$]+>|\[/?[A-Z_]+\]")
"""Marks that may be special tokens."""
_PIECES = re.compile(rf"(\$\w+|{_MARK.pattern})")
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OBJECT_KEYWORDS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id",
    "x-guidance",
}  # fmt: skip
"""Keywords of parameters that calls with an element for each argument can keep to."""
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose members are schemas by name."""
_NOT_OF_STRINGS = {"format", "contentEncoding", "contentMediaType", "allOf", "not", "if"}
"""Keywords that cannot be enforced for strings without quotes."""

TokenOf = Callable[[str], int | None]
"""Returns the id of a special token, or None for other text."""


def json_schema(schema: Any) -> str:
    """Return the grammar of the JSON values that fit ``schema``, an object, a boolean, or JSON text of one.

    Whitespace is limited to 32 characters in one place, unless the schema's ``x-guidance`` says otherwise.
    """
    return _text({"json_schema": _schema("json_schema", schema)})


def json_object() -> str:
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of the texts that ``pattern``, in the syntax of Rust's regex crate, matches whole.

    Digits and word characters are those of ASCII, as in patterns of a schema.
    """
    return _text(_lark(f"start: {_regex(_string('regex', pattern))}"))


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of one of ``texts``."""
    if isinstance(texts, str) or not texts:
        raise InvalidRequest("choice must be a list of at least one text", field="choice")
    return _text(_lark("start: " + " | ".join(_literal(_string("choice", text)) for text in texts)))


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
    rules = _Rules()
    return _text(rules.grammar(_format(found, rules)))


class _Rules:
    """Rules of a Lark grammar, equal ones once, and expressions that need them."""

    def __init__(self, token_of: TokenOf = lambda text: None) -> None:
        self._token_of = token_of
        self._names: dict[str, str] = {}

    def grammar(self, *start: str) -> dict[str, str]:
        """Return the grammar of expressions that follow each other."""
        rules = [f"start: {' '.join(start)}", *(f"{name}{body}" for body, name in self._names.items())]
        return _lark("\n".join(rules))

    def rule(self, expression: str, *, lazy: bool = False) -> str:
        """Return the name of the rule of an expression; a ``lazy`` one ends as early as it can."""
        return self._named(f"[lazy]: {expression}" if lazy else f": {expression}", "rule")

    def terminal(self, expression: str) -> str:
        return self._named(f": {expression}", "TERMINAL")

    def _named(self, body: str, kind: str) -> str:
        return self._names.setdefault(body, f"{kind}_{len(self._names)}")

    def written(self, text: str, texts: Mapping[str, str] = {}, /, **rules: str) -> str:
        """Return the expression of a text, in which ``$name`` is one of ``texts``, or of the ``rules``.

        Marks that are special tokens stand for the token, which a model writes in no other way.
        """
        parts, literal = [], ""
        for piece in _PIECES.split(text):
            name = piece[1:] if piece.startswith("$") else ""
            token = self._token_of(piece) if _MARK.fullmatch(piece) else None
            if name in texts or (token is None and name not in rules):
                literal += texts.get(name, piece)
                continue
            parts += [_literal(literal)] if literal else []
            parts.append(f"<[{token}]>" if token is not None else rules[name])
            literal = ""
        return " ".join([*parts, _literal(literal)] if literal else parts)

    def until(self, mark: str, text: str = _TEXT, **rules: str) -> str:
        """Return the expression of ``text``, up to the ``mark`` that ends it, and of the mark."""
        pieces = _PIECES.split(mark)
        count = next(
            (
                at
                for at, piece in enumerate(pieces)
                if piece.startswith("$") or (_MARK.fullmatch(piece) and self._token_of(piece) is not None)
            ),
            len(pieces),
        )
        literal, rest = "".join(pieces[:count]), "".join(pieces[count:])
        if rest and not rest.startswith("$"):
            literal = f" {_literal(literal)}" if literal else ""
            return f"{self.terminal(f'{text}{literal}')} {self.written(rest, **rules)}"
        ended = self.rule(f"{text} {_literal(literal)}", lazy=True)
        return f"{ended} {self.written(rest, **rules)}" if rest else ended


def _format(given: Mapping[str, Any], rules: _Rules) -> str:
    """Return an expression of Lark for one ``format``."""
    kind = given.get("type")
    if kind == "const_string":
        return _literal(_string("value", given.get("value")))
    if kind == "any_text":
        return rules.terminal(_TEXT)
    if kind == "regex":
        return _regex(_string("pattern", given.get("pattern")))
    if kind == "json_schema":
        return _json_rule(given.get("json_schema"), "json_schema")
    if kind in ("sequence", "or"):
        parts = [_format(each, rules) for each in _objects("elements", given.get("elements"))]
        return f"({(' ' if kind == 'sequence' else ' | ').join(parts)})"
    if kind == "tag":
        begin, end = (_string(name, given.get(name)) for name in ("begin", "end"))
        return _tag(begin, _object("content", given.get("content")), end, rules)
    if kind == "triggered_tags":
        return _triggered(given, rules)
    raise InvalidRequest(f"structural_tag: the format {kind!r} is not supported", field="structural_tag")


def _triggered(given: Mapping[str, Any], rules: _Rules) -> str:
    options = []
    triggers = [_string("triggers", each) for each in given.get("triggers") or ()]
    for each in _objects("tags", given.get("tags")):
        begin, end = (_string(name, each.get(name)) for name in ("begin", "end"))
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            reason = f"structural_tag: {begin!r} begins with none of triggers"
            raise InvalidRequest(reason, field="structural_tag")
        body = _tag(begin[len(trigger) :], _object("content", each.get("content")), end, rules)
        options.append(f"{rules.until(trigger)} {body}")
    tags = f"({' | '.join(options)})"
    if given.get("stop_after_first"):
        return tags
    count = "+" if given.get("at_least_one") else "*"
    return f"{tags}{count} {rules.terminal(_TEXT)}"


def _tag(begin: str, content: Mapping[str, Any], end: str, rules: _Rules) -> str:
    return rules.rule(f"{_literal(begin)} {_format(content, rules)} {_literal(end)}")


@dataclass(frozen=True, slots=True)
class Lead:
    """Text before the part of an answer that a grammar describes.

    Attributes:
        opens, closes: marks of thoughts, which a model may leave out; empty if there are none.
        opened: the prompt has opened them.
        again: thoughts may follow thoughts.
        content: mark of what comes after them, empty if there is none.
    """

    opens: str = ""
    closes: str = ""
    opened: bool = False
    again: bool = False
    content: str = ""


def after_thoughts(text: str, lead: Lead, token_of: TokenOf = lambda text: None) -> str:
    """Return the grammar of thoughts, the mark of the content and then ``text``, a grammar in any form."""
    rules = _Rules(token_of)
    before = [_thoughts(lead, rules), rules.written(lead.content)]
    if not any(before):
        return text
    if text.lstrip().startswith("{"):
        body, *others = _objects("grammar.grammars", _object("grammar", text).get("grammars"))
    else:
        body, others = {"gbnf" if "::=" in text else "lark_grammar": text}, []
    name = body.setdefault("name", "after_thoughts")
    return _text(rules.grammar(*before, f"@{name}"), body, *others)


def _thoughts(lead: Lead, rules: _Rules) -> str:
    if not lead.closes:
        return ""
    space = "" if lead.content else "$space"
    thought = rules.until(lead.closes + space, space=_SPACE)
    written = f"({rules.written(lead.opens)} {thought})"
    if lead.opened:
        return f"{thought} {written}*" if lead.again else thought
    return f"{written}*" if lead.again else f"{written}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a format writes calls: texts in which ``$name``, ``$arguments``, ``$key``, … are parts of a call.

    Attributes:
        begin, between, end: text around the calls, and between two; there is one call at most if it is None.
        said: mark that ends the content, where content must come before calls.
        argument, closing: text before and behind an argument's value, in a format that does not write JSON.
        kinds: ``$kind`` of a string and of other values, where an argument says which it is; None in place of
            the latter is the name of the value's type.
        quote: writes a name; ``names`` matches those that can be written.
    """

    call: str
    begin: str = ""
    between: str | None = ""
    end: str = ""
    said: str = ""
    argument: str = ""
    closing: str = ""
    kinds: tuple[str, str | None] | None = None
    quote: Callable[[str], str] = str
    names: re.Pattern[str] = re.compile(r'[^\s<>"]([^<>\n"]*[^\s<>"])?')


_quoted = partial(json.dumps, ensure_ascii=False)
_ANY = re.compile(r"(?s).*\S.*")
_JSON_CALL = '{"name": $name, "arguments": $arguments}'


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _dsml(around: str) -> _Form:
    return _Form(
        begin=f"<｜DSML｜{around}>\n",
        call='<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>\n',
        end=f"</｜DSML｜{around}>",
        argument='<｜DSML｜parameter name="$key" string="$kind">',
        closing="</｜DSML｜parameter>\n",
        kinds=("true", "false"),
    )


_FORMS = {
    "hermes": _Form(call=f"<tool_call>\n{_JSON_CALL}\n</tool_call>", between="\n", quote=_quoted, names=_ANY),
    "llama3": _Form(
        call='{"name": $name, "parameters": $arguments}', between=None, quote=_quoted, names=_ANY
    ),
    "mistral": _Form(
        begin="[TOOL_CALLS][", call=_JSON_CALL, between=", ", end="]", quote=_quoted, names=_ANY
    ),
    "deepseek_v3": _Form(
        begin="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _Form(
        begin="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": _Form(
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments"
        "<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    "kimi_k3": _Form(
        said="<|close|>response<|sep|>",
        begin="<|open|>tools<|sep|>",
        call='<|open|>call tool="$name" index="$number"<|sep|>$arguments<|close|>call<|sep|>',
        end="<|close|>tools<|sep|><|close|>message<|sep|>",
        argument='<|open|>argument key="$key" type="$kind"<|sep|>',
        closing="<|close|>argument<|sep|>",
        kinds=("string", None),
        quote=_attribute,
        names=_ANY,
    ),
    "glm45": _Form(
        call="<tool_call>$name$line$arguments</tool_call>",
        between="\n",
        argument="<arg_key>$key</arg_key>$line<arg_value>",
        closing="</arg_value>$line",
    ),
    "qwen3_coder": _Form(
        call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
        between="\n",
        argument="<parameter=$key>\n",
        closing="\n</parameter>\n",
    ),
    "gpt-oss": _Form(
        call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
        between=None,
        names=re.compile(r'[^\s<>"]+'),
    ),
}
_FORMS["qwen"] = _FORMS["hermes"]
_MISTRAL_ARGS = _Form(call="[TOOL_CALLS]$name[ARGS]$arguments", names=re.compile(r"[^\s\[{]+"))
"""Form of Mistral's tokenizers that have ``[ARGS]``."""


def grammar_for_tools(
    format: str,
    tools: Sequence[Mapping[str, Any]],
    choice: Any = "required",
    *,
    parallel: bool = True,
    lead: Lead | None = None,
    token_of: TokenOf = lambda text: None,
) -> str:
    """Return the grammar of calls of ``tools`` (OpenAI's form), in the ``format`` of a parser of answers.

    ``choice``: ``required``, or OpenAI's form of the one function to call. ``lead``: what may come first.
    Raises InvalidRequest.
    """
    functions = [_object("function", each.get("function")) for each in tools]
    if choice != "required":
        name = _object("function", _object("tool_choice", choice).get("function")).get("name")
        functions = [each for each in functions if each.get("name") == name]
        if not functions:
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}", field="tool_choice")
    if not functions:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if format not in _FORMS:
        known = ", ".join(sorted(_FORMS))
        reason = f"tool_choice {choice!r} is not supported with calls in the form {format!r}, only {known}"
        raise InvalidRequest(reason, field="tool_choice")
    form = _FORMS[format]
    if format == "mistral" and token_of("[ARGS]") is not None:
        form = _MISTRAL_ARGS
    rules, lead = _Rules(token_of), lead or Lead()
    call = rules.rule(" | ".join(dict.fromkeys(_call(form, function, rules) for function in functions)))
    calls = call
    if parallel and form.between is not None:
        calls = f"{call} ({_literal(form.between)} {call})*" if form.between else f"{call}+"
    said = [rules.written(lead.content), rules.until(form.said)] if form.said else []
    before = [_thoughts(lead, rules), *said, rules.written(form.begin)]
    return _text(rules.grammar(*before, calls, rules.written(form.end)))


def _call(form: _Form, function: Mapping[str, Any], rules: _Rules) -> str:
    name = _string("name", function.get("name"))
    schema = _object("parameters", function.get("parameters") or {"type": "object"})
    if form.argument:
        arguments = _tagged(form, name, schema, rules)
    else:
        arguments = _json_rule(schema)
    text = {"name": _writable(form, name, "name")}
    number = rules.terminal("/[0-9]{1,4}/") if "$number" in form.call else ""
    return rules.rule(rules.written(form.call, text, arguments=arguments, number=number, line=_LINE))


def _writable(form: _Form, name: str, what: str) -> str:
    if not form.names.fullmatch(name):
        reason = f"tool_choice: the {what} {name!r} cannot be written in this model's form of calls"
        raise InvalidRequest(reason, field="tool_choice")
    return form.quote(name)


def _tagged(form: _Form, name: str, root: dict[str, Any], rules: _Rules) -> str:
    """Return the arguments that a schema names, in its order, in a format that does not write JSON."""
    schema = _object("parameters", resolved(root, root))
    for keyword in sorted(schema.keys() - _OBJECT_KEYWORDS):
        raise _unwritable(name, keyword)
    properties = _object("properties", schema.get("properties") or {})
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise InvalidRequest("parameters.required must be a list of texts", field="tools")
    arguments = []
    for key in {**properties, **dict.fromkeys(required)}:
        one = _argument(form, name, key, properties.get(key, True), root, rules)
        arguments.append(one if key in required else f"({one})?")
    return " ".join(arguments) or '""'


def _unwritable(name: str, keyword: str) -> InvalidRequest:
    reason = f"tool_choice: {keyword!r} in the parameters of {name!r} cannot be enforced in this model's form"
    return InvalidRequest(f"{reason} of calls", field="tool_choice")


def _argument(form: _Form, name: str, key: str, schema: Any, root: dict[str, Any], rules: _Rules) -> str:
    """Return one argument: a string as it is, up to what ends it, and another value as JSON."""
    said = kinds_of(schema, root)
    kinds = said or set(KINDS)
    strings = [each for each in choices_of(schema, root) if "string" in (kinds_of(each, root) or kinds)]
    texts = [_string_value(form, name, each, rules) for each in strings] if "string" in kinds else []
    definitions = {each: root[each] for each in ("$defs", "definitions") if each in root}

    def value(allowed: set[str]) -> str:
        given = {} if schema is True else schema
        limited = given if allowed == said else {"allOf": [given, {"type": sorted(allowed)}]}
        return f"{_json_rule({**definitions, **_object(key, limited)})} {closing}"

    closing = rules.written(form.closing, line=_LINE)
    if form.kinds is None:
        null = [f'"null" {closing}'] if texts and "null" in said else []
        options = [("", each) for each in [*texts, *null] or [value(kinds)]]
    else:
        string, other = form.kinds
        left = kinds - {"string"}
        options = [(string, each) for each in texts]
        if other is not None and left:
            options.append((other, value(left)))
        elif other is None:
            left -= {"integer"} if "number" in left else set()
            options += [("number" if each == "integer" else each, value({each})) for each in sorted(left)]
    text = {"key": _writable(form, key, "key")}
    written = [
        f"{rules.written(form.argument, {**text, 'kind': kind}, line=_LINE)} {one}" for kind, one in options
    ]
    return rules.rule(" | ".join(dict.fromkeys(written)))


def _string_value(form: _Form, name: str, schema: Mapping[str, Any], rules: _Rules) -> str:
    """Return a string that fits ``schema``, without quotes, and what ends it."""
    for keyword in sorted(schema.keys() & _NOT_OF_STRINGS):
        raise _unwritable(name, keyword)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = " | ".join(_literal(each) for each in values if isinstance(each, str))
        return f"({texts}) {rules.written(form.closing, line=_LINE)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = f"/(.|\\n){{{least},{most}}}/" if least or most != "" else _TEXT
    if "pattern" in schema:
        pattern = _string("pattern", schema["pattern"])
        before, behind = ("" if anchored else r"(.|\n)*" for anchored in _anchors(pattern))
        text = f"({text} & /{before}({_regex(pattern)[1:-1]}){behind}/)"
    return rules.until(form.closing, text, line=_LINE)


def _json_rule(schema: Any, field: str = "parameters") -> str:
    return f"%json {json.dumps(_schema(field, schema), separators=(',', ':'))}"


def _schema(field: str, schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    try:
        found = _bare(_object(field, schema))
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **found}


def _bare(schema: Any) -> Any:
    """Return a schema without what it tells readers; a grammar has a limited length."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()}
        if key in _NAMED and isinstance(value, Mapping)
        else value
        if key in ("enum", "const")
        else _bare(value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
    }


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


def _anchors(pattern: str) -> tuple[bool, bool]:
    """Return True for each end of a pattern to which it is bound."""
    body = pattern.removesuffix("$")
    return pattern.startswith("^"), body != pattern and (len(body) - len(body.rstrip("\\"))) % 2 == 0


def _regex(pattern: str) -> str:
    """Return ``pattern`` as Lark writes it. It matches whole texts anyway, so its anchors are left out."""
    begins, ends = _anchors(pattern)
    escaped = re.sub(
        r"\\.|[/\n\r\t]",
        lambda found: _ESCAPED.get(found[0], found[0]),
        pattern[begins : -1 if ends else None],
        flags=re.DOTALL,
    )
    return f"/{escaped}/"


def _lark(text: str) -> dict[str, str]:
    return {"lark_grammar": f"%llguidance {{}}\n{text}\n"}


def _text(*grammars: Mapping[str, Any]) -> str:
    """Return the text of grammars, the first of which names the others."""
    try:
        return json.dumps({"grammars": grammars}, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"a grammar is not JSON: {error}", field="grammar") from error
