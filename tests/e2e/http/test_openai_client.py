"""Models, errors, completions, chats and streams as OpenAI's own client sees them, over a real engine."""

import base64
import codecs
import json
import struct
from itertools import pairwise

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.openai_server import CONTEXT, GREEDY, NAME, messages, with_ids

from caesura.client import SamplingParams
from caesura.client.serve.openai.logprobs import TokenText
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import ENCODE_INLINE

# -- models, keys and errors ---------------------------------------------------------------------------------


def test_models(served):
    listed = served.client.models.list().data
    assert [model.id for model in listed] == [NAME]
    one = served.client.models.retrieve(NAME)
    assert one == listed[0]
    assert one.max_model_len == CONTEXT
    assert one.root == str(served.path)
    assert one.created == int((served.path / "config.json").stat().st_mtime)
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("name", [NAME, "", "default", "path"])
def test_names_of_the_model(served, name):
    model = str(served.path) if name == "path" else name
    answer = served.client.completions.create(prompt="once", max_tokens=2, **{**GREEDY, "model": model})
    assert answer.model == NAME


def test_unknown_model(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="gpt-5", prompt="once")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format"),
        ({"extra_body": {"response_format": {"type": "json_schema"}}}, "response_format"),
        ({"extra_body": {"regex": "a", "guided_choice": ["a"]}}, "regex"),
        ({"extra_body": {"structured_outputs": {"xgrammar": "a"}}}, "structured_outputs"),
        ({"extra_body": {"json_schema": "{"}}, "json_schema"),
        ({"extra_body": {"rid": ["a", "b"]}}, "rid"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
        ({"messages": messages("x"), "functions": [{"name": "f"}]}, "functions"),
        ({"messages": messages("x"), "modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": IMAGE}, "messages"),
        ({"messages": messages("x"), "top_logprobs": 2}, "top_logprobs"),
        ({"messages": messages("x"), "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": messages("x"), "extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs",
        ),
    ],
)
def test_refused_by_name(served, fields, param):
    client = served.client
    create = client.chat.completions.create if "messages" in fields else client.completions.create
    prompt = {} if "messages" in fields else {"prompt": "once"}
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{"model": NAME, **prompt, **fields})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert caught.value.message


def test_too_long_a_prompt(served):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.completions.create(model=NAME, prompt=[5] * CONTEXT, max_tokens=9, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="token"):
        served.client.chat.completions.create(model=NAME, messages=messages("a猫" * ENCODE_INLINE))


EVERYTHING = {"return_token_ids": True, "ignore_eos": True, "return_routed_experts": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_answers_have_the_types_of_the_official_client(served, stream, n):
    common = {"n": n, "max_tokens": 4, "stream": stream, "model": NAME, "extra_body": EVERYTHING}
    chats = served.client.chat.completions.with_raw_response.create(
        messages=messages("once"), logprobs=True, top_logprobs=2, **common
    )
    completions = served.client.completions.with_raw_response.create(prompt="once", logprobs=2, **common)
    if stream:
        kinds = (ChatCompletionChunk, Completion)
        texts = [
            [
                line.removeprefix("data: ")
                for line in raw.http_response.iter_lines()
                if line.startswith("data: {")
            ]
            for raw in (chats, completions)
        ]
    else:
        kinds = (ChatCompletion, Completion)
        texts = [[chats.text], [completions.text]]
    for kind, found in zip(kinds, texts, strict=True):
        assert found
        for text in found:
            given = json.loads(text)
            # its chunks have no type of their own, and no reason until the last
            if stream and kind is Completion:
                given["choices"] = [
                    {**each, "finish_reason": each["finish_reason"] or "stop"} for each in given["choices"]
                ]
            kind.model_validate(given, strict=True)


def test_prompt_ids_are_told_at_the_top_too(served):
    for stream in (False, True):
        answers = served.client.chat.completions.create(
            messages=messages("once"), max_tokens=3, n=2, stream=stream, **with_ids()
        )
        first = next(iter(answers)) if stream else answers
        assert first.prompt_token_ids == first.choices[0].prompt_token_ids != []
    answer = served.client.completions.create(prompt=["once", "upon"], max_tokens=1, **with_ids())
    assert not hasattr(answer, "prompt_token_ids")
    answer = served.client.completions.create(prompt=["once"], max_tokens=1, **with_ids())
    assert answer.prompt_token_ids == served.tokenizer.encode("once")


# -- completions ---------------------------------------------------------------------------------------------


def test_completion_is_the_engines(served):
    answer = served.client.completions.create(prompt="once upon", max_tokens=9, **with_ids())
    [choice] = answer.choices
    ids = served.tokenizer.encode("once upon")
    expected = served.engine.generate(
        ids, SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True), return_logprob=False
    )
    assert choice.token_ids == expected.output_ids
    assert choice.prompt_token_ids == ids
    assert choice.text == served.tokenizer.decode(expected.output_ids)
    assert (choice.finish_reason, choice.matched_stop) == ("length", None)
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == len(ids) + 9
    status = served.engine.status()
    assert answer.metadata["weight_version"] == status.weight_version
    [span] = choice.weight_versions
    assert (span["start"], span["end"], span["epoch"]) == (0, 9, status.weights_epoch)


