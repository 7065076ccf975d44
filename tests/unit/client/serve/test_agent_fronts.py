"""Bodies of ``/v1/responses`` and ``/v1/messages`` as conversations; blocks of answers; kept answers."""

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import caesura
from caesura.client import InvalidRequest
from caesura.client.serve.anthropic.messages import MessagesRequest, conversation, decode_messages
from caesura.client.serve.openai.blocks import Blocks
from caesura.client.serve.openai.common import CommonRequest
from caesura.client.serve.openai.responses import (
    ResponsesRequest,
    decode_responses,
    input_messages,
    response_conversation,
)
from caesura.client.text.answer_parser import ParsedAnswer, Piece, ToolCall
from caesura.client.text.sessions import assistant_message

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one\ntwo"},
    {"role": "assistant", "reasoning_content": "hm", "content": "yes", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "result"},
    {"role": "user", "content": "more"},
]
ITEMS = [
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
    },
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "result"},
    {"role": "user", "content": "more"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "yes"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "result"}]},
            {"type": "text", "text": "more"},
        ],
    },
]
FUNCTION = {"name": "f", "description": "does", "parameters": {"type": "object"}}


def response(**fields: object):
    asked = decode_responses(msgspec.json.encode({"input": "x", **fields}))
    return response_conversation(asked, input_messages(asked.input))


def message(**fields: object):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return conversation(decode_messages(msgspec.json.encode(body)))


def test_items_and_blocks_are_the_messages_of_a_chat():
    assert response(instructions="Be brief.", input=ITEMS).messages == TURNS
    assert message(system="Be brief.", messages=BLOCKS).messages == TURNS


def test_calls_that_follow_each_other_are_one_answer():
    calls = [{**ITEMS[3], "call_id": f"c{i}"} for i in range(2)]
    [answer] = response(input=calls).messages
    assert [call["id"] for call in answer["tool_calls"]] == ["c0", "c1"]
    texts = [ITEMS[2], ITEMS[2], calls[0], ITEMS[1]]
    assert [sorted(each) for each in response(input=texts).messages] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["reasoning_content", "role"],
    ]


def test_tools_have_the_form_of_chats():
    tools = [{"type": "function", "function": FUNCTION}]
    assert response(tools=[{"type": "function", **FUNCTION}]).tools == tools
    schema = {"name": "f", "description": "does", "input_schema": {"type": "object"}}
    assert message(tools=[schema]).tools == tools


@pytest.mark.parametrize(
    ("found", "choice"),
    [
        (lambda: response(tool_choice="auto"), "auto"),
        (lambda: message(tool_choice={"type": "none"}), "none"),
        (lambda: message(tool_choice={"type": "any"}), "required"),
        (lambda: response(tool_choice={"type": "function", "name": "f"}), "f"),
        (lambda: message(tool_choice={"type": "tool", "name": "f"}), "f"),
    ],
)
def test_tool_choice_has_the_form_of_chats(found, choice):
    named = {"type": "function", "function": {"name": "f"}}
    assert found().tool_choice == (named if choice == "f" else choice)


def test_settings_reach_the_conversation():
    found = message(stop_sequences=["END"], max_tokens=7, top_k=3, thinking={"type": "disabled"})
    assert (found.stop, found.max_tokens, found.top_k) == (["END"], 7, 3)
    assert found.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert message(output_config={"effort": "low"}).reasoning_effort == "low"
    found = response(reasoning={"effort": "high"}, include=["message.output_text.logprobs"], top_logprobs=2)
    assert (found.reasoning_effort, found.logprobs, found.top_logprobs) == ("high", True, 2)


def test_an_answer_at_the_end_is_continued():
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    assert message(messages=turns).continue_final_message
    assert not message(messages=turns[:1]).continue_final_message
    assert not message(messages=BLOCKS[:2]).continue_final_message


IMAGE = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    ("make", "fields", "field"),
    [
        (response, {"input": [{"type": "web_search_call"}]}, "input"),
        (response, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (response, {"tools": [{"type": "web_search"}]}, "tools"),
        (response, {"tools": [{"type": "function"}]}, "tools"),
        (response, {"text": {"format": {"type": "xml"}}}, "response_format"),
        (message, {"output_config": {"format": {"type": "json_schema"}}}, "response_format"),
        (response, {"background": True}, "background"),
        (response, {"include": ["file_search_call.results"]}, "include"),
        (response, {"truncation": "auto"}, "truncation"),
        (response, {"n": 2}, "n"),
        (response, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (message, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        (message, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (message, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        (message, {"tool_choice": {"type": "some"}}, "tool_choice"),
        (message, {"mcp_servers": [{}]}, "mcp_servers"),
        (message, {"n": 2}, "n"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(make, fields, field):
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    assert caught.value.detail["field"] == field


PIECES = st.one_of(
    st.builds(Piece, st.sampled_from(["content", "reasoning"]), st.text("ab", min_size=1)),
    st.builds(lambda text: Piece("call", call=ToolCall("f", f'{{"a": "{text}"}}')), st.text("ab")),
)


@given(st.lists(PIECES))
def test_steps_build_the_blocks_of_all_pieces(pieces):
    blocks, built, opened = Blocks(), [], None
    for step in [*blocks.add(pieces), *blocks.end()]:
        if step.what == "begin":
            assert opened is None
            opened = step.block
            built.append("")
        elif step.what == "add":
            built[-1] += step.text
        else:
            assert step.block is opened
            opened = None
    assert opened is None
    assert built == [block.text for block in blocks.all]
    kinds = [block.kind for block in blocks.all]
    assert all(a != b or a == "call" for a, b in pairwise(kinds))
    for kind in ("content", "reasoning"):
        texts = [block.text for block in blocks.all if block.kind == kind]
        assert "".join(texts) == "".join(piece.text for piece in pieces if piece.kind == kind)
    given = [block.text for block in blocks.all if block.call is not None]
    assert given == [piece.call.arguments for piece in pieces if piece.call is not None]


def test_an_answer_becomes_the_message_that_is_gone_on_from():
    call = ToolCall("f", '{"a": 1}', "call_1")
    parsed = ParsedAnswer(content="said", reasoning="", calls=[call], malformed=[])
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    assert assistant_message(parsed) == {"role": "assistant", "content": "said", "tool_calls": calls}
    parsed = ParsedAnswer(content="", reasoning="thought", calls=[], malformed=[])
    thought = {"role": "assistant", "content": "", "reasoning_content": "thought"}
    assert assistant_message(parsed) == thought


DOCS = Path(caesura.__file__).parent / "docs" / "reference"


@pytest.mark.parametrize(("name", "kind"), [("responses", ResponsesRequest), ("messages", MessagesRequest)])
def test_the_pages_have_every_field(name, kind):
    text = "\n".join((DOCS / page).read_text("utf-8") for page in ("openai.md", "anthropic.md"))
    table = text.split(f"| field of {name} |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    verdicts = {field: row[2] for row in rows for field in re.findall(r"`(\w+)`", row[0])}
    fields = set(kind.__struct_fields__)
    ignored = {field for field, verdict in verdicts.items() if verdict == "ignored"}
    assert fields - set(CommonRequest.__struct_fields__) <= verdicts.keys() <= fields | ignored
    refused = {field for field, verdict in verdicts.items() if verdict == "refused"}
    assert refused == kind.REFUSED.keys() - CommonRequest.REFUSED.keys()
