"""Streams, chats and many at once as OpenAI's official client sees them, over a real engine."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest
from support.openai_server import (
    GREEDY,
    NAME,
    Served,
    live,
    messages,
    serve_openai,
    wait_until_idle,
    with_ids,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


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


def test_a_stream_left_early_is_aborted(served):
    stream = served.client.completions.create(prompt="once", max_tokens=400, stream=True, **GREEDY)
    next(iter(stream))
    served.engine.pause("in_place")
    assert live(served) == 1
    stream.close()
    try:
        wait_until_idle(served)
    finally:
        served.engine.continue_generation()


# -- chats ---------------------------------------------------------------------------------------------------


def test_chat_uses_the_template(served):
    answer = served.client.chat.completions.create(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
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


# -- asyncio, aborts, pauses ---------------------------------------------------------------------------------


def test_many_at_once(served):
    async def run() -> list[str]:
        async with served.asyncio_client() as client:
            answers = await asyncio.gather(
                *(client.completions.create(prompt=[5 + i], max_tokens=6, **GREEDY) for i in range(12))
            )
            return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(run())
    create = served.client.completions.create
    assert texts == [create(prompt=[5 + i], max_tokens=6, **GREEDY).choices[0].text for i in range(12)]


def test_an_update_within_a_stream_is_in_its_spans(served):
    stream = iter(
        served.client.completions.create(
            prompt="once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}, model=NAME
        )
    )
    next(stream)
    before = served.engine.pause("in_place")
    assert before.held_requests == 1
    served.engine.update_weights_from_disk(served.path, weight_version="next", flush_cache=False)
    served.engine.continue_generation()
    *_, last = stream
    first, second = last.choices[0].weight_versions
    assert (second["version"], second["end"]) == ("next", 400)
    assert first["end"] == second["start"] > 0
    assert last.metadata["weight_version"] == "next"
    assert [model.id for model in served.client.models.list().data] == [NAME]
