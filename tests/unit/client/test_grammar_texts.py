"""Grammars that the client makes of schemas, patterns, choices, tags and tools, as llguidance reads them."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from caesura.client import grammar
from caesura.client.exceptions import InvalidRequest

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


def test_special_tokens_stand_by_their_ids():
    text = grammar.grammar_for_tools("hermes", [CITY], token_of={"<tool_call>": 7, "</tool_call>": 8}.get)
    lark = json.loads(text)["grammars"][0]["lark_grammar"]
    assert "<[7]>" in lark
    assert "<[8]>" in lark
    assert "tool_call" not in lark.replace("any_call", "").replace("one_call", "")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: grammar.json_schema("{"), "json_schema"),
        (lambda: grammar.json_schema(3), "json_schema"),
        (lambda: grammar.regex(3), "regex"),
        (lambda: grammar.choice([]), "choice"),
        (lambda: grammar.choice("yes"), "choice"),
        (lambda: grammar.structural_tag({}), "format"),
        (lambda: grammar.structural_tag({"format": {"type": "qwen_xml"}}), "structural_tag"),
        (lambda: grammar.structural_tag({**LEGACY, "triggers": ["<c"]}), "structural_tag"),
        (lambda: grammar.grammar_for_tools("hermes", []), "tool_choice"),
        (lambda: grammar.grammar_for_tools("harmony", [CITY]), "tool_choice"),
        (lambda: grammar.grammar_for_tools("hermes", [NOTHING], ONLY), "tool_choice"),
    ],
)
def test_what_cannot_be_a_grammar_is_named(make, field):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.detail["field"] == field
