"""Answers taken apart: every format, however its text is divided; what is no call stays text."""

import json
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.tokenizers import make_byte_level
from tokenizers import Tokenizer

from caesura.client.exceptions import InvalidRequest
from caesura.client.text import StopStrings, TextTokenizer
from caesura.client.text.answer_parser import AnswerParser, Piece, opens_reasoning, parser_for
from caesura.client.text.chat_template import ChatTemplate
from caesura.client.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, from_response_template
from caesura.client.text.parsers.patterns import Pattern, UnsupportedError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "x"},
                    "hot": {"type": ["boolean", "null"], "description": "x"},
                    "share": {"anyOf": [{"type": "number"}, {"type": "null"}], "description": "x"},
                    "near": {"type": "array", "items": {"type": "string"}, "description": "x"},
                    "more": {"description": "x"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": 'a & "b"'}},
]
SMOLLM = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "text"},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*|$"},
    },
}
DIALECT = {
    "start_anchor_pattern": r"(?:<\|turn>model\n|<tool_response\|>)",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$"},
    },
}
HIDDEN = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {
                "type": "function",
                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
            },
        },
    },
}
TEMPLATES = {"smollm": SMOLLM, "tags": TAGS, "dialect": DIALECT, "hidden": HIDDEN}


AS_IT_IS = "as it is"
NOTHING = ("", "", [], "")
"""Rest of a case that says no more."""
ROME = ("weather", {"city": "Rome"})
RAIN = ("weather", {"city": "Rome", "days": 2})
STOP = ("stop", {})
# parser, text, content, reasoning, calls, a word of why a call is malformed
CASES: list[tuple[Any, ...]] = [
    ("hermes", "Just text.\n", "Just text.\n"),
    ("hermes",
     '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", "", [ROME]),
    ("hermes",
     ('<think>\nWhich city?\n</think>\n\nI look.\n<tool_call>\n{"name": "stop"}\n</tool_call>\n'
     '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "weather"}\n</tool_call><|im_end|>\n'), "I look.",
     "Which city?", [STOP, ROME]),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>\nDone.', "Done.", "", [STOP]),
    ("hermes", 'One.\n<tool_call>{"name": "stop"}</tool_call>\nTwo.', "One.\nTwo.", "", [STOP]),
    ("hermes",
     '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"}{ \\\\"}}</tool_call>', "", "",
     [("weather", {"city": '</tool_call> "}{ \\'})]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {}}', "", "", [STOP]),
    ("hermes", 'x <tool_call>{"name": "stop", "argu', AS_IT_IS, "", [], "JSON"),
    ("hermes", "<tool_call></tool_call>", AS_IT_IS, "", [], "JSON"),
    ("hermes", "<tool_call>[]</tool_call> x", AS_IT_IS, "", [], "no call"),
    ("hermes",
     '<tool_call>{"name": "fly"}</tool_call><tool_call>{"name": "stop"}</tool_call>',
     '<tool_call>{"name": "fly"}</tool_call>', "", [STOP], "no declared function"),
    ("hermes",
     '<tool_call>{"name": "stop", "arguments": "{}"}</tool_call>', AS_IT_IS, "", [], "Expected `object`"),
    ("hermes",
     '<tool_call>{"name": "a\n</tool_call>b <tool_call>{"name": "stop"}</tool_call>',
     '<tool_call>{"name": "a\n</tool_call>b', "", [STOP], "JSON"),
    ("hermes", "a <tool_cal", "a <tool_cal"),
    ("hermes", "<think>never ends <tool_call>{}</tool_call>", "", "never ends <tool_call>{}</tool_call>"),
    ("hermes", "A <think> is a tag.", "A <think> is a tag."),
    ("hermes", " \n", " \n"),
    ("qwen3_coder",
     ("<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n</function>\n</tool_call>"), "", "", [RAIN]),
    ("qwen3_coder",
     ("<tool_call><function=weather><parameter=city>12</parameter><parameter=hot>True</parameter>"
     '<parameter=share>null</parameter><parameter=near>["a"]</parameter><parameter=more>3</parameter>'
     "<parameter=days>two</parameter></function></tool_call>"), "", "", [("weather", {"city": "12",
     "hot": True, "share": None, "near": ["a"], "more": "3", "days": "two"})]),
    ("qwen3_coder", "<tool_call>\n<function=stop>\n</function>\n</tool_call>", "", "", [STOP]),
    ("qwen3_coder",
     "<tool_call><function=weather><parameter=city>Rome</function></tool_call>", AS_IT_IS, "",
     [], "does not end"),
    ("qwen3_coder",
     "<tool_call><function=weather><parameter=city>Rome</parameter></function>", AS_IT_IS, "",
     [], "does not end"),
    ("glm45",
     ("\n<think>Rome.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"
     "Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2.0</arg_value>\n</tool_call>"), "", "Rome.",
     [RAIN]),
    ("glm45", "<tool_call>stop</tool_call>", "", "", [STOP]),
    ("glm45", "<tool_call>stop now</tool_call>", AS_IT_IS, "", [], "stop now"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", "", [ROME]),
    ("llama3", '<|python_tag|>{"name": "stop", "parameters": {}}; {"name": "stop"}', "", "", [STOP, STOP]),
    ("llama3", ' {"name": "stop", "arguments": {}};\n', "", "", [STOP]),
    ("llama3", '{"answer": {"a": "}"}} is it', '{"answer": {"a": "}"}} is it'),
    ("llama3", '{"name": "fly"} is it', AS_IT_IS, "", [], "no declared"),
    ("llama3", 'It is {"name": "stop"}', 'It is {"name": "stop"}'),
    ("llama3", "<|python_tag|>print(1)", AS_IT_IS, "", [], "JSON"),
    ("llama3", '{"name": "stop"};nothing', ";nothing", "", [STOP]),
    ("deepseek_v3",
     ("Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n'
     "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), "Looking.", "", [ROME, STOP]),
    ("deepseek_v31",
     ("<think>a</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
     '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
     "<｜tool▁calls▁end｜>"), "", "a", [ROME, STOP]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", AS_IT_IS, "", [], "no function"),
    ("deepseek_v32",
     ('Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
     '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
     "Look.", "", [RAIN, STOP]),
    ("deepseek_v4",
     ('<think>a</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
     '<｜DSML｜parameter name="more" string="true">3</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="near" string="false">[a</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜tool_calls>"), "", "a", [("weather", {"more": "3", "near": "[a"})]),
    ("deepseek_v32", '<｜DSML｜invoke name="stop">\n{}</｜DSML｜invoke>', AS_IT_IS, "", [], "outside"),
    ("kimi_k3",
     ("<|open|>think<|sep|>Rain?<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
     '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
     '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
     '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
     '<|open|>call tool="a &amp; &quot;b&quot;" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
     "<|close|>message<|sep|><|end_of_msg|>"), "I look.", "Rain?", [RAIN, ('a & "b"', {})]),
    ("kimi_k3", "Rain.<|close|>response<|sep|><|close|>message<|sep|>", "Rain."),
    ("kimi_k3", '<|open|>call index="1"<|sep|><|close|>call<|sep|>', AS_IT_IS, "", [], "no function"),
    ("mistral",
     '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "stop"}]', "", "",
     [ROME, STOP]),
    ("mistral",
     'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]stop[ARGS]{}', "Yes.", "", [ROME, STOP]),
    ("mistral", "[THINK]a\n[/THINK]b", "b", "a"),
    ("mistral", "[TOOL_CALLS]stop it", AS_IT_IS, "", [], "JSON"),
    ("kimi_k2",
     ("<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'), "", "", [ROME]),
    ("kimi_k2",
     "<|tool_call_begin|>weather<|tool_call_argument_begin|>{}<|tool_call_end|>", AS_IT_IS, "", [], "id"),
    ("gpt-oss",
     ("<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary<|message|>"
     "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>"
     'json<|message|>{"city": "Rome"}<|call|>'), "I look.", "Rain?", [ROME]),
    ("gpt-oss",
     ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}"), "", "a\nb", [STOP]),
    ("gpt-oss", "<|channel|>final<|message|>Hello.\n<|return|>", "Hello.\n"),
    ("gpt-oss", "Hello.", "Hello."),
    ("gpt-oss", "<|channel|>analysis to=python code<|message|>1+1<|call|>", AS_IT_IS, "", [], "'python'"),
    ("smollm",
     '<think>a</think>b<tool_call>{"name": "stop", "arguments": {}}</tool_call>\n<|im_end|>', "b", "a",
     [STOP]),
    ("tags",
     ("<think>\na\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
     "</function>\n</tool_call><|im_end|>\n"), "", "a", [ROME]),
    ("dialect",
     ('<|channel>thought\na<channel|>b<|tool_call>call:weather{city:<|"|>R "o" me<|"|>'
     ",days:2}<tool_call|><turn|>"), "b", "a", [("weather", {"city": 'R "o" me', "days": 2})]),
    ("hidden",
     ("<|START_THINKING|>a<|END_THINKING|>lost<|START_ACTION|>[\n"
     '{"tool_call_id": "0", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>'), "", "a", [STOP]),
    ("hidden", "<|START_RESPONSE|>b<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "b"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def equal_identifiers(monkeypatch):
    """Give all calls the same, so that answers can be compared."""
    monkeypatch.setattr("caesura.client.text.answer_parser.new_id", lambda: 32 * "0")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.from_folder(make_byte_level(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def tokenizers(tokenizer) -> dict[str, TextTokenizer]:
    """A tokenizer for each response template, and one for all formats by name."""
    made = {
        name: TextTokenizer(tokenizer.backend, {}, {}, response_template=template)
        for name, template in TEMPLATES.items()
    }
    return made | dict.fromkeys(TOOL_FORMATS, tokenizer)


def parser_of(tokenizers: dict[str, TextTokenizer], name: str, **options: object) -> AnswerParser:
    chosen: dict[str, object] = {
        "tool_parser": name,
        "reasoning_parser": name if name in REASONING_FORMATS else "think",
    }
    if name in TEMPLATES:
        chosen = dict.fromkeys(chosen, "auto")
    parser = parser_for(tokenizers[name], tools=TOOLS, **{**chosen, **options})
    assert parser is not None
    return parser


def parse(parser: AnswerParser, chunks) -> list[Piece]:
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.end()
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind != "call":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1][:30]!r}")
def test_answers_of_each_format_at_every_split(tokenizers, case):
    name, text, content, reasoning, calls, why = (*case, *NOTHING[len(case) - 2 :])
    expected = text if content is AS_IT_IS else content, reasoning, calls
    parser = parser_of(tokenizers, name)
    whole, answer = parse(parser, [text]), parser.answer
    made = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    assert (answer.content, answer.reasoning, made) == expected
    assert len(answer.malformed) == bool(why)
    assert why in "".join(answer.malformed)
    for parts in [text, *((text[:at], text[at:]) for at in range(len(text)))]:
        again = parser_of(tokenizers, name)
        assert parse(again, parts) == whole
        assert again.answer == answer


def test_marks_may_be_special_tokens(tokenizer):
    """Kimi, gpt-oss and DeepSeek have such tokenizers; other special tokens are not shown."""
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    marks = {mark for _, text, *_ in CASES for mark in re.findall(r"<[|｜][^<>]+[|｜]>|｜DSML｜", text)}
    backend.add_special_tokens(sorted(marks))
    special = TextTokenizer(backend, {}, {})
    for name, text, content, reasoning, calls, why in ((*case, *NOTHING[len(case) - 2 :]) for case in CASES):
        if name in TOOL_FORMATS and not why:
            parser = parser_of({name: special}, name)
            parse(parser, [text])
            answer = parser.answer
            made = [(call.name, json.loads(call.arguments)) for call in answer.calls]
            assert (answer.content, answer.reasoning, made) == (content, reasoning, calls)


WORDS = [
    "</think>", "<think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=weather>",
    "</function>", "<parameter=city>", "</parameter>", "<arg_key>city</arg_key>", "<arg_value>",
    "</arg_value>", "<|python_tag|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|tool_call_begin|>", "functions.stop:1", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", " to=functions.stop", "final",
    "analysis", "<|im_end|>", "</s>", '{"name": "stop", "arguments": {}}',
    '{"name": "weather", "parameters": {"city":', '{"name": "stop", "name": "stop"}', '"', "\\", "{", "}",
    "[", "]", ";", " ", "\n", "<", "|", "weather", "é世🎉", "a", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|START_RESPONSE|>", "<|tool_call>call:stop", '<|"|>', "<tool_call|>", '<｜DSML｜invoke name="stop">',
    '<｜DSML｜parameter name="city" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>",
    '<|open|>call tool="stop" index="1"<|sep|>', '<|open|>argument key="city" type="string"<|sep|>',
    "<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>",
    "<|open|>response<|sep|>", "<|close|>response<|sep|>",
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from(WORDS).flatmap(lambda word: st.integers(0, len(word)).map(lambda end: word[:end])),
    ),
    max_size=14,
).map("".join)


FORMATS = {id(each): name for name, each in reversed(TOOL_FORMATS.items())}
"""The first name of each format."""


@pytest.mark.parametrize("name", [*FORMATS.values(), *TEMPLATES])
def test_any_division_gives_the_answer_of_the_whole(tokenizers, name):
    @settings(max_examples=examples(60))
    @example('<tool_call>{"name": "stop"}\\</tool_call>', [30], False, True)
    @given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
    def check(text: str, cuts: list[int], in_reasoning: bool, separate: bool) -> None:
        options = {
            "in_reasoning": in_reasoning,
            **({} if separate or name in TEMPLATES else {"reasoning_parser": None}),
        }
        parser = parser_of(tokenizers, name, **options)
        whole = parse(parser, [text])
        bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        for parts in ([text[begin:end] for begin, end in pairwise(bounds)], text):
            again = parser_of(tokenizers, name, **options)
            assert parse(again, parts) == whole
            assert again.answer == parser.answer

    check()


def test_arguments_stay_as_the_model_wrote_them(tokenizers):
    parser = parser_of(tokenizers, "hermes")
    parse(
        parser, ['<tool_call>{"name": "weather", "arguments": { "days":1e0 , "city":"\\u00e9" }}</tool_call>']
    )
    assert parser.answer.calls[0].arguments == '{ "days":1e0 , "city":"\\u00e9" }'


def test_identifiers_that_the_model_writes_are_kept(tokenizers):
    kimi = "<|tool_call_begin|>functions.stop:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    mistral = "[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}"
    for name, text, expected in (
        ("kimi_k2", kimi, "functions.stop:3"),
        ("mistral", mistral, "abcdefghi"),
        ("mistral", "[TOOL_CALLS]stop{}", "0" * 9),
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>', "call_" + "0" * 32),
    ):
        parser = parser_of(tokenizers, name)
        parse(parser, [text])
        assert [call.id for call in parser.answer.calls] == [expected]


def test_a_call_is_told_when_it_ends_and_text_as_it_comes(tokenizers):
    parser = parser_of(tokenizers, "hermes")
    assert parser.feed("Yes. <tool") == [Piece("content", "Yes.")]
    assert parser.feed('_call>{"name": "stop"}</tool_call') == []
    [piece] = parser.feed(">")
    assert piece.call is not None
    assert piece.call.name == "stop"


def test_reasoning_that_stays_in_the_content_has_no_calls(tokenizers):
    text = '<think>\n<tool_call>{"name": "stop"}</tool_call>\n</think>\n\nNo.'
    parser = parser_of(tokenizers, "smollm", reasoning_parser="none")
    assert parse(parser, [text]) == [Piece("content", text)]
    begun = parser_of(tokenizers, "smollm", reasoning_parser=None, in_reasoning=True)
    assert parse(begun, [text.removeprefix("<think>")]) == [Piece("content", text.removeprefix("<think>"))]


def test_a_prompt_can_have_opened_the_reasoning(tokenizers):
    parser = parser_of(tokenizers, "hermes", in_reasoning=True)
    parse(parser, ["\na\n</think>\n\nb"])
    assert (parser.answer.reasoning, parser.answer.content) == ("a", "b")
    tokenizer = tokenizers["hermes"]
    for prompt, expected in [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nso far", True),
        ("<|im_start|>assistant\n<think></think>\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
    ]:
        assert opens_reasoning(tokenizer, tokenizer.encode(prompt), "think") is expected
    assert opens_reasoning(
        tokenizer, tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>"), "gpt-oss"
    )


def test_special_tokens_are_dropped_unless_they_are_wanted(tokenizer):
    for skip, expected in ((True, "ab"), (False, "a<|im_end|>b</s>")):
        parser = parser_for(tokenizer, tools=TOOLS, tool_parser="hermes", skip_special_tokens=skip)
        assert parser is not None
        parser.feed("a<|im_end|>b")
        parser.end("</s>")
        assert parser.answer.content == expected


def test_the_stop_token_can_end_a_call(tokenizer):
    template = {
        "start_anchor": "x",
        "fields": {
            "tool_calls": {
                "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"\}</s>\s*",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"</s>\s*"},
        },
    }
    made = TextTokenizer(tokenizer.backend, {}, {}, response_template=template)
    parser = parser_for(made, tools=TOOLS, tool_parser="auto")
    assert parser is not None
    parser.feed('{"name": "weather", "parameters": {"city": "Rome"}}')
    parser.end("</s>")
    assert [(call.name, call.arguments) for call in parser.answer.calls] == [("weather", '{"city": "Rome"}')]


def test_nothing_to_parse_has_no_parser(tokenizer):
    assert parser_for(tokenizer, tools=None, tool_parser="hermes") is None
    assert parser_for(tokenizer, tools=TOOLS, tool_parser="none", reasoning_parser="none") is None
    assert parser_for(tokenizer, tools=TOOLS, tool_parser="auto") is None  # its chat template shows no calls
    with pytest.raises(InvalidRequest, match="hermes"):
        parser_for(tokenizer, tools=TOOLS, tool_parser="herms")


@pytest.mark.parametrize(
    "name", sorted(set(TOOL_FORMATS) & {"hermes", "glm45", "llama3", "mistral", "gpt-oss"})
)
@pytest.mark.parametrize(
    "part", ["x", " ", "<", "{", '"', "\\", "[", '<tool_call>"', "<tool_call>x</tool_call>", "[TOOL_CALLS]{"]
)
def test_work_grows_with_the_text_alone(tokenizers, monkeypatch, name, part):
    """Counted are the characters that marks are searched in, and those that are copied."""
    work = [0]
    find = StopStrings.find

    def counted(self, text, at):
        found = find(self, text, at)
        work[0] += found[0] + len(found[1]) - at
        return found

    monkeypatch.setattr(StopStrings, "find", counted)
    costs = []
    for count in (1000, 2000):
        for size in (1, 1 << 20):
            parser, text = parser_of(tokenizers, name), part * count
            work[0] = 0
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.end()
            costs.append(work[0] / len(text))
    assert max(costs) < 30
    assert max(costs[2:]) <= 1.1 * max(costs[:2])


# -- response templates and chat templates -------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in TEMPLATES and len(case) < 6], ids=str)
def test_response_templates_mean_what_transformers_reads(case):
    from transformers.utils.chat_parsing import parse_response

    name, text, content, expected, found, _ = (*case, *NOTHING[len(case) - 2 :])
    message = parse_response(text, TEMPLATES[name], prefix="", tools=TOOLS)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    reasoning = message.get("thinking", message.get("reasoning_content", ""))
    assert (message.get("content", ""), reasoning, calls) == (content, expected, found)


@pytest.mark.parametrize(
    "change",
    [
        {"tool_calls": {"open_pattern": r"(?=.*x)"}},
        {"tool_calls": {"open": "x", "content": "json", "close_pattern": r"(a+)+b"}},
        {"tool_calls": {"open": "x", "content": "kv-lines", "close": "y"}},
        {"content": {}, "notes": {"open": "x"}},
        {"thinking": {"open_pattern": r"<think>\w*"}},
    ],
)
def test_templates_that_need_more_are_refused(change, tokenizer, caplog):
    template = {"start_anchor": "x", "fields": change}
    with pytest.raises(UnsupportedError):
        from_response_template(template)
    made = TextTokenizer(tokenizer.backend, {}, {"default": "<tool_call>"}, response_template=template)
    parser = parser_for(made, tools=TOOLS, tool_parser="auto")
    assert parser is not None  # the chat template's
    assert "response_template is not used" in caplog.text


def test_patterns():
    pattern = Pattern(r"\s*<f=(?P<name>[^>\n]+)>\s*(?P<value>.*?)\s*</f>\n?")
    assert pattern.match(" <f=a b> 1\n2 </f>\nx") == ({"name": "a b", "value": "1\n2"}, 18)
    assert pattern.match("<f=>1</f>") is None
    assert pattern.match("<f=a>1") is None
    for source in ("(a|b)+", "a*", "(?!x)", r"(?P<x>\w+|y)", "^a", r"\1", "a{2}"):
        with pytest.raises(UnsupportedError):
            Pattern(source)


TRL = find_spec("trl")
TEMPLATE_FILES = {
    "qwen3": "hermes",
    "qwen2_5": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_8": "qwen3_coder",
    "glm4moe": "glm45",
    "llama3_1": "llama3",
    "gptoss": "gpt-oss",
    "deepseekv3": "deepseek_v3",
    "deepseek_r1_distill": "deepseek_v3",
}


@pytest.mark.skipif(TRL is None, reason="models' chat templates come with trl")
@pytest.mark.parametrize("name", TEMPLATE_FILES)
def test_auto_reads_what_chat_templates_write(tokenizer, name):
    assert TRL is not None
    assert TRL.origin is not None
    source = (Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    template = ChatTemplate({"default": source}, {"bos_token": "", "eos_token": "</s>"})
    written = '{"city":"Rome", "days":2}'
    function = {"name": "weather", "arguments": RAIN[1], "written": written}
    call: dict[str, Any] = {"type": "function", "id": "x", "function": function}
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = TOOLS[:1]
    prompt = template.render(before, tools=tools)
    text = template.render([*before, said], tools=tools, add_generation_prompt=False)
    same = [a == b for a, b in zip(prompt, text, strict=False)]
    answer = text[[*same, False].index(False) :]
    assert (written in answer) == name.startswith("deepseek")  # which join text
    made = TextTokenizer(tokenizer.backend, {}, {"default": source})
    parser = parser_for(
        made,
        tools=TOOLS,
        tool_parser="auto",
        reasoning_parser="auto",
        in_reasoning=opens_reasoning(made, made.encode(prompt), "auto") and text.startswith(prompt),
    )
    assert parser is not None
    parse(parser, [answer])
    [found] = parser.answer.calls
    assert (found.name, json.loads(found.arguments)) == RAIN
    assert parser.answer.malformed == []
