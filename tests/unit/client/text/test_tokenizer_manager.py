"""TokenizerManager over a scripted engine: who gets what, whole or streamed, and what the engine is told."""

import asyncio
import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_scheduler import FakeScheduler, answer, finished, floats, results, rid_of
from support.text_engine import Engine, engine_below, script, until_abort
from support.tokenizers import LINES, make_byte_level, make_sentencepiece
from support.waiting import eventually

from caesura.client import EngineDied, InvalidRequest, PromptTooLong, QueueFull, SamplingParams, ShuttingDown
from caesura.client.text import TextClient, TextTokenizer, output_text
from caesura.client.text.stop_strings import shared_stop_strings
from caesura.client.text.tokenizer_manager import (
    ENCODE_INLINE,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    GenerationRequest,
    TokenizerManager,
)
from caesura.io_struct import AbortReq, ErrorCode, ErrorReply, FinishReason, GenerateReqInput


@pytest.fixture
def engine():
    return Engine()


async def test_text_in_and_text_out(endpoint, tokenizer):
    output = tokenizer.encode(" 世界🎉 goes on")
    options = {
        "rid": "mine",
        "sampling_params": SamplingParams(n=2, seed=5),
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, 4],
        "cache_salt": "salt",
        "min_weights_epoch": 7,
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
    }
    async with engine_below(endpoint, tokenizer, script(output)) as (manager, fake):
        samples = await manager.generate(GenerationRequest(prompt="The pause", **options))
        sent = fake.next_request(GenerateReqInput)
        assert (sent.input_ids, sent.stream) == (tokenizer.encode("The pause"), False)
        assert {name: getattr(sent, name) for name in options} == options
        assert [sample.index for sample in samples] == [0, 1]
        for sample in samples:
            assert (sample.text, sample.rid, sample.matched) == (" 世界🎉 goes on", "mine", None)
            assert (sample.output.output_ids, sample.prompt_ids) == (output, sent.input_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_stop_token_is_trimmed_from_the_text_only(endpoint, tokenizer, keep, stop, stream):
    output = tokenizer.encode("on!")
    reason = FinishReason(type="stop", matched=output[-1])
    async with engine_below(endpoint, tokenizer, script(output, reason)) as (manager, _):
        request = GenerationRequest(prompt=[5], no_stop_trim=keep, stop=stop)
        if stream:
            chunks = [chunk async for chunk in manager.stream(request)]
            samples = [chunk.finished for chunk in chunks if chunk.finished]
            assert "".join(chunk.text for chunk in chunks) == samples[0].text
            assert [t for chunk in chunks if chunk.delta for t in chunk.delta.output_ids] == output
        else:
            samples = await manager.generate(request)
        assert [sample.text for sample in samples] == ["on!" if keep else "on"]
        assert samples[0].matched == output[-1]
        assert samples[0].output.output_ids == output


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_string_ends_its_sample_in_the_engine(endpoint, tokenizer, keep):
    first, second = tokenizer.encode("Remark"), tokenizer.encode("able: 42")
    engine = Engine(more=tokenizer.encode("late tokens"))
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
        request = GenerationRequest(prompt="x", stop=["zzz", "able:"], no_stop_trim=keep, return_logprob=True)
        task = asyncio.create_task(manager.generate(request))
        await engine.begun(fake)
        engine.say(fake, 0, first)
        engine.say(fake, 0, second)
        abort = await until_abort(fake)
        assert (abort.rid, abort.index) == (rid_of(engine.request), 0)
        (sample,) = await task
        assert sample.text == ("Remarkable:" if keep else "Remark")
        assert (sample.matched, sample.output.finish_reason.type) == ("able:", "stop")
        ids = sample.output.output_ids
        assert tokenizer.decode(ids).startswith("Remarkable:")
        assert "Remarkable:" not in tokenizer.decode(ids[:-1])
        assert sample.output.output_logprobs == [float(token) for token in ids]
        assert sample.output.weight_versions[-1].end == len(ids)


async def test_the_engine_is_told_once(endpoint, tokenizer, engine):

    def slow(request):
        return [] if isinstance(request, AbortReq) else engine(request)

    async with engine_below(endpoint, tokenizer, slow) as (manager, fake):
        task = asyncio.create_task(manager.generate(GenerationRequest(prompt="x", stop=["."])))
        await engine.begun(fake)
        engine.say(fake, 0, tokenizer.encode("one."))
        await until_abort(fake)
        engine.say(fake, 0, tokenizer.encode(" more."))
        engine.say(fake, 0, tokenizer.encode(" and more."))
        fake.push(engine.end(0))
        assert [sample.text for sample in await task] == ["one"]
        status = asyncio.ensure_future(manager.client.status())
        assert type(await asyncio.to_thread(fake.next_request)).__name__ == "GetStatusReqInput"
        await status


class Noting(TextTokenizer):
    """Notes each text and the thread that encodes it."""

    def __init__(self, *files):
        super().__init__(*files)
        self.asked = []

    def encode(self, text, **options):
        self.asked.append((text, threading.current_thread()))
        return super().encode(text, **options)


async def test_too_long_a_text_is_refused_untokenized(endpoint, tmp_path):
    tokenizer = Noting.from_folder(make_byte_level(tmp_path))
    assert tokenizer.longest == max(map(len, tokenizer.backend.get_vocab()))
    limit = 4 * tokenizer.longest
    long = "a" * (limit + 1)
    async with engine_below(endpoint, tokenizer, answer) as (plain, _):
        manager = TokenizerManager(plain.client, tokenizer, context_length=4)
        with pytest.raises(PromptTooLong, match=str(limit)):
            await manager.generate(GenerationRequest(prompt=long))
        with pytest.raises(PromptTooLong):
            manager.tokenize(long)
        with pytest.raises(PromptTooLong, match="characters"):
            manager.apply_chat_template([{"role": "user", "content": "a" * limit}])
        assert tokenizer.asked == []
        await manager.generate(GenerationRequest(prompt=long[1:]))
        plain.tokenize(long)
        assert [text for text, _ in tokenizer.asked] == [long[1:], long]


def test_equal_stop_strings_share_their_matcher():
    one = shared_stop_strings(["shared", "stops"])
    assert shared_stop_strings(("shared", "stops")) is one
    assert shared_stop_strings(["shared"]) is not one


@pytest.mark.parametrize(
    "field,value",
    [
        ("stop", ["a" * (MAX_STOP_CHARACTERS + 1)]),
        ("cache_salt", "a" * (MAX_SALT_CHARACTERS + 1)),
        ("rid", "a" * 129),
    ],
)
def test_fields_over_their_size_are_refused_when_made(field, value):
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(prompt=[1], **{field: value})
    assert caught.value.detail["field"] == field
    GenerationRequest(prompt=[1], stop=["a" * MAX_STOP_CHARACTERS], cache_salt="a" * MAX_SALT_CHARACTERS)


async def test_a_long_prompt_does_not_hold_up_the_loop(endpoint, tmp_path):
    tokenizer = Noting.from_folder(make_byte_level(tmp_path))
    text = (LINES[0] * 60)[: ENCODE_INLINE + 1]
    async with engine_below(endpoint, tokenizer, script([5])) as (manager, _):
        for prompt in (text, text[:-1]):
            await manager.generate(GenerationRequest(prompt=prompt))
        assert [thread is threading.main_thread() for _, thread in tokenizer.asked] == [False, True]


async def test_ids_only(endpoint, tokenizer):
    async with engine_below(endpoint, tokenizer, script([7, 8])) as (manager, _):
        bare = TokenizerManager(manager.client, None)
        for ids_only, options in ((bare, {}), (manager, {"detokenize": False})):
            request = GenerationRequest(prompt=[1, 2], **options)
            (sample,) = await ids_only.generate(request)
            assert (sample.text, sample.output.output_ids) == ("", [7, 8])
            (chunk,) = [chunk async for chunk in ids_only.stream(request)]
            assert (chunk.delta.output_ids, chunk.finished.text) == ([7, 8], "")
        for field, call in {
            "text": lambda: bare.tokenize("a"),
            "tokens": lambda: bare.detokenize([1]),
            "messages": lambda: bare.apply_chat_template([{"role": "user", "content": "a"}]),
        }.items():
            with pytest.raises(InvalidRequest, match="without a tokenizer") as caught:
                call()
            assert caught.value.detail["field"] == field
        for field, options in (("text", {"prompt": "a"}), ("stop", {"prompt": [1], "stop": ["a"]})):
            with pytest.raises(InvalidRequest) as caught:
                await bare.generate(GenerationRequest(**options))
            assert caught.value.detail["field"] == field


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("stop", GenerationRequest(prompt=[1], stop=["a"], detokenize=False)),
        ("stop", GenerationRequest(prompt=[1], stop=[""])),
        ("input_ids", GenerationRequest(prompt=[1.5])),
        ("text", GenerationRequest(prompt="\ud800")),
    ],
)
async def test_client_side_refusals_never_reach_the_engine(endpoint, tokenizer, field, request_):
    async with engine_below(endpoint, tokenizer, answer) as (manager, fake):
        with pytest.raises(InvalidRequest) as caught:
            await manager.generate(request_)
        assert caught.value.detail["field"] == field
        with pytest.raises(InvalidRequest):
            await anext(manager.stream(request_))
        await manager.client.status()
        assert type(fake.next_request()).__name__ == "GetStatusReqInput"


