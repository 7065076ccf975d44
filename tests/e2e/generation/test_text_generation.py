"""Text from a real engine: stop strings cut what it would have said, and the engine stops saying it."""
# ruff: noqa: ASYNC110  (another process's state is asked for)

import asyncio
import os
import signal
import threading

import pytest
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.tokenizers import make_byte_level, make_sentencepiece

from caesura.client import (
    AsyncSchedulerClient,
    EngineDied,
    InvalidRequest,
    SamplingParams,
    TimedOut,
    launch_scheduler,
)
from caesura.client.text import AsyncTextClient, TextClient, TextTokenizer, output_text
from caesura.client.text.tokenizer_manager import GenerationRequest, TokenizerManager

LONG = SamplingParams(max_new_tokens=48, temperature=1.0, ignore_eos=True, n=3, seed=11)


def serve(path, **options):
    return launch_scheduler(
        path, dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=8192, deterministic=True,
        check_ledger=True, log_level="WARNING", **options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=quick([make_sentencepiece, make_byte_level]))
def tokenizer(request, tmp_path_factory):
    return TextTokenizer.from_folder(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(path, "qwen3", seed=3, vocab_size=408, eos_token_id=1)
    return path


@pytest.fixture(scope="module")
def engine(model):
    with serve(model) as client:
        yield client


def run(engine, tokenizer, body):
    async def main():
        async with AsyncSchedulerClient(engine.endpoint) as client:
            await body(TokenizerManager(client, tokenizer))

    asyncio.run(main())


async def idle(client):
    while (status := await client.status()).running_requests + status.waiting_requests:
        await asyncio.sleep(0.01)
    assert status.kv.held == 0


async def read(stream):
    texts, tokens, logprobs, samples = {}, {}, {}, {}
    async for chunk in stream:
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        if chunk.delta is not None:
            assert chunk.delta.start == len(tokens.setdefault(chunk.index, []))
            tokens[chunk.index] += chunk.delta.output_ids
            logprobs.setdefault(chunk.index, []).extend(chunk.delta.output_logprobs)
        if chunk.finished is not None:
            samples[chunk.index] = chunk.finished
    for index, sample in samples.items():
        assert texts[index] == sample.text
        assert tokens[index] == sample.output.output_ids
        assert logprobs[index] == sample.output.output_logprobs
    return [samples[index] for index in sorted(samples)]


def test_stop_strings_cut_the_unstopped_text(engine, tokenizer):
    options = {"prompt": "The pause", "return_logprob": True, "top_logprobs_num": 2}

    async def body(manager):
        whole = await manager.generate(GenerationRequest(sampling_params=LONG, **options))
        assert [len(sample.output.output_ids) for sample in whole] == [48] * 3
        for sample in whole:
            assert sample.text == output_text(tokenizer, sample.prompt_ids, sample.output.output_ids)
        stops = [sample.text[at : at + 5] for sample, at in zip(whole[:2], (5, 12), strict=True)]
        request = GenerationRequest(sampling_params=LONG, stop=stops, **options)
        found = await manager.generate(request)
        assert [sample.matched for sample in found] == [
            *stops,
            None,
        ]  # the third goes on when the others have stopped
        for cut, full in zip(found, whole, strict=True):
            count = len(cut.output.output_ids)
            assert cut.output.output_ids == full.output.output_ids[:count]
            assert cut.output.output_logprobs == full.output.output_logprobs[:count]
            assert len(cut.output.output_top_logprobs) == count
            assert cut.output.weight_versions[-1].end == count
            assert full.text.startswith(cut.text + (cut.matched or ""))
            assert not any(stop in cut.text for stop in stops)
            assert cut.output.finish_reason.type == ("stop" if cut.matched else "length")
        streamed = await read(manager.stream(request))
        assert [(s.text, s.matched, s.output.output_ids) for s in streamed] == [
            (s.text, s.matched, s.output.output_ids) for s in found
        ]
        await idle(manager.client)

    run(engine, tokenizer, body)


def test_hundreds_of_streams_equal_single_calls(engine, tokenizer):
    async def body(manager):
        requests = [
            GenerationRequest(
                prompt=f"line {i}",
                sampling_params=SamplingParams(max_new_tokens=16, seed=i, n=1 + i % 2),
                stop=["e", "in"] if i % 3 else (),
                return_logprob=True,
            )
            for i in range(120)
        ]
        streamed = await asyncio.gather(*(read(manager.stream(request)) for request in requests))
        batch = await manager.generate_batch(requests)
        for one, other in zip(streamed, batch, strict=True):
            assert [(s.text, s.output.output_ids, s.matched) for s in one] == [
                (s.text, s.output.output_ids, s.matched) for s in other
            ]
        await idle(manager.client)

    run(engine, tokenizer, body)


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_requests_of_gone_clients_are_aborted(engine, tokenizer, stop):
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, n=4)

    async def body(manager):
        await manager.client.pause("in_place")
        request = GenerationRequest(prompt="The", sampling_params=params, stop=stop)
        waiting = asyncio.ensure_future(manager.generate(request))
        stream = manager.stream(request)
        reading = asyncio.ensure_future(anext(stream))
        while (await manager.client.status()).waiting_requests < 8:
            await asyncio.sleep(0.01)
        waiting.cancel()
        reading.cancel()
        await asyncio.wait([waiting, reading])
        await idle(manager.client)
        await manager.client.continue_generation()
        async for chunk in (stream := manager.stream(request)):
            assert chunk.finished is None
            break
        await stream.aclose()
        await idle(manager.client)

    run(engine, tokenizer, body)


