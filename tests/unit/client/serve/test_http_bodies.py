"""Large bodies: the same structs as from small ones, bounded before they are made."""

import asyncio
import json
from collections import Counter

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_scheduler import FakeScheduler
from support.http_server import listening
from support.properties import examples
from support.tokenizers import make_byte_level

from caesura.client import AsyncSchedulerClient
from caesura.client.exceptions import InvalidRequest, QueueFull
from caesura.client.serve import bodies, context
from caesura.client.serve.bodies import decode_large
from caesura.client.serve.context import Workers
from caesura.client.serve.openai.completions import CompletionRequest
from caesura.client.serve.sglang.generate import GenerateBody
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import START_SLICE, GenerationRequest, TokenizerManager
from caesura.io_struct import SamplingParams

NATIVE = msgspec.json.Decoder(GenerateBody)
OPENAI = msgspec.json.Decoder(CompletionRequest, strict=False)
PROMPTS = {"text": b'""', "input_ids": b"[]"}

ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
texts = st.text(max_size=6)
given_fields = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.lists(texts, max_size=4) | st.none(),
        "input_ids": ids | st.lists(ids, max_size=4) | st.none(),
        "sampling_params": st.fixed_dictionaries({}, optional={"stop": texts, "n": st.integers(1, 4)})
        | st.none(),
        "rid": st.text("ab é", max_size=6),
        "stream": st.booleans(),
        "custom_labels": st.dictionaries(texts, texts, max_size=2),
    },
)


@settings(max_examples=examples(200))
@given(given_fields, st.sampled_from([None, 1]), st.booleans())
def test_large_bodies_are_what_small_ones_are(fields, indent, ascii_only):
    raw = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    assert decode_large(raw, NATIVE, PROMPTS, 100) == NATIVE.decode(raw)


def test_a_large_body_with_an_unknown_key_is_refused_like_a_small_one():
    for decode in (NATIVE.decode, lambda raw: decode_large(raw, NATIVE, PROMPTS, 100)):
        with pytest.raises(msgspec.ValidationError, match="unknown field `no such field`"):
            decode(b'{"text": "a", "no such field": []}')


@settings(max_examples=examples(100))
@given(texts | ids | st.lists(texts, max_size=4) | st.lists(ids, max_size=4), st.integers(1, 3))
def test_completions_logprobs_too(prompt, n):
    raw = json.dumps({"prompt": prompt, "n": n, "model": "m"}).encode()
    assert decode_large(raw, OPENAI, {"prompt": b"[]"}, 100) == OPENAI.decode(raw)


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids": [' + b"[]," * 5_000_000 + b"[]]}",
        b'{"input_ids": [' + b"1," * 7_000_000 + b"1]}",
        b'{"input_ids": [[' + b"1," * 7_000_000 + b"1]]}",
        b'{"input_ids": [' + b"[1]," * 5000 + b"[1]]}",
        b'{"input_ids": [' + b'"a",' * 50_000 + b"1]}",
        b'{"input_ids": [' + b"1," * 50_000 + b'"a"]}',
        b'{"text": [' + b'"",' * 5_000_000 + b'""]}',
        b'{"text": ["a",' + b"[]," * 5_000_000 + b"[]]}",
        b'{"text": "a", "sampling_params": [' + b"{}," * 5_000_000 + b"{}]}",
        b'{"text": "a", "custom_labels": [' + b"[]," * 5_000_000 + b"[]]}",
        b'{"text": "a", "rid": [' + b'"",' * 5_000_000 + b'""]}',
        b'{"text": "\xff' + b"a" * 50_000 + b'"}',
        b'{"text": ["\xff' + b"a" * 50_000 + b'"]}',
        b'{"text": "' + b"a" * 50_000,
        b'{"input_ids": {' + b'"a": 1,' * 50_000 + b'"a": 1}}',
        b"[" * 1_000_000,
    ],
)
def test_oversized_requests_are_400_before_allocation(body):
    with listening() as server:
        response = httpx.post(f"{server.url}/generate", content=body, timeout=None)
        assert response.status_code == 400, response.text[:300]
        if b"[]" not in body and b"{}" not in body and b'""' not in body:
            body = body.replace(b"input_ids", b"prompt").replace(b"text", b"prompt")
            assert httpx.post(f"{server.url}/v1/completions", content=body, timeout=None).status_code == 400