async def test_tokens_whose_bytes_may_go_on_wait_for_their_text(endpoint, tmp_path, engine):
    tokenizer = TextTokenizer.from_folder(make_sentencepiece(tmp_path))
    owl = tokenizer.encode("🦉", add_special_tokens=False)[1:]
    assert len(owl) == 4
    word = tokenizer.encode("Stop", add_special_tokens=False)
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
        stream = manager.stream(GenerationRequest(prompt=word, stop=["🦉"]))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        engine.say(fake, 0, word)
        first = await step
        engine.say(fake, 0, owl)
        engine.say(fake, 0, owl)
        engine.say(fake, 0, word)
        rest = [chunk async for chunk in stream]
        ids = first.delta.output_ids + [t for c in rest if c.delta for t in c.delta.output_ids]
        assert ids == word + owl == rest[-1].finished.output.output_ids
        assert rest[-1].finished.text == first.text == " Stop"


async def test_options_reach_the_text(endpoint, tmp_path):
    tokenizer = TextTokenizer.from_folder(make_sentencepiece(tmp_path))
    output = tokenizer.encode("pause</s> pause", add_special_tokens=False)
    async with engine_below(endpoint, tokenizer, script(output)) as (manager, fake):
        request = GenerationRequest(
            prompt="The",
            add_special_tokens=False,
            skip_special_tokens=False,
            stop=["pause"],
            sampling_params=SamplingParams(min_new_tokens=len(output)),
        )
        (sample,) = await manager.generate(request)
        assert fake.next_request(GenerateReqInput).input_ids == tokenizer.encode(
            "The", add_special_tokens=False
        )
        assert sample.text == output_text(tokenizer, sample.prompt_ids, output, skip_special_tokens=False)
        assert "</s>" in sample.text
        assert sample.matched is None