def test_an_abort_from_outside_gives_the_text_so_far(engine, tokenizer):
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)

    async def body(manager):
        stream = manager.stream(
            GenerationRequest(prompt="The", rid="r", sampling_params=params, return_logprob=True)
        )
        first = await anext(stream)
        await manager.client.pause("abort")
        rest = [chunk async for chunk in stream]
        sample = rest[-1].finished if rest else first.finished
        assert sample.text == first.text + "".join(chunk.text for chunk in rest)
        assert sample.text == output_text(tokenizer, sample.prompt_ids, sample.output.output_ids)
        assert (sample.output.finish_reason.type, sample.matched) == ("abort", None)
        await manager.client.continue_generation()

    run(engine, tokenizer, body)


def test_a_dead_engine_is_told_to_every_waiter(model, tmp_path):
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path))
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)

    async def body(manager, engine):
        await manager.client.pause("in_place")
        request = GenerationRequest(prompt="The", sampling_params=params, stop=["never said"])
        waiting = [asyncio.ensure_future(manager.generate(request)) for _ in range(50)]
        waiting += [asyncio.ensure_future(anext(manager.stream(request))) for _ in range(50)]
        waiting.append(asyncio.ensure_future(manager.generate_batch([request] * 3)))
        while (await manager.client.status()).waiting_requests < 103:
            await asyncio.sleep(0.01)
        os.kill((await manager.client.status()).pid, signal.SIGKILL)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineDied)

    async def main(engine):
        client = AsyncSchedulerClient(engine.endpoint, connect_timeout=0.2)
        async with client:
            await body(TokenizerManager(client, tokenizer), engine)

    with serve(model) as engine:
        asyncio.run(main(engine))


@pytest.fixture
def text_client(engine, tokenizer):
    with TextClient(engine.endpoint, tokenizer) as client:
        yield client


GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def wait_until_idle(engine):
    while (status := engine.status()).running_requests + status.waiting_requests:
        threading.Event().wait(0.01)


def test_a_text_client_takes_text_and_stop_strings(engine, tokenizer, text_client):
    whole = text_client.generate("The pause", GREEDY, return_logprob=True)
    assert whole.text == output_text(tokenizer, whole.prompt_ids, whole.output.output_ids)
    assert whole.prompt_ids == tokenizer.encode("The pause")
    assert len(whole.output.output_logprobs) == 24
    stop = whole.text[4:8]
    cut = text_client.generate("The pause", {"max_new_tokens": 24, "temperature": 0.0}, stop=stop)
    assert (cut.text, cut.matched, cut.output.finish_reason.type) == (whole.text[:4], stop, "stop")
    assert text_client.generate(whole.prompt_ids, GREEDY).text == whole.text
    chunks = list(text_client.stream("The pause", GREEDY, stop=[stop]))
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].finished.text == cut.text


def test_a_text_client_takes_several_prompts_in_order(text_client):
    alone = [text_client.generate(prompt, GREEDY).text for prompt in ("one", "two")]
    assert [sample.text for sample in text_client.generate(["one", "two"], GREEDY)] == alone
    params = [SamplingParams(n=2, seed=3, max_new_tokens=4), SamplingParams(max_new_tokens=2)]
    found = text_client.generate(["one", [5, 6]], params, rid="r")
    assert [(sample.rid, sample.index) for sample in found] == [("r-0", 0), ("r-0", 1), ("r-1", 0)]
    assert len(text_client.generate("one", SamplingParams(n=2, max_new_tokens=2))) == 2
    assert len(text_client.generate(["one"], GREEDY)) == 1


def test_an_asyncio_text_client_says_the_same(engine, tokenizer, text_client):
    async def main():
        async with AsyncTextClient(engine.endpoint, tokenizer) as client:
            sample = await client.generate("The pause", GREEDY)
            chunks = [chunk.text async for chunk in client.stream("The pause", GREEDY)]
            return sample.text, "".join(chunks)

    text = text_client.generate("The pause", GREEDY).text
    assert asyncio.run(main()) == (text, text)


def test_a_text_call_that_times_out_is_aborted(engine, text_client):
    engine.pause("in_place")
    with pytest.raises(TimedOut, match="aborted"):
        text_client.generate("The pause", GREEDY, stop="never said", timeout=0.05)
    wait_until_idle(engine)
    engine.continue_generation()


def test_mistakes_in_calls_for_text_name_the_remedy(engine, text_client):
    with pytest.raises(TypeError, match=r"stop .*TextClient"):
        SamplingParams(stop=["\n"])
    with pytest.raises(TypeError, match=r"stop: .*TextClient"):
        engine.generate([1], stop=["\n"])
    with pytest.raises(InvalidRequest, match=r"is text, .*TextClient"):
        engine.generate("The pause")
    with pytest.raises(TypeError, match="did you mean max_new_tokens, a field of sampling_params"):
        text_client.generate("The pause", max_tokens=4)
    with pytest.raises(InvalidRequest, match="3 sampling_params for 2 prompts"):
        text_client.generate(["a", "b"], [None, None, None])
    with pytest.raises(InvalidRequest, match="must be an integer"):
        text_client.generate([[1, 1.5]])
