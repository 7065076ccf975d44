"""The OpenAI surface as its official client sees it: blocking, asyncio and streaming, over a real socket and a real engine."""

import asyncio
import base64
import codecs
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import httpx
import openai
import pytest
import uvicorn
from support.checkpoints import make_checkpoint
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura.client import AsyncSchedulerClient, SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.frontend.app import FrontEnd, ServeOptions, create_app
from caesura.client.frontend.openai.logprobs import TokenText
from caesura.client.frontend.pages.metrics import Metrics
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import ENCODE_INLINE, TokenizerManager

NAME = "tiny/qwen"
"""With a slash, as folders and hub names have."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools {{ tools | length }}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>"
    "{% for call in message.tool_calls %}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 512
VOCABULARY = 360
"""Fewer than the tokenizer's: its last ids are never sampled."""


@dataclass
class Served:
    """One engine and one server for the module."""

    url: str
    path: Path
    engine: SchedulerClient
    tokenizer: TextTokenizer
    client: openai.OpenAI

    def asyncio_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0)


class Door(threading.Thread):
    """The front end on an event loop of its own."""

    def __init__(self, endpoint: str, options: ServeOptions, tokenizer: TextTokenizer) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._options = options
        self._tokenizer = tokenizer
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._server: uvicorn.Server | None = None
        self._up = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        async with AsyncSchedulerClient(self._endpoint) as client:
            manager = TokenizerManager(client, self._tokenizer)
            app = create_app(FrontEnd(manager=manager, options=self._options, metrics=Metrics()))
            config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
            self._server = uvicorn.Server(config)
            self._up.set()
            await self._server.serve(sockets=[self._listener])

    def __enter__(self) -> Self:
        self.start()
        while not self._up.wait(0.1):
            assert self.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self.join(10)
        self._listener.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_byte_level(path, vocab_size=VOCABULARY, chat_template=TEMPLATE)
    make_checkpoint(
        path,
        "qwen3-moe",
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=CONTEXT,
        seed=5,
    )
    options = ServeOptions(
        api_key="secret", served_model_name=NAME, model_path=str(path), context_length=CONTEXT, max_batch=16
    )
    tokenizer = TextTokenizer.from_folder(path)
    with (
        launch_scheduler(
            path, dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=8192, log_level="WARNING"
        ) as engine,
        Door(engine.endpoint, options, tokenizer) as door,
        openai.OpenAI(base_url=f"{door.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield Served(door.url, path, engine, tokenizer, client)


GREEDY = {"model": NAME, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def with_ids(**extra: object) -> dict[str, object]:
    return {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True, **extra}}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- models, keys and errors ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/chat/completions"])
def test_every_route_needs_the_key(served, path):
    method = "GET" if path.endswith("models") else "POST"
    assert httpx.request(method, served.url + path, json={}).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format"),
        ({"extra_body": {"rid": ["a", "b"]}}, "rid"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_refused_by_name(served, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(**{"model": NAME, "prompt": "once", **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
def test_chats_refused_by_name(served, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**{"model": NAME, "messages": messages("once"), **fields})
    assert caught.value.param == param


def test_too_long_a_prompt(served):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.completions.create(model=NAME, prompt=[5] * CONTEXT, max_tokens=9, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="token"):
        served.client.chat.completions.create(model=NAME, messages=messages("a猫" * ENCODE_INLINE))


def test_not_json(served):
    answer = httpx.post(
        f"{served.url}/v1/completions", content=b"{", headers={"authorization": "Bearer secret"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


# -- completions ----------------------------------------------------------------------------------------------------


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
    [span] = answer.metadata["weight_versions"]
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


def test_seeds(served):
    create = served.client.completions.create
    texts = [
        [choice.text for choice in create(model=NAME, prompt="once", max_tokens=8, n=3, seed=seed).choices]
        for seed in (7, 7, -7)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


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
    """Every offset counts the whole characters of the bytes before its token."""
    tokens = TokenText(tokenizer)
    data = [b"" if token in tokenizer.skipped else tokens.data(token) for token in ids]
    assert b"".join(data).decode("utf-8", "replace") == text
    known = [codecs.utf_8_decode(b"".join(data[:count]), "replace", False)[0] for count in range(len(ids))]
    assert offsets == [len(before) for before in known]


def test_tokens_as_ids(served):
    answer = served.client.completions.create(
        prompt="once", max_tokens=3, logprobs=0, **with_ids(return_tokens_as_token_ids=True)
    )
    [choice] = answer.choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [list(top) for top in choice.logprobs.top_logprobs] == [[name] for name in choice.logprobs.tokens]


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


def test_logit_bias_and_penalties_reach_the_engine(served):
    def ids(bias: int, **fields: float) -> list[int]:
        extra = {name: fields.pop(name) for name in ("repetition_penalty",) if name in fields}
        answer = served.client.completions.create(
            prompt="once", max_tokens=5, logit_bias={"77": bias}, **fields, **with_ids(**extra)
        )
        return answer.choices[0].token_ids

    assert ids(100) == [77] * 5
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 2.0)):
        assert ids(6, **{name: value}) != ids(6)


def test_minimum_of_tokens(served):
    create = served.client.completions.create
    first = create(prompt="once", max_tokens=1, **with_ids()).choices[0].token_ids[0]
    for name in ("min_tokens", "min_new_tokens"):
        answer = create(prompt="once", max_tokens=4, **with_ids(stop_token_ids=[first], **{name: 3}))
        assert len(answer.choices[0].token_ids) >= 3
        assert first not in answer.choices[0].token_ids[:3]


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


# -- streaming ------------------------------------------------------------------------------------------------------


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
    assert last.metadata["weight_versions"][0]["end"] == 24


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


def wait_until_idle(served: Served) -> None:
    """Until the engine has nothing to do; paused, it never has by itself."""
    eventually(lambda: live(served) == 0)


def live(served: Served) -> int:
    status = served.engine.status()
    return status.running_requests + status.waiting_requests + status.prefilling_requests


# -- chats ----------------------------------------------------------------------------------------------------------


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
    hidden = served.client.chat.completions.create(
        messages=messages("x"), tools=[{"type": "function"}], tool_choice="none", max_tokens=1,
        **with_ids(add_generation_prompt=False),
    )  # fmt: skip
    prompt = served.tokenizer.backend.decode(hidden.choices[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<s><user>x</>"


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


def test_impossible_tokens_have_a_finite_logprob(served):
    answer = served.client.chat.completions.create(
        messages=messages("x"),
        max_tokens=1,
        logprobs=True,
        top_logprobs=20,
        **with_ids(min_tokens=1, ignore_eos=False),
    )
    [entry] = answer.choices[0].logprobs.content
    assert all(isinstance(other.logprob, float) for other in entry.top_logprobs)


# -- asyncio, aborts, pauses ----------------------------------------------------------------------------------------


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


def test_streams_from_asyncio(served):
    async def run() -> str:
        async with served.asyncio_client() as client:
            stream = await client.chat.completions.create(
                messages=messages("once"), max_tokens=12, stream=True, **GREEDY
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = served.client.chat.completions.create(messages=messages("once"), max_tokens=12, **GREEDY)
    assert asyncio.run(run()) == whole.choices[0].message.content


def test_an_aborted_answer_is_an_answer(served):
    async def run() -> openai.types.Completion:
        async with served.asyncio_client() as client:
            task = asyncio.create_task(
                client.completions.create(prompt="once", max_tokens=300, **with_ids(rid="doomed"))
            )
            while (await asyncio.to_thread(served.engine.status)).waiting_requests == 0:
                assert not task.done()
            await asyncio.to_thread(served.engine.abort, "doomed")
            return await task

    served.engine.pause("in_place")
    try:
        answer = asyncio.run(run())
    finally:
        served.engine.continue_generation()
    assert answer.choices[0].finish_reason == "abort"
    assert answer.choices[0].token_ids == []
    assert answer.metadata["weight_version"] == served.engine.status().weight_version
    assert answer.id == "doomed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_paused_is_forgotten(served, stream):
    async def run() -> None:
        async with served.asyncio_client() as client:
            task = asyncio.create_task(
                client.completions.create(prompt="once", max_tokens=300, stream=stream, **GREEDY)
            )
            while (await asyncio.to_thread(served.engine.status)).waiting_requests == 0:
                assert not task.done()
            task.cancel()
            await asyncio.wait([task])

    served.engine.pause("in_place")
    try:
        asyncio.run(run())
        wait_until_idle(served)
    finally:
        served.engine.continue_generation()


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
    first, second = last.metadata["weight_versions"]
    assert (second["version"], second["end"]) == ("next", 400)
    assert first["end"] == second["start"] > 0
    assert last.metadata["weight_version"] == "next"
    assert [model.id for model in served.client.models.list().data] == [NAME]