async def test_conversations_and_ids(endpoint, tokenizer):
    async with engine_below(endpoint, tokenizer, answer) as (manager, _):
        messages = [{"role": "user", "content": "Stop?"}]
        prompt = tokenizer.render_chat(messages, add_generation_prompt=True)
        assert manager.apply_chat_template(messages) == tokenizer.encode(prompt, add_special_tokens=False)
        assert manager.detokenize(manager.tokenize("a</s>")) == "a"
        assert manager.detokenize(manager.tokenize("a</s>"), skip_special_tokens=False) == "a</s>"


async def test_a_stream_holds_back_what_may_go_on(endpoint, tokenizer, engine):
    half = tokenizer.encode("🏽")
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
        stream = manager.stream(GenerationRequest(prompt="x", stop=["STOP", "ABBA"], return_logprob=True))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        tokens = []
        for said, shown in [("on", "on"), (" ST", " "), ("A", "ST"), ("B", ""), ("LE ", "ABLE "), ("", "🏽")]:
            if not said:
                engine.say(fake, 0, half[:-1])
            engine.say(fake, 0, tokenizer.encode(said) if said else half[-1:])
            chunk = await step
            step = asyncio.ensure_future(anext(stream))
            assert (chunk.text, chunk.finished, chunk.delta.start) == (shown, None, len(tokens))
            assert len(chunk.delta.output_logprobs) == len(chunk.delta.output_ids)
            tokens += chunk.delta.output_ids
        fake.push(engine.end(0, FinishReason(type="length", length=1), tokenizer.encode(" S")))
        last = await step
        assert (last.text, last.finished.text) == (" S", "on STABLE 🏽 S")
        assert tokens + last.delta.output_ids == last.finished.output.output_ids
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_slow_reader_does_not_keep_the_engine_busy(endpoint, tokenizer, engine):
    words = [tokenizer.encode(f" word {i}") for i in range(50)]
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
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


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_tokens_of_an_interval_come_together(endpoint, tokenizer, engine, stop):
    tokens = tokenizer.encode("The line goes on")[:5]
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
        stream = manager.stream(GenerationRequest(prompt=[5], stream_interval=3, stop=stop))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        for first, end in ((0, 1), (1, 4)):
            for token in tokens[first:end]:
                engine.say(fake, 0, [token])
                await manager.client.status()  # which is answered after it
            assert (await step).delta.output_ids == tokens[first:end]
            step = asyncio.ensure_future(anext(stream))
        engine.say(fake, 0, tokens[4:])
        fake.push(ErrorReply(id=engine.request.id, code=ErrorCode.SHUTTING_DOWN, message="ends"))
        assert (await step).delta.output_ids == tokens[4:]
        with pytest.raises(ShuttingDown):
            await anext(stream)


