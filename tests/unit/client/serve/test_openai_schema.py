"""Fields from OpenAI clients: honoured, ignored or refused, as docs/reference/openai.md lists them."""

import re
from pathlib import Path

import msgspec
import pytest

import caesura
from caesura.client import InvalidRequest
from caesura.client.serve.openai import images
from caesura.client.serve.openai.chat import ChatRequest, decode_chat, template_messages
from caesura.client.serve.openai.common import (
    IGNORED,
    CommonRequest,
    common_fields,
    rids_for,
    sampling_params,
)
from caesura.client.serve.openai.completions import CompletionRequest, decode_completion
from caesura.io_struct import SamplingParams

REFUSED = ChatRequest.REFUSED | CompletionRequest.REFUSED
DOCS = Path(caesura.__file__).parent / "docs" / "reference" / "openai.md"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def completion(**fields: object) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"prompt": "x", **fields}))


def chat(**fields: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({**CHAT, **fields}))


def documented() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = {}
    for part in re.split(r"^\| field of ", DOCS.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        table = tables[part.split()[0]] = {}
        for line in part.split("\n\n")[0].splitlines()[2:]:
            names, _, default, _ = (cell.strip() for cell in line.strip("|").split("|"))
            verdict = default if default in ("ignored", "refused") else "honoured"
            table |= dict.fromkeys(re.findall(r"`(\w+)`", names), verdict)
    return tables


def test_the_page_has_every_field_and_says_what_happens():
    common = set(CommonRequest.__struct_fields__)
    structs = {
        "both": common | set(IGNORED),
        "completions": set(CompletionRequest.__struct_fields__) - common,
        "chats": set(ChatRequest.__struct_fields__) - common,
    }
    tables = documented()
    del tables["images"]  # a struct of its own, below
    del tables["completions"]["max_tokens"]  # stands in the table of both, too
    assert {table: set(rows) for table, rows in tables.items()} == structs
    rows = {name: verdict for table in tables.values() for name, verdict in table.items()}
    no_effect = IGNORED.keys() | {"spaces_between_special_tokens"}
    expected = {
        name: "refused" if name in REFUSED else "ignored" if name in no_effect else "honoured"
        for name in rows
    }
    assert rows == expected
    assert set(REFUSED) <= set(rows)


def test_the_page_has_every_field_of_images():
    rows = documented()["images"]
    assert set(rows) == set(images.ImageRequestBody.__struct_fields__)
    refused = {name for name, verdict in rows.items() if verdict == "refused"}
    assert refused == set(images.REFUSED) | set(images.WITHOUT_EFFECT)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_unless_it_asks_for_nothing(name):
    decode = chat if name in ChatRequest.__struct_fields__ else completion
    for nothing in (None, False, "", [], {}):
        decode(**{name: nothing})
    with pytest.raises(InvalidRequest, match=name) as caught:
        decode(**{name: "something"})
    assert caught.value.detail["field"] == name


def test_unknown_and_ignored_fields_pass():
    assert completion(**dict.fromkeys(IGNORED, "x"), whatever={"a": 1}).prompt == "x"


def test_nulls_are_left_out():
    optional = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"messages"})
    request = chat(**optional)
    assert sampling_params(request, None) == SamplingParams(max_new_tokens=None)
    assert request == chat()


def test_numbers_in_strings_are_numbers_but_prompts_stay():
    request = completion(prompt=["12", "a"], max_tokens="7", temperature="0.5", echo=1)
    assert (request.prompt, request.max_tokens, request.temperature, request.echo) == (
        ["12", "a"],
        7,
        0.5,
        True,
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"5": "high"}}, "logit_bias"),
        ({"stream_options": {"include_usage": "perhaps"}}, "stream_options"),
        ({"seed": 2**64}, "seed"),
        ({"rid": ""}, "rid"),
    ],
)
def test_malformed_fields_are_named(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.detail["field"] == field


def test_a_missing_prompt_is_named_in_the_message():
    with pytest.raises(InvalidRequest, match="prompt"):
        decode_completion(b"{}")


def test_every_sampling_field_arrives():
    params = sampling_params(
        completion(
            n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.5,
            frequency_penalty=0.2,
            presence_penalty=-0.3, min_new_tokens=2, ignore_eos=True, stop_token_ids=[9],
            logit_bias={"5": -1}, seed=-1,
        ),
        11,
    )  # fmt: skip
    assert params == SamplingParams(
        max_new_tokens=11, n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.5,
        frequency_penalty=0.2, presence_penalty=-0.3, min_new_tokens=2, ignore_eos=True, stop_token_ids=[9],
        logit_bias={5: -1.0}, seed=2**63 - 1,
    )  # fmt: skip
    assert params.problems() == []


def test_common_fields():
    fields = common_fields(
        completion(
            stop="a", include_stop_str_in_output=True, skip_special_tokens=False, extra_key="k",
            return_routed_experts=True, routed_experts_start_len=3, min_weights_epoch=4,
        )
    )  # fmt: skip
    assert fields == {
        "stop": ("a",),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 3,
        "cache_salt": "\nk",
        "min_weights_epoch": 4,
    }


def test_rids():
    assert rids_for(completion(rid="r"), 1, "cmpl") == ["r"]
    assert rids_for(completion(rid="r"), 2, "cmpl") == ["r_0", "r_1"]
    assert rids_for(completion(rid=["a", "b"]), 2, "cmpl") == ["a", "b"]
    first, second = rids_for(completion(), 2, "cmpl")
    assert first.startswith("cmpl-")
    assert first != second
    assert rids_for(completion(), 1, "cmpl") != rids_for(completion(), 1, "cmpl")


def test_messages_are_converted_for_templates():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": None, "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call, {**call, "function": {"name": "g", "arguments": ""}}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "reasoning_content": "r"},
    ]
    first, second, third, fourth = template_messages(messages)
    assert first == {"role": "developer", "content": "", "name": "n"}
    assert second == {"role": "user", "content": "a\nb"}
    assert [each["function"]["arguments"] for each in third["tool_calls"]] == [{"a": 1}, {}]
    assert fourth == {"role": "assistant", "content": "c", "reasoning_content": "r"}
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "input_audio", "text": "x"}]},
        {"role": "assistant", "tool_calls": {}},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
    ],
)
def test_messages_that_are_not_text_are_refused(message):
    with pytest.raises(InvalidRequest, match=r"messages\[1\]") as caught:
        template_messages([CHAT["messages"][0], message])
    assert caught.value.detail["field"] == "messages"