def test_bodies_of_other_routes_are_small():
    five_million = b'{"tokens": [' + b"12345," * 5_000_000 + b"1]}"
    with listening() as server:
        for path in ("/detokenize", "/tokenize", "/v1/chat/completions"):
            assert httpx.post(server.url + path, content=five_million, timeout=None).status_code == 413, path
        command = b'{"mode": "' + b"x" * (1 << 20) + b'"}'
        assert httpx.post(f"{server.url}/pause_generation", content=command, timeout=None).status_code == 413


def test_many_rows_of_text_are_400(tmp_path):
    make_byte_level(tmp_path, vocab_size=400)
    tokenizer = TextTokenizer.from_folder(tmp_path)
    with listening(tokenizer=tokenizer, context_length=512, max_batch=100) as server:
        for path, name, value in (("/tokenize", "prompt", ""), ("/detokenize", "tokens", [])):
            for count, status in ((100, 200), (101, 400)):
                body = {name: [value] * count}
                assert httpx.post(server.url + path, json=body).status_code == status, (path, count)
        long = httpx.post(f"{server.url}/detokenize", json={"tokens": [65] * 10_000}).json()["text"]
        assert long == tokenizer.decode([65]) * 10_000


def test_a_batch_is_started_in_slices(tmp_path):
    """Between two slices everybody else has had a turn."""
    turns, started = 0, Counter()

    async def run(endpoint: str) -> None:
        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with AsyncSchedulerClient(endpoint, connect_timeout=None) as client:
            start = client.channel.start_generation

            def counted(*args):
                started[turns] += 1
                return start(*args)

            client.channel.start_generation = counted
            manager = TokenizerManager(client, None)
            params = SamplingParams(max_new_tokens=1)
            requests = [
                GenerationRequest(prompt=[i], sampling_params=params, detokenize=False) for i in range(1000)
            ]
            other = asyncio.ensure_future(take_turns())
            results = await manager.generate_batch(requests)
            other.cancel()
            assert [result[0].prompt_ids for result in results] == [[i] for i in range(1000)]

    with FakeScheduler(f"ipc://{tmp_path}/engine") as engine:
        asyncio.run(run(engine.endpoint))
    assert sum(started.values()) == 1000
    assert max(started.values()) <= 2 * START_SLICE


def test_a_large_batch_is_answered_in_order(tmp_path):
    with (
        FakeScheduler(f"ipc://{tmp_path}/engine") as engine,
        listening(endpoint=engine.endpoint, connect_timeout=None) as server,
    ):
        prompts = [[i, 7, 7] for i in range(4096)]
        answers = httpx.post(f"{server.url}/generate", json={"input_ids": prompts}, timeout=None).json()
        assert [answer["output_ids"] for answer in answers] == [[7, 7, i, 0] for i in range(4096)]
        few = httpx.post(f"{server.url}/generate", json={"input_ids": prompts[:40]}, timeout=None).json()
        assert few == answers[:40] or [a["output_ids"] for a in few] == [
            a["output_ids"] for a in answers[:40]
        ]


def test_workers_refuse_what_would_wait_too_long(monkeypatch):
    monkeypatch.setattr(context, "MAX_WAITING", 2)

    async def run() -> None:
        crew, release = Workers(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        tasks = [asyncio.ensure_future(crew.run(wait)) for _ in range(context.THREADS + 2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await crew.run(wait)
        release.set()
        await asyncio.gather(*tasks)
        assert await crew.run(lambda: 7) == 7

    asyncio.run(run())


def test_a_prompt_has_so_many_ids(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_PROMPT_TOKENS", 10)
    with pytest.raises(Exception, match=r"input_ids\[1\]: 11 ids are over the limit of 10") as caught:
        decode_large(json.dumps({"input_ids": [[1], [1] * 11]}).encode(), NATIVE, PROMPTS, 5)
    assert caught.value.code == "prompt_too_long"
    with pytest.raises(InvalidRequest, match="3 prompts are over the limit of 2"):
        decode_large(b'{"input_ids": [[1], [2], [3]]}', NATIVE, PROMPTS, 2)
