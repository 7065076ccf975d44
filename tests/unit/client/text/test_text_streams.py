"""Streams and batches of text over a scripted engine."""

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_scheduler import (
    FakeScheduler,
    VanishError,
    answer,
    finished,
    floats,
    results,
    rid_of,
)
from support.text_engine import Engine, run, script, until_abort
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura.client import (
    EngineDied,
    QueueFull,
    SamplingParams,
)
from caesura.client.text import TextClient
from caesura.client.text.tokenizer_manager import GenerationRequest
from caesura.io_struct import (
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
)


def test_a_stream_holds_back_what_may_become_a_stop_string_or_a_character(endpoint, tokenizer):
    parts = [tokenizer.encode(part) for part in ("on", " ST", "A", "B", "LE ")]
    half = tokenizer.encode("🏽")
    engine = Engine()

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x", stop=["STOP", "ABBA"], return_logprob=True))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        texts, tokens = [], []
        for tokens_said, text in [
            (parts[0], "on"),
            (parts[1], " "),
            (parts[2], "ST"),
            (parts[3], ""),
            (parts[4], "ABLE "),
            (half[:-1], None),
            (half[-1:], "🏽"),
        ]:
            engine.say(fake, 0, tokens_said)
            if text is None:
                continue
            chunk = await step
            step = asyncio.ensure_future(anext(stream))
            texts.append(chunk.text)
            assert chunk.text == text
            assert chunk.finished is None
            assert chunk.delta.start == len(tokens)
            assert len(chunk.delta.output_logprobs) == len(chunk.delta.output_ids)
            tokens += chunk.delta.output_ids
        fake.push(engine.end(0, FinishReason(type="length", length=1), tokenizer.encode(" S")))
        last = await step
        assert (last.text, last.finished.text) == (" S", "on STABLE 🏽 S")
        assert tokens + last.delta.output_ids == last.finished.output.output_ids
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(endpoint, tokenizer, body, engine)


def test_a_stream_ends_at_the_stop_string_with_what_the_result_says(endpoint, tokenizer):
    engine = Engine(more=tokenizer.encode("late"))

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x", stop=["STOP"], no_stop_trim=True))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        engine.say(fake, 0, tokenizer.encode("go STOP and on"))
        chunks = [await step]
        chunks += [chunk async for chunk in stream]
        sample = chunks[-1].finished
        assert "".join(chunk.text for chunk in chunks) == sample.text == "go STOP"
        ids = [token for chunk in chunks if chunk.delta for token in chunk.delta.output_ids]
        assert ids == sample.output.output_ids
        assert sample.output.finish_reason.type == "stop"

    run(endpoint, tokenizer, body, engine)


def test_a_slow_reader_gets_all_at_once_and_does_not_keep_the_engine_busy(endpoint, tokenizer):
    engine = Engine()
    words = [tokenizer.encode(f" word {i}") for i in range(50)]

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x", stop=["word 40"]))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        engine.say(fake, 0, words[0])
        assert (await step).text.startswith(" ")
        for word in words[1:]:
            engine.say(fake, 0, word)
        await until_abort(fake)  # nobody has read: the stop string was found all the same
        chunks = [chunk async for chunk in stream]
        assert len(chunks) <= 2
        assert chunks[-1].finished.text.endswith(" word 39 ")
        assert len(chunks[0].delta.output_ids) > 100

    run(endpoint, tokenizer, body, engine)


def test_samples_of_a_stream_end_one_by_one(endpoint, tokenizer):
    engine = Engine()

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt=[1], sampling_params=SamplingParams(n=2)))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        fake.push(engine.end(1, FinishReason(type="length", length=1), tokenizer.encode("b")))
        chunk = await step
        assert (chunk.index, chunk.finished.text) == (1, "b")
        fake.push(engine.end(0, FinishReason(type="length", length=1), tokenizer.encode("a")))
        assert [(c.index, c.text, c.finished.text) async for c in stream] == [(0, "a", "a")]

    run(endpoint, tokenizer, body, engine)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_cancelled_generate_is_aborted(endpoint, tokenizer, stop):
    engine = Engine()

    async def body(manager, fake):
        task = asyncio.create_task(manager.generate(GenerationRequest(prompt="x", rid="r", stop=stop)))
        await engine.begun(fake)
        task.cancel()
        abort = await until_abort(fake)
        assert (abort.rid, abort.index) == ("r", None)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(endpoint, tokenizer, body, engine)


@pytest.mark.parametrize("reading", [True, False])
def test_a_closed_stream_is_aborted(endpoint, tokenizer, reading):
    engine = Engine()

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x", rid="r"))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        if reading:
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        else:
            engine.say(fake, 0, tokenizer.encode("a"))
            await step
            await stream.aclose()
        assert (await until_abort(fake)).rid == "r"

    run(endpoint, tokenizer, body, engine)


def test_a_stream_read_to_its_end_aborts_nothing(endpoint, tokenizer):
    async def body(manager, fake):
        assert [c.text async for c in manager.stream(GenerationRequest(prompt="x"))] == ["a"]
        fake.next_request(GenerateReqInput)
        await manager.client.status()
        assert type(fake.next_request()).__name__ == "GetStatusReqInput"

    run(endpoint, tokenizer, body, script(tokenizer.encode("a")))


