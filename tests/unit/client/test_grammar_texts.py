"""Grammars that the client makes of schemas, patterns, choices, tags and tools, as llguidance reads them."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.tokenizers import make_byte_level
from tokenizers import Tokenizer

from caesura.client import grammar
from caesura.client.exceptions import InvalidRequest
from caesura.client.grammar import Lead
from caesura.client.text.answer_parser import AnswerFormat, parser_for
from caesura.client.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from caesura.client.text.tokenizer import TextTokenizer

BYTES = LLTokenizer("byte")
CITY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/place"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "no/thing"}}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "no/thing", "arguments": {}}\n</tool_call>'
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
COMPACT = {"x-guidance": {"whitespace_flexible": False}, "type": "object"}
LEGACY = {
    "structures": [
        {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"},
        {"begin": "<b>", "schema": {"const": "x"}, "end": "</b>"},
    ],
    "triggers": ["<a", "<b>"],
}
SLASH = {"type": "const_string", "value": "/"}
NULL = {"type": "json_schema", "json_schema": {"type": "null"}}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": '"1"'},
            {
                "type": "or",
                "elements": [{"type": "regex", "pattern": "[ab]+"}, {"type": "const_string", "value": "/"}],
            },
            {
                "type": "tag",
                "begin": "(",
                "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                "end": ")",
            },
        ],
    },
}
ONLY = {"type": "function", "function": {"name": "weather"}}


def named(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def accepts(text: str, output: str) -> bool:
    matcher = LLMatcher(BYTES, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(output.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


CASES = [
    (grammar.json_schema({"type": "integer"}), ["12"], ["a", "1.5", " 1"]),
    (grammar.json_schema('{"type": "object"}'), ["{}", '{"a": [1, {"b": null}]}'], ["[]"]),
    (grammar.json_schema(True), ["1", "[]", '"a"'], ["a"]),
    (grammar.json_object(), ['{"a" :\n1}', "{" + 32 * " " + "}"], ["{" + 33 * " " + "}", "1"]),
    (grammar.json_schema(COMPACT), ['{"a":1}'], ['{"a": 1}']),
    (grammar.regex(r"^a/b\n\$[c-d]$"), ["a/b\n$c"], ["a/b", "xa/b\n$c"]),
    (grammar.regex("a\\/\n\\\\$"), ["a/\n\\"], ["a"]),
    (grammar.regex(r"\d[\w,]"), ["1_", "2,"], ["٣a", "1é"]),
    (grammar.choice(['a "b"', "c\nd\\", "日本"]), ['a "b"', "c\nd\\", "日本"], ["a", "c"]),
    (grammar.structural_tag(LEGACY), ["", "x<a>12</a>y", '<b>"x"</b><a>1</a>'], ["<a>x</a>", "<b>1</b>"]),
    (grammar.structural_tag(FORMAT), ['"1"ab(null)', '"1"/(null)'], ["1a(null)", '"1"(null)']),
    (
        grammar.grammar_for_tools("hermes", [CITY, NOTHING]),
        [HERMES, OTHER, f"{HERMES}\n{OTHER}"],
        ["text", HERMES[:-1], HERMES.replace("Rome", "Bern")],
    ),
    (
        grammar.grammar_for_tools("qwen", [CITY, NOTHING], ONLY, parallel=False),
        [HERMES],
        [OTHER, f"{HERMES}\n{HERMES}"],
    ),
    (
        grammar.grammar_for_tools("llama3", [CITY]),
        ['{"name": "weather", "parameters": {"city": "Oslo"}}'],
        ["{}"],
    ),
    (
        grammar.grammar_for_tools("mistral", [CITY]),
        [f"[TOOL_CALLS][{ROME}, {ROME}]", f"[TOOL_CALLS][{ROME}]"],
        ["[TOOL_CALLS][]", ROME],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "taken", "refused"), CASES)
def test_what_a_grammar_takes(text, taken, refused):
    assert {each: accepts(text, each) for each in (*taken, *refused)} == {
        **dict.fromkeys(taken, True),
        **dict.fromkeys(refused, False),
    }


# -- calls, in the form that each parser reads ---------------------------------------------------------------

DETAILED = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/place"},
                "days": {"type": "integer", "minimum": -3, "maximum": 20},
                "note": {"type": "string", "pattern": "^a.b?", "maxLength": 3},
                "name": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
                "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                "pair": {"type": ["string", "number"], "maxLength": 1, "minimum": 0, "maximum": 1},
                "part": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            },
            "required": ["city", "list"],
            "additionalProperties": False,
        },
    },
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
STOP = {"type": "function", "function": {"name": "stop", "parameters": EMPTY}}
FORMS = sorted(set(grammar._FORMS) - {"qwen"})
MARKS = sorted(
    mark
    for form in grammar._FORMS.values()
    for text in (form.begin, form.call, form.end, form.argument, form.closing, form.said)
    for mark in grammar._MARK.findall(text)
    if mark not in ("</parameter>", "</function>", "[TOOL_CALLS]")
)  # fmt: skip
MARKS += ["<think>", "</think>", "[THINK]", "[/THINK]", "<|start|>", "<|end|>"]


@pytest.fixture(scope="module", params=["text", "special tokens"])
def written(request, tmp_path_factory) -> tuple[TextTokenizer, LLTokenizer]:
    """A tokenizer to which marks are text, or special tokens."""
    backend = Tokenizer.from_file(str(make_byte_level(tmp_path_factory.mktemp("tokens")) / "tokenizer.json"))
    backend.add_special_tokens(MARKS if request.param != "text" else [])
    file = tmp_path_factory.mktemp("saved") / "tokenizer.json"
    backend.save(str(file))
    return TextTokenizer(backend, {}, {}), LLTokenizer(str(file), eos_token=[1])


def drawn(text: str, tokens: LLTokenizer, seed: int) -> list[int]:
    """Return tokens of a random output that a grammar allows."""
    pick, ids = random.Random(seed), []
    matcher = LLMatcher(tokens, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    while not (matcher.is_accepting() and (matcher.is_stopped() or pick.random() < 0.2)):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [each for each in np.flatnonzero(mask).tolist() if each > 3]
        marks = [each for each in allowed if each >= 401]
        ids.append(pick.choice(marks if marks and pick.random() < 0.3 else allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return ids


@pytest.mark.parametrize("name", FORMS)
def test_what_is_allowed_are_calls_that_fit_their_schema(written, name):
    tokenizer, tokens = written
    lead = AnswerFormat(TOOL_FORMATS[name], REASONING_FORMATS.get(name), frozenset()).lead
    marks = tokenizer.backend.token_to_id
    # without special tokens a random text would not end
    lead = lead if marks("</think>") else Lead(content=lead.content)
    if name == "kimi_k3" and not marks("<|close|>"):
        pytest.skip("its content is any text")
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in (DETAILED, STOP)}
    text = grammar.grammar_for_tools(name, [DETAILED, STOP], lead=lead, token_of=marks)
    for seed in range(6):
        said = tokenizer.decode(drawn(text, tokens, seed), skip_special_tokens=False)
        reasoning = name if name in REASONING_FORMATS else None
        parser = parser_for(tokenizer, tools=[DETAILED, STOP], tool_parser=name, reasoning_parser=reasoning)
        parser.feed(said)
        parser.end()
        assert parser.answer.calls
        assert (parser.answer.malformed, parser.answer.content) == ([], "") or name == "kimi_k3"
        for call in parser.answer.calls:
            assert accepts(grammar.json_schema(schemas[call.name]), call.arguments), call.arguments


def test_what_schemas_tell_readers_takes_no_room():
    """A member may be called like a keyword."""
    told = {"description": "a long text", "title": "another one"}
    properties = {"description": {"type": "integer", **told}, "title": {"enum": ["title"]}}
    schema = {"properties": properties, "required": ["description"], "additionalProperties": False, **told}
    text = grammar.json_schema(schema)
    assert "long text" not in text
    assert accepts(text, '{"description": 1, "title": "title"}')
    assert not accepts(text, '{"description": "1"}')


def test_special_tokens_stand_by_their_ids():
    text = grammar.grammar_for_tools("hermes", [CITY], token_of={"<tool_call>": 7, "</tool_call>": 8}.get)
    lark = json.loads(text)["grammars"][0]["lark_grammar"]
    assert "<[7]>" in lark
    assert "<[8]>" in lark
    assert "tool_call" not in lark


THOUGHT = Lead("<think>", "</think>")
OPENED = Lead("<think>", "</think>", opened=True)
HARMONY = REASONING_FORMATS["gpt-oss"].lead
ANALYSIS = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
NUMBER = grammar.json_schema({"type": "integer"})


@pytest.mark.parametrize(
    ("text", "lead", "taken", "refused"),
    [
        (NUMBER, THOUGHT, ["<think>a\nb</think>\n\n3", "3", "<think></think>3"], ["<think>3", "</think>3"]),
        (NUMBER, OPENED, ["a</think>3", "</think>\n3", "<think>a</think>3"], ["3", "a</think>"]),
        (NUMBER, HARMONY, [f"{FINAL}3", f"{ANALYSIS}{ANALYSIS}{FINAL}3"], ["3", f"{ANALYSIS}3", ANALYSIS]),
        (NUMBER, replace(HARMONY, opened=True), [f"a<|end|><|start|>assistant{FINAL}3"], [f"{FINAL}3"]),
        (NUMBER, Lead(), ["3"], ["<think></think>3"]),
        ("start: rule\nrule: /[ab]+/", OPENED, ["x</think>ab"], ["ab"]),
        (json.dumps({"grammars": [{"lark_grammar": "start: @b"}, {"name": "b", "json_schema": {}}]}),
         OPENED, ["</think>1"], ["1"]),
    ],
)  # fmt: skip
def test_a_grammar_begins_behind_the_thoughts(text, lead, taken, refused):
    behind = grammar.after_thoughts(text, lead)
    assert [each for each in taken if not accepts(behind, each)] == []
    assert [each for each in refused if accepts(behind, each)] == []


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: grammar.json_schema("{"), "json_schema"),
        (lambda: grammar.json_schema(3), "json_schema"),
        (lambda: grammar.json_schema(nested(5000)), "json_schema"),
        (lambda: grammar.regex(3), "regex"),
        (lambda: grammar.choice([]), "choice"),
        (lambda: grammar.choice("yes"), "choice"),
        (lambda: grammar.structural_tag({}), "format"),
        (lambda: grammar.structural_tag({"format": {"type": "qwen_xml"}}), "structural_tag"),
        (lambda: grammar.structural_tag({**LEGACY, "triggers": ["<c"]}), "structural_tag"),
        (lambda: grammar.grammar_for_tools("hermes", []), "tool_choice"),
        (lambda: grammar.grammar_for_tools("harmony", [CITY]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("kimi_k2", [named("a<b")]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("gpt-oss", [named("a b")]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("hermes", [named(" ")]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("glm45", [named("f", properties={"a\nb": {}})]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("glm45", [named("f", anyOf=[])]), "tool_choice"),
        (
            lambda: grammar.grammar_for_tools(
                "glm45", [named("f", properties={"a": {"type": "string", "format": "uri"}})]
            ),
            "tool_choice",
        ),
        (lambda: grammar.grammar_for_tools("hermes", [NOTHING], ONLY), "tool_choice"),
    ],
)
def test_what_cannot_be_a_grammar_is_named(make, field):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.detail["field"] == field
