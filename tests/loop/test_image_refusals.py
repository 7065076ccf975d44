"""Refusals of an image engine, and their words."""

import numpy as np
import pytest
import torch
from support.image_requests import STEPS, TEXT, image, refusal, request, run, spec
from support.pipelines import tensors_of
from support.scripted import EngineDriver

from caesura.io_struct import GenerateReqInput, SdeParams, TensorSpec
from caesura.io_struct.codec import encode
from caesura.scheduler.images import batcher
from caesura.scheduler.images.admission import MAX_EMBED_TOKENS
from caesura.scheduler.images.batcher import RAISE_AFTER

pytest.importorskip("diffusers")


@pytest.fixture
def driver(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


@pytest.fixture(scope="module")
def untouched(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


REFUSED = [
    ({"width": 20}, "width"),
    ({"height": 15}, "height"),
    ({"height": 72}, "height"),
    ({"prompt": None}, "prompt"),
    ({"prompt_ids": [[1], [1], [1]]}, "prompt"),
    ({"prompt": None, "prompt_ids": [[1]]}, "prompt_ids"),
    ({"prompt": None, "prompt_ids": [[1], [1], [99]]}, "prompt_ids"),
    ({"prompt": None, "prompt_ids": [[1], [1], [1]], "guidance_scale": 2.0}, "negative_prompt"),
    ({"sigmas": [0.5, 0.7]}, "sigmas"),
    ({"sigmas": [1.0, 0.5], "shift": 2.0}, "shift"),
    ({"shift": 0.0}, "shift"),
    ({"guidance_scale": float("nan")}, "guidance_scale"),
    ({"sde": SdeParams(type="cps", noise_level=1.5)}, "sde.noise_level"),
    ({"sde": SdeParams(type="sde", noise_level=float("inf"))}, "sde.noise_level"),
    ({"sde": SdeParams(type="sde", steps=[5])}, "sde.steps"),
    ({"return_steps": [5]}, "return_steps"),
    ({"max_sequence_length": 0}, "max_sequence_length"),
    ({"prompt": None, "prompt_ids": [[1], [1, 1], [1]]}, "prompt_ids"),
    ({"prompt": None, "prompt_ids": [[1], [1], [1] * 5000]}, "prompt_ids"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_values_are_refused_by_field(untouched, fields, field):
    reply = refusal(untouched, request(**fields))
    assert (reply.code, reply.detail["field"]) == ("invalid_request", field)
    assert len(untouched.engine.live) == 0


@pytest.mark.parametrize("fields", [{"sigmas": [0.5] * 1000}, {"prompt": None, "prompt_ids": [[1] * 4000]}])
def test_a_refusal_does_not_repeat_a_long_value(driver, fields):
    reply = refusal(driver, request(**fields))
    assert reply.code == "invalid_request"
    assert len(encode(reply)) < 1000


def test_embeddings_that_do_not_fit_are_refused(driver):
    zeros = [bytes(4 * 40 * 3), bytes(4 * 24)]
    pooled = spec("pooled_prompt_embeds", [24], 1)
    nan = np.full((3, 40), np.nan, np.float32).tobytes()
    for specs, buffers in (
        ([spec("prompt_embeds", [3, 40])], zeros),
        ([spec("prompt_embeds", [3, 41]), pooled], [bytes(4 * 41 * 3), bytes(96)]),
        ([spec("embeds", [3, 40]), pooled], zeros),
        ([spec("prompt_embeds", [3, 40]), pooled], zeros[:1]),
        ([spec("prompt_embeds", [3, 40]), pooled], [*zeros, b"more"]),
        ([spec("prompt_embeds", [3, 40]), pooled], [nan, bytes(96)]),
        ([spec("prompt_embeds", [3, 40], dtype="I32"), pooled], zeros),
        ([spec("prompt_embeds", [3, 40], dtype="F64"), pooled], [np.full(120, 1e300).tobytes(), bytes(96)]),
    ):
        reply = refusal(driver, request(prompt=None, tensors=specs), buffers)
        assert reply.code == "invalid_request"
    specs = [spec("prompt_embeds", [3, 40]), pooled]
    assert run(driver, request(prompt=None, tensors=specs), zeros)[0].finish_reason.type == "length"


def test_embeddings_are_whole_tensors_of_bounded_length(driver):
    """A piece would be taken for the whole, and of two with one name one would be lost, without a word."""
    pooled = spec("pooled_prompt_embeds", [24], 1)
    rows = {"name": "prompt_embeds", "dtype": "F32"}
    first = TensorSpec(shape=[3, 40], nbytes=160, **rows)
    rest = TensorSpec(shape=[3, 40], nbytes=320, offset=160, start_row=1, **rows)
    last = TensorSpec(shape=[3, 40], nbytes=160, start_row=2, **rows)
    long = MAX_EMBED_TOKENS + 1
    for specs, size in (
        ([first, pooled], 480),
        ([last, pooled], 480),
        ([first, rest, pooled], 480),
        ([spec("prompt_embeds", [3, 40]), spec("prompt_embeds", [1, 40]), pooled], 480),
        ([TensorSpec(shape=[0, 2**63 - 1, 2**63 - 1], **rows), pooled], 480),
        ([spec("prompt_embeds", [long, 40]), pooled], 160 * long),
    ):
        reply = refusal(driver, request(prompt=None, tensors=specs), [bytes(size), bytes(96)])
        assert (reply.code, reply.detail["field"]) == ("invalid_request", "tensors")


def test_an_id_belongs_to_its_tensors_too(driver):
    specs = [spec("prompt_embeds", [3, 40]), spec("pooled_prompt_embeds", [24], 1)]
    message, frames = request(prompt=None, tensors=specs), [bytes(480), bytes(96)]
    first = run(driver, message, frames)[0]
    other = [np.ones(120, np.float32).tobytes(), bytes(96)]
    assert refusal(driver, message, other).code == "id_conflict"
    driver.images.clear()
    driver.send(message, buffers=frames)
    driver.tick()
    assert tensors_of(image(driver, message.id))["image"].tobytes() == tensors_of(first)["image"].tobytes()


def test_frames_without_a_description_are_refused(driver):
    assert refusal(driver, request(), [b"junk"]).detail["field"] == "tensors"


def test_an_image_engine_takes_no_tokens(driver):
    reply = refusal(driver, GenerateReqInput(input_ids=[1, 2]))
    assert reply.code == "unsupported"


def test_a_language_engine_makes_no_images(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        assert refusal(driver, request()).code == "unsupported"
        reply = driver.update(tiny_model, component="vae")
        assert (reply.code, reply.detail["field"]) == ("invalid_request", "component")


pytest.importorskip("diffusers")


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
