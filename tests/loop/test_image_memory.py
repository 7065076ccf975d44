"""Memory of image engines: what samples hold together, and steps, requests and prompts that cannot fit."""

import pytest
from support.faults import Fault
from support.scripted import EngineDriver

from caesura.io_struct import SdeParams

pytest.importorskip("diffusers")
from support.image_requests import STEPS, TEXT, refusal, request, specs_of
from support.pipelines import tensors_of

from caesura.scheduler.images import memory_limit


@pytest.fixture
def driver(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8, prompt_cache_bytes=0) as driver:
        yield driver


def reasons(driver, message):
    return [driver.images[message.id, index][0].finish_reason for index in range(message.n)]


def run(driver, message, buffers=()):
    driver.send(message, buffers=buffers)
    driver.run_until_idle()
    return reasons(driver, message)


def held(driver):
    samples = driver.engine.batcher.running
    prompts = {id(prompt): prompt for sample in samples for prompt in sample.conditioning.prompts}
    tensors = [each for prompt in prompts.values() for each in (prompt.embeds or {}).values()]
    tensors += [sample.latent for sample in samples if sample.latent is not None]
    arrays = [each for sample in samples for each in sample.latents.values()]
    arrays += [sample.image for sample in samples if sample.image is not None]
    return sum(each.nbytes for each in (*tensors, *arrays))


def announced(driver, message):
    driver.send(message)
    driver.tick()
    sample = driver.engine.live.samples(message.id)[0]
    conditioning = sample.conditioning
    assert conditioning.prompt.embeds is not None, "it has started"
    there = sum(each.nbytes for prompt in conditioning.prompts for each in (prompt.embeds or {}).values())
    driver.run_until_idle()
    assert conditioning.nbytes == pytest.approx(there, rel=0.2)
    return sample.latent_bytes + sample.kept_bytes, conditioning.nbytes


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
def test_samples_wait_rather_than_hold_more_than_they_may(driver, mode):
    sample, prompt = announced(driver, request(guidance_scale=3.0))
    driver.engine.batcher.limit.device = limit = prompt * 2 + sample * 3
    messages = [request(n=n, prompt=text, guidance_scale=3.0) for n, text in ((2, "a blue"), (5, "green"))]
    for message in messages:
        driver.send(message)
    most = 0
    for _ in range(2 * STEPS):
        driver.tick()
        most = max(most, held(driver))
        assert 0 < len(driver.engine.batcher.running) < 7
    assert 0.7 * limit < most < 1.2 * limit, "as many as may, and no more"
    if mode is not None:
        driver.pause(mode)
        assert held(driver) <= (limit * 1.2 if mode == "in_place" else 0)
        driver.go_on()
    driver.run_until_idle()
    for message in messages:
        assert {reason.type for reason in reasons(driver, message)} == {"length"}


def test_a_large_sample_keeps_its_place_and_starts_alone(driver):
    """The sample's size does not matter: nothing would be there sooner by waiting for more."""
    sample, prompt = announced(driver, request())
    driver.engine.batcher.limit.device = prompt + sample
    small, large, last = request(), request(width=32, height=32), request()
    driver.run(small, large, last)
    ended = [rid for rid, _ in driver.images][1:]
    assert ended == [small.id, large.id, last.id]
    assert {reason.type for message in (small, large, last) for reason in reasons(driver, message)} == {
        "length"
    }