def test_prompts_of_every_kind(served):
    ids = served.tokenizer.encode("once")
    create = served.client.completions.create
    for prompt, count in (("once", 1), (ids, 1), (["once", "upon"], 2), ([ids, ids, [7]], 3)):
        answer = create(prompt=prompt, max_tokens=3, n=2, **with_ids())
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.choices[0].prompt_token_ids == ids
        assert answer.choices[0].token_ids == answer.choices[1].token_ids
        assert answer.usage.prompt_tokens == sum(
            len(choice.prompt_token_ids) for choice in answer.choices[::2]
        )
        assert answer.usage.completion_tokens == 6 * count


def test_logprobs_of_completions(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=40, logprobs=3, **{**with_ids(), "seed": 3, "temperature": 1.0}
    )
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(choice.token_ids) == 40
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert top[token] >= value  # of tokens with the same text the likeliest stays
        assert len(top) <= 4
    check_offsets(served.tokenizer, choice.text, choice.token_ids, logprobs.text_offset)


def check_offsets(tokenizer: TextTokenizer, text: str, ids: list[int], offsets: list[int]) -> None:
    """Check that every offset counts the whole characters of the bytes before its token."""
    tokens = TokenText(tokenizer)
    data = [b"" if token in tokenizer.skipped else tokens.data(token) for token in ids]
    assert b"".join(data).decode("utf-8", "replace") == text
    known = [codecs.utf_8_decode(b"".join(data[:count]), "replace", False)[0] for count in range(len(ids))]
    assert offsets == [len(before) for before in known]


def test_echo(served):
    prompt = "once upon a naïve 猫 🙂"
    create = served.client.completions.create
    plain = create(prompt=prompt, max_tokens=4, **GREEDY).choices[0]
    echoed = create(prompt=prompt, max_tokens=4, echo=True, logprobs=2, **with_ids()).choices[0]
    assert echoed.text == prompt + plain.text
    ids = echoed.prompt_token_ids + echoed.token_ids
    assert len(echoed.logprobs.tokens) == len(ids)
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.top_logprobs[0] is None
    assert all(value <= 0.0 for value in echoed.logprobs.token_logprobs[1:])
    check_offsets(served.tokenizer, echoed.text, ids, echoed.logprobs.text_offset)
    scored = create(prompt=prompt, max_tokens=0, echo=True, logprobs=2, **with_ids())
    assert scored.choices[0].text == prompt
    assert scored.choices[0].token_ids == []
    assert scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0
    count = len(echoed.prompt_token_ids)
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        echoed.logprobs.token_logprobs[:count], abs=1e-4
    )
    again = create(prompt=ids, max_tokens=0, echo=True, logprobs=0, **with_ids()).choices[0]
    assert again.logprobs.token_logprobs[1:] == pytest.approx(echoed.logprobs.token_logprobs[1:], abs=1e-4)
    from_ids = create(prompt=echoed.prompt_token_ids, max_tokens=4, echo=True, **GREEDY).choices[0]
    assert from_ids.text == echoed.text


def test_stop_strings_and_tokens(served):
    create = served.client.completions.create
    whole = create(prompt="once", max_tokens=30, **with_ids()).choices[0]
    stop = whole.text[4:6]
    cut = create(prompt="once", max_tokens=30, stop=["\0never", stop], **with_ids()).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.matched_stop) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    kept = create(prompt="once", max_tokens=30, stop=stop, **with_ids(include_stop_str_in_output=True))
    assert kept.choices[0].text == cut.text + stop
    token = whole.token_ids[3]
    ended = create(prompt="once", max_tokens=30, **with_ids(stop_token_ids=[token])).choices[0]
    assert (ended.finish_reason, ended.matched_stop) == ("stop", token)
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_cached_tokens_and_salt(served):
    prompt = [9 + i % 50 for i in range(100)]
    create = served.client.completions.create

    def cached(**extra: object) -> int:
        answer = create(prompt=prompt, max_tokens=1, **with_ids(**extra))
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 80
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a", extra_key="k") == 0
    assert cached(cache_salt="a", extra_key="k") >= 80


