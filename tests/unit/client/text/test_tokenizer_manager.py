"""TokenizerManager over a scripted engine: who gets what, when the engine is told, and what ends what."""

import asyncio
import threading

import pytest
from support.fake_scheduler import (
    answer,
    rid_of,
)
from support.text_engine import Engine, run, script, until_abort
from support.tokenizers import LINES, make_sentencepiece

from caesura.client import (
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
)
from caesura.client.text import TextTokenizer, output_text
from caesura.client.text.stop_strings import shared_stop_strings
from caesura.client.text.tokenizer_manager import (
    ENCODE_INLINE,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    GenerationRequest,
    TokenizerManager,
)
from caesura.io_struct import (
    AbortReq,
    FinishReason,
    GenerateReqInput,
)


def test_text_in_and_text_out(endpoint, tokenizer):
    output = tokenizer.encode(" 世界🎉 goes on")

    async def body(manager, fake):
        request = GenerationRequest(
            prompt="The pause",
            rid="mine",
            sampling_params=SamplingParams(n=2, seed=5),
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=2,
            token_ids_logprob=[3, 4],
            cache_salt="salt",
            min_weights_epoch=7,
            return_routed_experts=True,
            routed_experts_start_len=2,
        )
        samples = await manager.generate(request)
        sent = fake.next_request(GenerateReqInput)
        assert sent.input_ids == tokenizer.encode("The pause")
        assert not sent.stream
        for name in (
            "rid",
            "sampling_params",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "token_ids_logprob",
            "cache_salt",
            "min_weights_epoch",
            "return_routed_experts",
            "routed_experts_start_len",
        ):
            assert getattr(sent, name) == getattr(request, name), name
        assert [sample.index for sample in samples] == [0, 1]
        for sample in samples:
            assert sample.text == " 世界🎉 goes on"
            assert sample.output.output_ids == output
            assert sample.prompt_ids == sent.input_ids
            assert (sample.rid, sample.matched) == ("mine", None)

    run(endpoint, tokenizer, body, script(output))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_stop_token_is_trimmed_from_the_text_only(endpoint, tokenizer, keep, stop, stream):
    output = tokenizer.encode("on!")
    reason = FinishReason(type="stop", matched=output[-1])

    async def body(manager, fake):
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

    run(endpoint, tokenizer, body, script(output, reason))


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_its_sample_in_the_engine_and_cuts_what_came_late(endpoint, tokenizer, keep):
    first, second = tokenizer.encode("Remark"), tokenizer.encode("able: 42")
    engine = Engine(more=tokenizer.encode("late tokens"))

    async def body(manager, fake):
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

    run(endpoint, tokenizer, body, engine)


def test_the_engine_is_told_once(endpoint, tokenizer):
    engine = Engine()

    def slow(request):
        return [] if isinstance(request, AbortReq) else engine(request)

    async def body(manager, fake):
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

    run(endpoint, tokenizer, body, slow)


def test_each_of_n_samples_stops_alone(endpoint, tokenizer):
    engine = Engine()

    async def body(manager, fake):
        request = GenerationRequest(prompt="x", stop=["."], sampling_params=SamplingParams(n=3))
        task = asyncio.create_task(manager.generate(request))
        await engine.begun(fake)
        engine.say(fake, 1, tokenizer.encode("one."))
        assert (await until_abort(fake)).index == 1
        engine.say(fake, 0, tokenizer.encode("zero goes on"))
        engine.say(fake, 2, tokenizer.encode("two. no"))
        assert (await until_abort(fake)).index == 2
        assert not task.done()
        fake.push(engine.end(0, FinishReason(type="length", length=9), tokenizer.encode(" to the end.")))
        samples = await task
        assert [sample.text for sample in samples] == ["zero goes on to the end", "one", "two"]
        assert [sample.matched for sample in samples] == [".", ".", "."]
        assert fake.requests.empty()  # sample 0 had ended: nothing to abort

    run(endpoint, tokenizer, body, engine)


def test_a_text_that_no_context_holds_is_refused_untokenized(endpoint, tokenizer, monkeypatch):
    assert tokenizer.longest == max(map(len, tokenizer.backend.get_vocab()))
    limit = 4 * tokenizer.longest
    asked = []
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, text, **_: asked.append(text) or [1])

    async def body(plain, fake):
        manager = TokenizerManager(plain.client, tokenizer, context_length=4)
        long = "a" * (limit + 1)
        with pytest.raises(PromptTooLong, match=str(limit)):
            await manager.generate(GenerationRequest(prompt=long))
        with pytest.raises(PromptTooLong):
            manager.tokenize(long)
        with pytest.raises(PromptTooLong, match="characters"):
            manager.apply_chat_template([{"role": "user", "content": "a" * limit}])
        assert asked == []
        await manager.generate(GenerationRequest(prompt=long[1:]))
        assert plain.tokenize(long) == [1]
        assert asked == [long[1:], long]

    run(endpoint, tokenizer, body, answer)