async def test_samples_of_a_stream_end_one_by_one(endpoint, tokenizer, engine):
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
        stream = manager.stream(GenerationRequest(prompt=[1], sampling_params=SamplingParams(n=2)))
        step = asyncio.ensure_future(anext(stream))
        await engine.begun(fake)
        fake.push(engine.end(1, FinishReason(type="length", length=1), tokenizer.encode("b")))
        chunk = await step
        assert (chunk.index, chunk.finished.text) == (1, "b")
        fake.push(engine.end(0, FinishReason(type="length", length=1), tokenizer.encode("a")))
        assert [(c.index, c.text, c.finished.text) async for c in stream] == [(0, "a", "a")]


async def test_a_stream_read_to_its_end_aborts_nothing(endpoint, tokenizer):
    async with engine_below(endpoint, tokenizer, script(tokenizer.encode("a"))) as (manager, fake):
        assert [c.text async for c in manager.stream(GenerationRequest(prompt="x"))] == ["a"]
        fake.next_request(GenerateReqInput)
        await manager.client.status()
        assert type(fake.next_request()).__name__ == "GetStatusReqInput"


async def test_the_engines_errors_come_after_what_was_generated(endpoint, tokenizer, engine):
    async with engine_below(endpoint, tokenizer, engine) as (manager, fake):
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


async def test_a_refused_prompt_aborts_the_rest_of_its_batch(endpoint, tokenizer):
    def handler(request):
        if isinstance(request, GenerateReqInput) and request.rid == "r1":
            return [ErrorReply(id=request.id, code=ErrorCode.QUEUE_FULL, message="full")]
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    async with engine_below(endpoint, tokenizer, handler) as (manager, fake):
        requests = [GenerationRequest(prompt=[i], rid=f"r{i}") for i in range(3)]
        with pytest.raises(QueueFull, match="full") as caught:
            await manager.generate_batch(requests)
        assert caught.value.__notes__ == ["prompt 1 of 3"]
        assert {(await until_abort(fake)).rid for _ in range(2)} == {"r0", "r2"}


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_scored_prompt_has_no_output_whole_or_streamed(endpoint, tokenizer, stop, reason):
    def handler(request):
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        ended = FinishReason(type=reason, matched=9 if reason == "stop" else None)
        told = {"output_logprobs": floats([-1.0]), "input_logprobs": floats([math.nan, -2.0, -3.0])}
        return [results(finished(rid_of(request), [9], 0, finish_reason=ended, **told))]

    async with engine_below(endpoint, tokenizer, handler) as (manager, _):
        request = GenerationRequest(
            prompt=[1, 2, 3], scored=True, stop=stop, return_logprob=True, logprob_start_len=0
        )
        chunks = [chunk async for chunk in manager.stream(request)]
        assert [(chunk.text, chunk.delta, chunk.prompt_tokens) for chunk in chunks] == [("", None, 3)]
        for sample in (*await manager.generate(request), chunks[0].finished):
            output = sample.output
            assert (sample.text, sample.matched) == ("", None)
            assert (output.output_ids, output.output_logprobs) == ([], [])
            assert output.input_logprobs == [None, -2.0, -3.0]
            assert (output.finish_reason.type, output.finish_reason.length) == (
                ("abort", None) if reason == "abort" else ("length", 0)
            )


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


def test_a_stream_collected_by_the_loop_holds_up_nothing(folder):
    with FakeScheduler(f"ipc://{folder}/s") as fake, TextClient(fake.endpoint, str(folder)) as client:
        stream = client.stream("abc")
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        client._loop.call_soon_threadsafe(gc.collect)
        assert client.generate("abc").output.output_ids
