"""Steps, prompts and decodes of an image engine that fail or find no memory: who ends, and who goes on."""

import numpy as np
import pytest
import torch
from support.scripted import EngineDriver

from caesura.io_struct import (
    SdeParams,
)

pytest.importorskip("diffusers")
from support.image_requests import STEPS, TEXT, image, request, run
from support.pipelines import tensors_of

from caesura.scheduler.images import batcher
from caesura.scheduler.images.batcher import RAISE_AFTER


@pytest.fixture
def driver(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


def test_latents_that_are_not_finite_fail_their_sample_alone(driver, monkeypatch):
    message, other = request(), request(seed=3)
    real = driver.engine.runner.family.velocity

    def broken(x, sigma, embeds, guidance, size):
        velocity = real(x, sigma, embeds, guidance, size)
        velocity[0] = torch.nan
        return velocity

    rid, second = driver.send(message), driver.send(other)
    driver.tick(3)
    monkeypatch.setattr(driver.engine.runner.family, "velocity", broken)
    driver.tick()
    monkeypatch.undo()
    driver.run_until_idle()
    reason = image(driver, rid).finish_reason
    assert (reason.type, "not finite" in reason.message) == ("error", True)
    assert image(driver, second).finish_reason.type == "length"


@pytest.mark.parametrize("failures", [1, 3])
def test_a_step_without_memory_is_made_again_in_halves(driver, monkeypatch, failures):
    expected = [tensors_of(each) for each in run(driver, request(n=4, sde=SdeParams(type="sde")))]
    runner = driver.engine.runner
    execute, left = runner.execute, [failures]

    def short(batch):
        if batch.kind == "denoise" and len(batch.samples) > 1 and left[0]:
            left[0] -= 1
            raise MemoryError("not enough")
        return execute(batch)

    monkeypatch.setattr(runner, "execute", short)
    results = run(driver, request(n=4, sde=SdeParams(type="sde")))
    for result, tensors in zip(results, expected, strict=True):
        np.testing.assert_allclose(tensors_of(result)["latents"], tensors["latents"], rtol=0, atol=1e-5)
    status = driver.status().step_failures
    assert (status.failed, status.token_limit) == (min(failures, 2), 2 if failures == 1 else 1)
    for _ in range(RAISE_AFTER // STEPS * 4):
        run(driver, request(n=4))
    assert driver.status().step_failures.token_limit is None


def test_a_step_that_fails_ends_its_samples_and_no_others(driver, monkeypatch):
    runner = driver.engine.runner
    first = driver.send(request())
    driver.tick(3)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_velocity", lambda *_: 1 / 0)
        driver.tick()
    second = driver.send(request())
    driver.run_until_idle()
    assert image(driver, first).finish_reason.type == "error"
    assert image(driver, first).steps_done > 0
    assert image(driver, second).finish_reason.type == "length"


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("not enough")])
def test_a_prompt_that_cannot_be_encoded_ends_all_its_samples_at_once(driver, monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.runner, "_encode", fail)
        rid = driver.send(request(n=12, prompt="a blue"))  # more than may run
        driver.tick(2 if isinstance(error, MemoryError) else 1)
        ended = [image(driver, rid, index).finish_reason for index in range(12)]
    code = "out_of_memory" if isinstance(error, MemoryError) else "internal"
    assert {(reason.type, reason.code) for reason in ended} == {("error", code)}
    assert run(driver, request())[0].finish_reason.type == "length"


def test_small_steps_take_one_thread_of_an_engines_several(driver, monkeypatch):
    family, seen = driver.engine.runner.family, {}
    for kind in ("velocity", "decode", "encode"):
        call = getattr(family, kind)
        monkeypatch.setattr(
            family,
            kind,
            lambda *a, kind=kind, call=call: (seen.update({kind: torch.get_num_threads()}), call(*a))[1],
        )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(driver, request())
        assert (seen, torch.get_num_threads()) == ({"encode": 3, "velocity": 1, "decode": 1}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("most", "expected"), [(1 << 20, [3]), (2 * (8 + 8 + TEXT), [2, 1]), (1, [1, 1, 1])])
def test_long_prompts_are_encoded_few_at_a_time(driver, monkeypatch, most, expected):
    monkeypatch.setattr(batcher, "ENCODED_TOKENS", most)
    runner, steps = driver.engine.runner, []
    encode = runner._encode
    monkeypatch.setattr(runner, "_encode", lambda prompts: (steps.append(len(prompts)), encode(prompts))[1])
    rids = [driver.send(request(prompt=prompt)) for prompt in ("a red", "a blue", "a green")]
    driver.run_until_idle()
    assert steps == expected
    assert {image(driver, rid).finish_reason.type for rid in rids} == {"length"}