def test_prompts_with_the_same_stop_strings_share_what_looks_for_them():
    one = shared_stop_strings(["shared", "stops"])
    assert shared_stop_strings(("shared", "stops")) is one
    assert shared_stop_strings(["shared"]) is not one
    for wrong in ("abc", [""], [["a"]]):
        with pytest.raises(InvalidRequest):
            shared_stop_strings(wrong)


def test_fields_over_their_size_are_refused_when_the_request_is_made():
    for field, values in {
        "stop": {"stop": ["a" * (MAX_STOP_CHARACTERS + 1)]},
        "cache_salt": {"cache_salt": "a" * (MAX_SALT_CHARACTERS + 1)},
        "rid": {"rid": "a" * 129},
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            GenerationRequest(prompt=[1], **values)
        assert caught.value.detail["field"] == field
    GenerationRequest(prompt=[1], stop=["a" * MAX_STOP_CHARACTERS], cache_salt="a" * MAX_SALT_CHARACTERS)


def test_a_long_prompt_does_not_hold_up_the_loop(endpoint, tokenizer, monkeypatch):
    threads = []
    real = TextTokenizer.encode

    def noting(self, text, **options):
        threads.append(threading.current_thread())
        return real(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode", noting)
    text = (LINES[0] * 60)[: ENCODE_INLINE + 1]

    async def body(manager, fake):
        for prompt in (text, text[:-1]):
            await manager.generate(GenerationRequest(prompt=prompt))
            assert fake.next_request(GenerateReqInput).input_ids == real(tokenizer, prompt)
        assert [thread is threading.main_thread() for thread in threads] == [False, True]

    run(endpoint, tokenizer, body, script([5]))


def test_ids_only(endpoint, tokenizer):
    async def body(manager, fake):
        for ids_only, request in (
            (TokenizerManager(manager.client, None), GenerationRequest(prompt=[1, 2])),
            (manager, GenerationRequest(prompt=[1, 2], detokenize=False)),
        ):
            (sample,) = await ids_only.generate(request)
            assert (sample.text, sample.output.output_ids) == ("", [7, 8])
            chunks = [chunk async for chunk in ids_only.stream(request)]
            assert [chunk.delta.output_ids for chunk in chunks] == [[7, 8]]
            assert chunks[0].finished.text == ""
        bare = TokenizerManager(manager.client, None)
        for field, call in {
            "text": lambda: bare.tokenize("a"),
            "tokens": lambda: bare.detokenize([1]),
            "messages": lambda: bare.apply_chat_template([{"role": "user", "content": "a"}]),
        }.items():
            with pytest.raises(InvalidRequest, match="without a tokenizer") as caught:
                call()
            assert caught.value.detail["field"] == field
        for field, request in (
            ("text", GenerationRequest(prompt="a")),
            ("stop", GenerationRequest(prompt=[1], stop=["a"])),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await bare.generate(request)
            assert caught.value.detail["field"] == field

    run(endpoint, tokenizer, body, script([7, 8]))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("stop", GenerationRequest(prompt=[1], stop=["a"], detokenize=False)),
        ("stop", GenerationRequest(prompt=[1], stop=[""])),
        ("input_ids", GenerationRequest(prompt=[1.5])),
        ("text", GenerationRequest(prompt="\ud800")),
    ],
)
def test_client_side_refusals_never_reach_the_engine(endpoint, tokenizer, field, request_):
    async def body(manager, fake):
        with pytest.raises(InvalidRequest) as caught:
            await manager.generate(request_)
        assert caught.value.detail["field"] == field
        with pytest.raises(InvalidRequest):
            await anext(manager.stream(request_))
        await manager.client.status()
        assert type(fake.next_request()).__name__ == "GetStatusReqInput"

    run(endpoint, tokenizer, body, answer)


def test_tokens_whose_bytes_may_go_on_wait_for_their_text(endpoint, tmp_path):
    tokenizer = TextTokenizer.from_folder(make_sentencepiece(tmp_path))
    owl = tokenizer.encode("🦉", add_special_tokens=False)[1:]
    assert len(owl) == 4
    word = tokenizer.encode("Stop", add_special_tokens=False)
    engine = Engine()

    async def body(manager, fake):
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

    run(endpoint, tokenizer, body, engine)


def test_options_reach_the_text(endpoint, tmp_path):
    tokenizer = TextTokenizer.from_folder(make_sentencepiece(tmp_path))
    output = tokenizer.encode("pause</s> pause", add_special_tokens=False)

    async def body(manager, fake):
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

    run(endpoint, tokenizer, body, script(output))


def test_conversations_and_ids(endpoint, tokenizer):
    async def body(manager, fake):
        messages = [{"role": "user", "content": "Stop?"}]
        prompt = tokenizer.render_chat(messages, add_generation_prompt=True)
        assert manager.apply_chat_template(messages) == tokenizer.encode(prompt, add_special_tokens=False)
        assert manager.detokenize(manager.tokenize("a</s>")) == "a"
        assert manager.detokenize(manager.tokenize("a</s>"), skip_special_tokens=False) == "a</s>"

    run(endpoint, tokenizer, body, answer)