# -- streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [1, 3])
def test_streamed_completions_add_up(served, prompts):
    prompt = ["once", "upon 猫", "a time"][:prompts]
    fields = {"prompt": prompt, "max_tokens": 24, "n": 2, "seed": 11, "logprobs": 2}
    options = {**with_ids(), "temperature": 1.0}
    whole = served.client.completions.create(**fields, **options)
    chunks = list(
        served.client.completions.create(
            **fields, **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert parts[0].prompt_token_ids == choice.prompt_token_ids
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == choice.finish_reason
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        for name in ("tokens", "text_offset"):
            assert [x for each in logprobs for x in getattr(each, name)] == getattr(choice.logprobs, name)
        assert [x for each in logprobs for x in each.token_logprobs] == pytest.approx(
            choice.logprobs.token_logprobs, abs=1e-4
        )
    [last] = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason][-1:]
    assert last.choices[0].weight_versions[0]["end"] == 24


def test_streamed_stop_strings(served):
    whole = served.client.completions.create(prompt="once", max_tokens=30, **with_ids()).choices[0]
    fields = {"prompt": "once", "max_tokens": 30, "stop": [whole.text[5:8]], "logprobs": 0}
    cut = served.client.completions.create(**fields, **with_ids()).choices[0]
    assert cut.matched_stop == whole.text[5:8]
    parts = [
        chunk.choices[0] for chunk in served.client.completions.create(**fields, **with_ids(), stream=True)
    ]
    assert "".join(part.text for part in parts) == cut.text
    assert [token for part in parts for token in part.token_ids] == cut.token_ids
    assert [token for part in parts if part.logprobs for token in part.logprobs.tokens] == cut.logprobs.tokens
    assert (parts[-1].finish_reason, parts[-1].matched_stop) == ("stop", cut.matched_stop)


def test_streamed_echo(served):
    chunks = served.client.completions.create(prompt="once", max_tokens=3, echo=True, stream=True, **GREEDY)
    texts = [part.text for chunk in chunks for part in chunk.choices]
    assert texts[0].startswith("once")
    assert "".join(texts).count("once") == 1


def test_streamed_chat_adds_up(served):
    fields = {"messages": messages("once"), "max_tokens": 20, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = served.client.chat.completions.create(**fields, **with_ids())
    chunks = list(served.client.chat.completions.create(**fields, **with_ids(), stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        content = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert [entry.bytes for entry in content] == [entry.bytes for entry in choice.logprobs.content]


# -- chats ---------------------------------------------------------------------------------------------------


def test_chat_uses_the_template(served):
    weather = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    answer = served.client.chat.completions.create(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": weather}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        max_completion_tokens=3,
        max_tokens=9,
        **with_ids(chat_template_kwargs={"mood": "sad"}),
    )
    prompt = served.tokenizer.backend.decode(answer.choices[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == (
        "<s>[tools 1]<system>be brief</><user>one\ntwo</><assistant></>(Oslo)<tool>rain</>[sad]<assistant>"
    )
    assert answer.usage.completion_tokens == 3
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    unused = served.client.chat.completions.create(
        messages=messages("x"), tools=[{"type": "function"}], tool_choice="none", max_tokens=1,
        **with_ids(add_generation_prompt=False),
    )  # fmt: skip
    prompt = served.tokenizer.backend.decode(unused.choices[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<s>[tools 1]<user>x</>"  # as with vLLM


def test_chat_logprobs_are_exact_bytes(served):
    answer = served.client.chat.completions.create(
        messages=messages("猫"),
        max_tokens=60,
        logprobs=True,
        top_logprobs=3,
        seed=4,
        **{**with_ids(), "temperature": 1.0},
    )
    [choice] = answer.choices
    content = choice.logprobs.content
    ids = choice.token_ids
    assert len(content) == len(ids)
    data = b"".join(
        bytes(entry.bytes) for token, entry in zip(ids, content) if token not in served.tokenizer.skipped
    )
    assert data.decode("utf-8", "replace") == choice.message.content
    for entry in content:
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert len(entry.top_logprobs) == 3
        assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top_logprobs))


def test_routed_experts(served):
    answer = served.client.completions.create(
        prompt=[5, 6, 7], max_tokens=4, **with_ids(return_routed_experts=True, routed_experts_start_len=1)
    )
    data = base64.b64decode(answer.sglext["routed_experts"])
    experts = struct.unpack(f"<{len(data) // 4}i", data)
    assert len(experts) == (3 + 4 - 1 - 1) * 2 * 3
    assert set(experts) <= set(range(5))


def test_meta_info(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=4, n=2, **with_ids(return_meta_info=True, rid="named")
    )
    assert answer.id == "named"
    for choice in answer.choices:
        assert choice.meta_info["completion_tokens"] == 4
        assert choice.meta_info["finish_reason"] == {"type": "length", "length": 4}


# -- structured output ---------------------------------------------------------------------------------------

ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": ANSWER}},
        {"guided_json": json.dumps(ANSWER)},
        {"json_schema": json.dumps(ANSWER)},
    ],
)
def test_an_answer_fits_its_schema(served, extra):
    body = {"extra_body": {**extra, "seed": 4}, "model": NAME, "n": 4}
    chat = served.client.chat.completions.create(messages=messages("well?"), **body)
    text = served.client.completions.create(prompt="well?", **body, max_tokens=40)
    found = [choice.message.content for choice in chat.choices] + [choice.text for choice in text.choices]
    assert all(json.loads(each)["answer"] in ("yes", "no") for each in found)
    assert {choice.finish_reason for choice in (*chat.choices, *text.choices)} == {"stop"}


def test_a_schema_that_cannot_be_enforced_is_refused(served):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/x"}}}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        served.client.chat.completions.create(messages=messages("x"), model=NAME, response_format=bad)
