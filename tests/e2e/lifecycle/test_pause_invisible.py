"""A pause without an update is invisible (I8): the real model, paused before every step of a mixed workload.

Requests arrive at fixed steps, so that the paused and the unpaused run build the same batches. Then
``in_place`` changes no bit. ``retract`` recomputes KV in other batches, which moves the last bits: logprobs
stay within 1e-4.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import ContinueGenerationReqInput, GenerateReqInput, SamplingParams

NUM_STEPS = 20


@dataclass(frozen=True)
class Arrival:
    """A request, and how many steps have been launched when it comes."""

    step: int
    prompt: list[int]
    params: SamplingParams


def text(length: int, number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 97, length).tolist()


def sampled(new_tokens: int, seed: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, temperature=1.0, seed=seed, ignore_eos=True, **fields)


def workload(seed: int) -> list[Arrival]:
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return [
        Arrival(0, text(5, 1), sampled(20, seed)),
        Arrival(1, text(100, 2), sampled(12, seed + 1)),
        Arrival(2, text(17, 3), greedy),
        Arrival(6, text(33, 4), sampled(9, seed + 2, top_p=0.8, top_k=20)),
        Arrival(8, text(3, 5), sampled(1, seed + 3)),
    ]


def with_shared_prefixes_and_stops(seed: int) -> list[Arrival]:
    """Draw arrivals that also have what a pipeline of depth 1 learns a step late."""
    stops = list(range(3, 97, 9))
    return [*workload(seed), Arrival(3, text(40, 6), sampled(9, seed + 4, n=3, stop_token_ids=stops))]


class Stage:
    """One engine that plays workloads, each from an empty cache."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver

    @property
    def step(self) -> int:
        return self.driver.engine.state.step

    def play(self, arrivals: list[Arrival], pause_before: int | None = None, mode: str = "in_place"):
        """Return [(tokens, logprobs)] per sample and the number of steps; pause before ``pause_before``."""
        driver, first, rids = self.driver, self.step, []
        driver.flush(torch_empty_cache=False)
        assert driver.status().kv.free == driver.status().kv.total
        waiting, paused = list(arrivals), False
        live = driver.engine.live
        while waiting or live or driver.ongoing is not None:
            while waiting and waiting[0].step <= self.step - first:
                rids.append(self.send(waiting.pop(0)))
            if not paused and self.step - first == pause_before:
                self.pause(mode)
                paused = True
            driver.tick()
        assert paused == (pause_before is not None)
        assert driver.status().generation == "running"
        found = [driver.result(rid, i) for rid, n in rids for i in range(n)]
        outputs = [(tokens_of(r), np.frombuffer(r.output_logprobs, "<f4")) for r in found]
        assert all(len(tokens) == len(logprobs) > 0 for tokens, logprobs in outputs)
        return outputs, self.step - first

    def send(self, arrival: Arrival) -> tuple[str, int]:
        message = GenerateReqInput(
            input_ids=arrival.prompt, sampling_params=arrival.params, return_logprob=True
        )
        return self.driver.submit(message), arrival.params.n

    def pause(self, mode: str) -> None:
        before = self.step
        reply = self.driver.pause(mode)
        assert reply.step == self.step == before
        self.driver.tick(3)
        assert self.step == before, "a step was launched during the pause"
        self.driver.send(ContinueGenerationReqInput())  # takes effect in the next tick, before its step


@pytest.fixture(scope="module", params=[0, 1], ids=["depth0", "depth1"])
def stage(tmp_path_factory, request):
    model = tmp_path_factory.mktemp("model")
    make_checkpoint(model, "qwen3", seed=3)
    with EngineDriver(
        str(model), scripted=False, pipeline_depth=request.param, chunked_prefill_size=32
    ) as driver:
        yield Stage(driver)


@pytest.fixture
def arrivals(stage):
    return workload if stage.driver.config.pipeline_depth else with_shared_prefixes_and_stops


@pytest.mark.parametrize(("seed", "every"), quick([(7, 3), (7, 1), (40, 1), (73, 1)]))
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_nothing(stage, arrivals, mode, seed, every):
    expected, _ = stage.play(arrivals(seed))
    retracted = stage.driver.status().num_retractions
    steps = range(0, NUM_STEPS, every)
    for step in steps:
        outputs, _ = stage.play(arrivals(seed), step, mode)
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(outputs, expected, strict=True):
            assert tokens == expected_tokens, f"paused before step {step}"
            if mode == "in_place":
                assert logprobs.tobytes() == expected_logprobs.tobytes(), f"paused before step {step}"
            np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-4)
    assert (stage.driver.status().num_retractions - retracted > len(steps)) == (mode == "retract")