def test_the_engines_errors_come_after_what_was_generated(endpoint, tokenizer):
    engine = Engine()

    async def body(manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x"))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        tokens = tokenizer.encode("partial")
        reason = FinishReason(type="error", code=ErrorCode.OUT_OF_MEMORY, message="no memory")
        engine.say(fake, 0, tokens)
        fake.push(engine.end(0, reason))
        assert (await step).text == "partial"
        with pytest.raises(Exception, match="no memory") as caught:
            await anext(stream)
        assert caught.value.output.output_ids == tokens

    run(endpoint, tokenizer, body, engine)


def test_the_death_of_the_engine_reaches_every_waiter(endpoint, tokenizer):
    def handler(request):
        if isinstance(request, GenerateReqInput) and request.rid == "last":
            raise VanishError
        return []

    async def body(manager, fake):
        batch = [GenerationRequest(prompt=[i], rid=f"b{i}") for i in range(3)]
        waiting = [
            asyncio.ensure_future(manager.generate(GenerationRequest(prompt="x"))),
            asyncio.ensure_future(manager.generate(GenerationRequest(prompt="x", stop=["a"]))),
            asyncio.ensure_future(anext(manager.stream(GenerationRequest(prompt="x")))),
            asyncio.ensure_future(manager.generate_batch(batch)),
            asyncio.ensure_future(manager.generate(GenerationRequest(prompt="x", rid="last"))),
        ]
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, EngineDied)

    run(endpoint, tokenizer, body, handler, connect_timeout=0.2)


def test_a_batch_is_answered_in_order(endpoint, tokenizer):
    def handler(request):
        tokens = tokenizer.encode(f"answer to {tokenizer.decode(request.input_ids)}")
        return script(tokens)(request)

    async def body(manager, fake):
        prompts = [f"prompt {i}" for i in range(500)]
        found = await manager.generate_batch([GenerationRequest(prompt=prompt) for prompt in prompts])
        assert [samples[0].text for samples in found] == [f"answer to {prompt}" for prompt in prompts]
        assert await manager.generate_batch([]) == []

    run(endpoint, tokenizer, body, handler)


def test_a_refused_prompt_aborts_the_rest_of_its_batch(endpoint, tokenizer):
    def handler(request):
        if isinstance(request, GenerateReqInput) and request.rid == "r1":
            return [ErrorReply(id=request.id, code=ErrorCode.QUEUE_FULL, message="full")]
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    async def body(manager, fake):
        requests = [GenerationRequest(prompt=[i], rid=f"r{i}") for i in range(3)]
        with pytest.raises(QueueFull, match="full") as caught:
            await manager.generate_batch(requests)
        assert caught.value.__notes__ == ["prompt 1 of 3"]
        assert {(await until_abort(fake)).rid for _ in range(2)} == {"r0", "r2"}

    run(endpoint, tokenizer, body, handler)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_scored_prompt_has_no_output_whole_or_streamed(endpoint, tokenizer, stop, reason):
    def handler(request):
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        ended = FinishReason(type=reason, matched=9 if reason == "stop" else None)
        told = {"output_logprobs": floats([-1.0]), "input_logprobs": floats([math.nan, -2.0, -3.0])}
        return [results(finished(rid_of(request), [9], 0, finish_reason=ended, **told))]

    async def body(manager, fake):
        request = GenerationRequest(
            prompt=[1, 2, 3], scored=True, stop=stop, return_logprob=True, logprob_start_len=0
        )
        chunks = [chunk async for chunk in manager.stream(request)]
        assert [(chunk.text, chunk.delta, chunk.prompt_tokens) for chunk in chunks] == [("", None, 3)]
        for sample in (*await manager.generate(request), chunks[0].finished):
            output = sample.output
            assert (sample.text, sample.matched, output.output_ids, output.output_logprobs) == (
                "",
                None,
                [],
                [],
            )
            assert output.input_logprobs == [None, -2.0, -3.0]
            assert (output.finish_reason.type, output.finish_reason.length) == (
                ("abort", None) if reason == "abort" else ("length", 0)
            )

    run(endpoint, tokenizer, body, handler)


THREADS = 6


@pytest.fixture
def folder(tmp_path):
    make_byte_level(tmp_path, vocab_size=400)
    return tmp_path


def test_calls_of_other_threads_end_with_the_client(folder):
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(20):
            with FakeScheduler(f"ipc://{folder}/s{number}", lambda request: []) as fake:
                client = TextClient(fake.endpoint, str(folder))
                waiting = [pool.submit(lambda c=client: next(c.stream("abc"))) for _ in range(THREADS)]
                eventually(lambda f=fake: f.requests.qsize() >= THREADS)
                client.close()
                for each in waiting:
                    with pytest.raises(EngineDied):
                        each.result()


def test_a_stream_that_the_loops_own_thread_collects_holds_up_nothing(folder):
    with (
        FakeScheduler(f"ipc://{folder}/s") as fake,
        TextClient(fake.endpoint, str(folder)) as client,
    ):
        stream = client.stream("abc")
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        client._loop.call_soon_threadsafe(gc.collect)
        assert client.generate("abc").output.output_ids