def test_embeddings_that_wait_are_limited(driver):
    asked = request()
    first = run(driver, asked)
    assert first[0].type == "length"
    tensors = tensors_of(driver.images[asked.id, 0][0])
    specs, buffers = specs_of({name: tensors[name] for name in ("prompt_embeds", "pooled_prompt_embeds")})
    nbytes = sum(map(len, buffers))
    driver.engine.batcher.limit.device = 4 * nbytes
    driver.pause("in_place")
    given = [request(prompt=None, tensors=specs, n=3) for _ in range(2)]
    for message in given:
        driver.send(message, buffers=buffers)
    reply = refusal(driver, request(prompt=None, tensors=specs), buffers)
    assert (reply.code, reply.detail) == ("queue_full", {"waiting": 2 * nbytes, "limit": 2 * nbytes})
    text = request()
    driver.send(text)
    driver.go_on()
    driver.run_until_idle()
    for message in (*given, text):
        assert {reason.type for reason in reasons(driver, message)} == {"length"}
    driver.engine.batcher.limit.device = 1
    assert run(driver, request(prompt=None, tensors=specs), buffers)[0].type == "length", "it is the only one"


@pytest.fixture
def memory(monkeypatch):
    """Free and total bytes of the host, of which steps of any size ask."""
    known = [1 << 40, 1 << 40]
    monkeypatch.setattr(memory_limit, "WORTH_ASKING", 0)
    monkeypatch.setattr(memory_limit, "free_and_total", lambda module: tuple(known))
    return known


def least_of(driver):
    least = driver.engine.runner.footprint.least
    return max(least("denoise", 1, (16, 16)), least("decode", 1, (16, 16)))


def test_an_image_too_large_for_the_machine_is_refused(driver, memory):
    least = driver.engine.runner.footprint.least
    memory[:] = [0, least("decode", 1, (16, 16))]
    reply = refusal(driver, request(width=32))
    assert (reply.code, reply.detail) == (
        "out_of_memory",
        {"needed": least("decode", 1, (16, 32)), "total": memory[1]},
    )
    assert "32 x 16 pixels" in reply.message
    memory[:] = [1 << 40, max(memory[1], least_of(driver))]
    assert run(driver, request())[0].type == "length"


def test_a_prompt_too_long_for_the_machine_is_refused(driver, memory):
    least = driver.engine.runner.footprint.least_encoding
    clip = 8
    memory[1] = least(1, [clip, clip, 400])
    reply = refusal(driver, request(max_sequence_length=800))
    assert (reply.code, reply.detail) == (
        "out_of_memory",
        {"needed": least(1, [clip, clip, 800]), "total": memory[1]},
    )
    assert f"1 prompts of {clip} and {clip} and 800 tokens" in reply.message
    assert reply.detail["needed"] > 2 * memory[1], "more than in proportion"
    assert run(driver, request(max_sequence_length=400, num_inference_steps=1))[0].type == "length"


def test_a_step_that_cannot_fit_is_not_begun(driver, memory):
    memory[0] = least_of(driver)
    results = run(driver, request(n=4))
    assert {reason.type for reason in results} == {"length"}
    assert driver.status().step_failures.token_limit == 1
    memory[0] = 0
    (reason,) = run(driver, request())
    assert (reason.type, reason.code) == ("error", "out_of_memory")
    assert "0 are free" in reason.message
    memory[0] = 1 << 40
    assert run(driver, request())[0].type == "length"


def test_prompts_that_do_not_fit_together_are_encoded_apart(driver, memory):
    runner, steps = driver.engine.runner, []
    encode = runner._encode

    def encoded(prompts):
        steps.append(len(prompts))
        if sum(steps) == 4:
            memory[0] = 1 << 40  # what comes after takes more
        return encode(prompts)

    runner._encode = encoded
    memory[0] = runner.footprint.least_encoding(2, [8, 8, TEXT])
    messages = [request(prompt=text) for text in ("a red", "a blue", "a green", "a red circle")]
    driver.run(*messages)
    assert {reason.type for message in messages for reason in reasons(driver, message)} == {"length"}
    assert steps == [2, 2]


def test_a_sample_whose_steps_fail_apart_goes_on(driver):
    with Fault(driver.engine.runner, "execute", MemoryError("not enough"), range(0, 1000, 2)):
        (reason,) = run(driver, request(sde=SdeParams(type="sde")))
    assert reason.type == "length"
    assert driver.status().step_failures.failed == STEPS + 2
