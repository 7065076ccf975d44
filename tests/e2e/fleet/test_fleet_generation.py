"""Generations of a fleet of real engines."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.tokenizers import make_byte_level
from support.waiting import PATIENCE_S

from caesura.client import (
    EngineDied,
    EpochBehind,
    GenerateOutput,
    InternalError,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    TokenDelta,
    launch_scheduler,
)
from caesura.client.group import Fleet
from caesura.client.text import TextTokenizer
from caesura.client.text.tokenizer_manager import GenerationRequest, TokenizerManager
from caesura.io_struct import GenerateReqInput
from caesura.scheduler.kernels import TORCH, best

DETERMINISTIC = best("linear", "cpu", torch.float32) != TORCH
"""True if tokens and logprobs are the same bits in every composition of a batch; else they agree up to the
last bits of a float32.
"""
PROMPT = [5, 6, 7, 8]
NEW = 60
SEAM = 17
ATTEMPTS = 20
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=11, ignore_eos=True)
LONG = msgspec.structs.replace(SAMPLED, max_new_tokens=600)
"""Sampling of a request that outlasts this process's next action on its engine, even on a busy core."""
CASES = {
    "greedy": SamplingParams(max_new_tokens=NEW, temperature=0.0, seed=1, ignore_eos=True),
    "sampled": SAMPLED,
    "filtered": msgspec.structs.replace(SAMPLED, top_p=0.9, top_k=40, min_p=0.01),
    "penalised": msgspec.structs.replace(
        SAMPLED, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2
    ),
    "several": msgspec.structs.replace(SAMPLED, n=3),
    "unlimited": SamplingParams(max_new_tokens=None, temperature=1.0, seed=3, ignore_eos=True),
    "biased": msgspec.structs.replace(SAMPLED, ignore_eos=False, min_new_tokens=40, logit_bias={1: 6.0}),
}
EVERYTHING: dict[str, Any] = {
    "return_logprob": True, "return_raw_logprob": True, "return_sampled_logprob": True,
    "top_logprobs_num": 3, "token_ids_logprob": [1, 2], "logprob_start_len": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(path, "qwen3", seed=3, vocab_size=408, eos_token_id=1, max_position_embeddings=700)
    return path


@pytest.fixture(scope="module")
def launch(model) -> Iterator[Callable[[], SchedulerClient]]:
    with ExitStack() as stack:

        def one() -> SchedulerClient:
            return stack.enter_context(
                launch_scheduler(
                    model,
                    dtype="float32",
                    num_threads=1,
                    kv_pool_tokens=4096,
                    deterministic=DETERMINISTIC,
                    check_ledger=True,
                    log_level="WARNING",
                )
            )

        yield one


@pytest.fixture(scope="module")
def engines(launch) -> list[SchedulerClient]:
    return [launch(), launch()]


def run(engines: list[SchedulerClient], body: Callable[[Fleet], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        addresses = [engine.endpoint for engine in engines]
        async with (
            asyncio.timeout(PATIENCE_S),
            Fleet(addresses, **{"look_interval_s": 0, **options}) as fleet,
        ):
            await body(fleet)

    asyncio.run(main())


async def moved(fleet: Fleet, params: SamplingParams, *seams: int, **options: Any) -> list[GenerateOutput]:
    """Return the outputs of a request whose engine is taken out of routing when its samples have ``seams``
    tokens together; every token comes once, in order. It is asked again if an engine was done before this
    process came to fence it, or was fenced before it had made a token.
    """
    for _ in range(ATTEMPTS):
        before = fleet.dispatcher.moved
        outputs = await moved_if_in_time(fleet, params, *seams, **options)
        joined = any(len({span.incarnation for span in each.weight_versions}) > 1 for each in outputs)
        if joined and fleet.dispatcher.moved - before >= len(seams):
            return outputs
    raise AssertionError(f"the engine was faster {ATTEMPTS} times")


async def moved_if_in_time(
    fleet: Fleet, params: SamplingParams, *seams: int, **options: Any
) -> list[GenerateOutput]:
    handle = await fleet.submit(PROMPT, params, stream=True, **options)
    seen: dict[int, list[int]] = {index: [] for index in range(params.n)}
    left = list(seams)
    async for delta in handle:
        assert delta.start == len(seen[delta.index])
        seen[delta.index] += delta.output_ids
        if left and sum(map(len, seen.values())) >= left[0]:
            left.pop(0)
            await fleet.heal()
            busiest = max(fleet.members, key=lambda member: member.load)
            fleet.dispatcher.fence(busiest, "the test says so")
    outputs = await handle.results()
    assert [output.output_ids for output in outputs] == list(seen.values())
    await fleet.heal()
    return outputs


def same(found: GenerateOutput, expected: GenerateOutput) -> None:
    assert (found.index, found.finish_reason) == (expected.index, expected.finish_reason)
    assert found.output_ids == expected.output_ids
    assert (found.prompt_tokens, found.seed) == (expected.prompt_tokens, expected.seed)
    for name in ("output_logprobs", "raw_logprobs", "sampled_logprobs"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-4), name
    for name in ("output_top", "output_token_ids", "input_top", "input_token_ids"):
        rows, of_whole = getattr(found, f"{name}_logprobs"), getattr(expected, f"{name}_logprobs")
        assert (rows is None) == (of_whole is None), name
        if rows is not None:
            assert rows.ids == of_whole.ids, name
            assert rows.logprobs == pytest.approx(of_whole.logprobs, abs=1e-4), name
    inputs, of_whole = found.input_logprobs, expected.input_logprobs
    assert (inputs is None) == (of_whole is None)
    assert inputs is None or inputs[1:] == pytest.approx(of_whole[1:], abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_moved_generation_equals_one_that_stayed(engines, case):
    params = CASES[case]

    async def body(fleet: Fleet) -> None:
        whole = await fleet.generate([PROMPT], params, **EVERYTHING)
        outputs = await moved(fleet, params, SEAM, 2 * SEAM, **EVERYTHING)
        for found, expected in zip(outputs, whole, strict=True):
            same(found, expected)
            assert found.weight_versions[-1].end == len(found.output_ids)
        assert any(len({span.incarnation for span in each.weight_versions}) == 2 for each in outputs)

    run(engines, body)


@pytest.mark.parametrize(("number", "samples"), [(signal.SIGKILL, 1), (signal.SIGTERM, 2)])
def test_an_engine_that_ends_costs_none_of_many_requests(engines, launch, number, samples):
    leaving = launch()
    params = msgspec.structs.replace(LONG, n=samples)
    prompts = [[*PROMPT, last] for last in range(8)]

    async def body(fleet: Fleet) -> None:
        whole = await fleet.generate(prompts, params, return_logprob=True)
        handles = [await fleet.submit(prompt, params, stream=True, return_logprob=True) for prompt in prompts]
        doomed = next(member for member in fleet.members if member.address.endpoint == leaving.endpoint)
        assert doomed.load > 1
        async for _ in handles[0]:
            os.kill(leaving.status().pid, number)
            break
        outputs = [output for handle in handles for output in await handle.results()]
        for found, expected in zip(outputs, whole, strict=True):
            same(found, expected)
        assert (doomed.state, doomed.load) == ("gone", 0)
        assert fleet.dispatcher.moved > 1
        assert {span.version for output in outputs for span in output.weight_versions} == {"default"}
        later = await fleet.generate(prompts, msgspec.structs.replace(SAMPLED, n=samples))
        assert len(later) == len(prompts) * samples
        assert not fleet.dispatcher.flows
        assert {member.load for member in fleet.members} == {0}

    run([engines[0], leaving], body)


def test_a_sink_that_raises_ends_its_own_request_of_a_fleet(engines):
    """The engine of that request is told to stop, and the other requests end as they would have."""

    class Broken:
        def on_tokens(self, delta: TokenDelta) -> None:
            raise ValueError("a caller's mistake")

        def on_finished(self, output: GenerateOutput) -> None:
            raise AssertionError("nothing follows a sink's error")

    async def body(fleet: Fleet) -> None:
        others = [await fleet.submit([*PROMPT, number], SAMPLED) for number in range(4)]
        request = GenerateReqInput(input_ids=PROMPT, sampling_params=LONG, stream=True, rid="broken")
        broken = fleet.client.channel.start_generation(request, Broken())
        with pytest.raises(InternalError, match="a caller's mistake") as caught:
            await broken.waiter
        assert isinstance(caught.value.__cause__, ValueError)
        for handle in others:
            assert len((await handle.result()).output_ids) == NEW
        assert not fleet.dispatcher.flows
        for member in fleet.members:
            while (await member.client.status()).running_requests:  # noqa: ASYNC110  (the engine's state)
                await asyncio.sleep(0.01)
        assert [member.load for member in fleet.members] == [0, 0]

    run(engines, body)


def test_stops_are_found_across_the_seam(engines, tmp_path):
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path))

    async def body(fleet: Fleet) -> None:
        whole = await fleet.generate(PROMPT, SAMPLED)
        stop = next(token for token in whole.output_ids[SEAM + 3 :] if token not in whole.output_ids[:SEAM])
        params = msgspec.structs.replace(SAMPLED, stop_token_ids=[stop])
        (output,) = await moved(fleet, params, SEAM)
        assert output.output_ids == whole.output_ids[: whole.output_ids.index(stop) + 1]
        assert (output.finish_reason.type, output.finish_reason.matched) == ("stop", stop)

        manager = TokenizerManager(fleet.client, tokenizer)
        asked = GenerationRequest(prompt=PROMPT, sampling_params=SAMPLED, return_logprob=True)
        (plain,) = await manager.generate(asked)
        texts = [tokenizer.decode(whole.output_ids[:count]) for count in range(NEW + 1)]
        begins, ends = len(texts[SEAM - 2]), len(texts[SEAM + 4])
        phrase = plain.text[begins:ends]  # begins before the seam and ends behind it
        found = plain.text.index(phrase)
        for _ in range(ATTEMPTS):
            before, text = fleet.dispatcher.moved, ""
            async for chunk in manager.stream(replace(asked, stop=[phrase])):
                text += chunk.text
                flows = list(fleet.dispatcher.flows.values())
                if flows and not flows[0].moves:
                    busiest = max(fleet.members, key=lambda member: member.load)
                    fleet.dispatcher.fence(busiest, "the test says so")
                if chunk.finished is not None:
                    sample = chunk.finished
            await fleet.heal()
            if fleet.dispatcher.moved > before:
                break
        else:
            raise AssertionError(f"the engine was faster {ATTEMPTS} times")
        assert text == plain.text[:found] == sample.text
        assert (sample.output.finish_reason.type, sample.matched) == ("stop", phrase)
        count = len(sample.output.output_ids)
        assert sample.output.output_ids == whole.output_ids[:count]
        assert sample.output.output_logprobs == plain.output.output_logprobs[:count]

    run(engines, body)


def test_requests_wait_for_an_engine_while_patient(engines):
    async def body(fleet: Fleet) -> None:
        for member in fleet.members:
            fleet.dispatcher.fence(member, "none serves")
        handle = await fleet.submit(PROMPT, SAMPLED)
        assert not handle.done()
        await fleet.heal()
        assert len((await handle.result()).output_ids) == NEW
        for member in fleet.members:
            fleet.dispatcher.fence(member, "none serves")
        with pytest.raises(EngineDied, match="no engine of the fleet") as caught:
            await fleet.generate(PROMPT, SAMPLED)
        assert set(caught.value.detail["members"].values()) == {"none serves"}

    run(engines, body, patience_s=0.2)


def test_caller_errors_end_the_stream(engines):
    async def body(fleet: Fleet) -> None:
        handle = await fleet.submit(PROMPT, LONG, stream=True, rid="mine", return_logprob=True)
        async for _ in handle:
            break
        assert await fleet.abort("mine") == 1
        output = await handle.result()
        assert output.finish_reason.type == "abort"
        assert 0 < len(output.output_ids) == len(output.output_logprobs) < LONG.max_new_tokens
        # while it waits for an engine, there is nobody to be told
        handle = await fleet.submit(PROMPT, LONG, stream=True, rid="mine")
        async for _ in handle:
            break
        for member in fleet.members:
            fleet.dispatcher.fence(member, "none serves")
        assert await fleet.abort(abort_all=True) == 1
        output = await handle.result()
        assert (output.finish_reason.type, output.rid) == ("abort", "mine")
        assert output.weight_versions[-1].end == len(output.output_ids) > 0
        await fleet.heal()
        with pytest.raises(EpochBehind):
            await fleet.generate(PROMPT, SAMPLED, min_weights_epoch=fleet.weights_epoch + 1)
        with pytest.raises(InvalidRequest):
            await fleet.generate(PROMPT, {"top_p": 7.0})
        assert not fleet.dispatcher.flows
        assert [member.load for member in fleet.members] == [0, 0]

    run(engines, body)
