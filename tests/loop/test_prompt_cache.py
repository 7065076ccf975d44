"""Encoded prompts that are kept: what is found again, when it must not be, and what it costs."""

import numpy as np
import pytest
from safetensors.torch import load_file
from support.deltas import SentDelta, by_tensor
from support.scripted import EngineDriver, ok

from caesura.io_struct import DeltaBase, RollbackWeightsReqInput

pytest.importorskip("diffusers")
from support import image_requests
from support.pipelines import tensors_of

from caesura.scheduler.images.prompt_cache import ENTRY_BYTES

LENGTH = 6
ONE = ENTRY_BYTES + 4 * ((8 + LENGTH) * 40 + 24)
"""Bytes of the embeddings of one prompt: CLIP's 8 tokens and T5's, and what was pooled."""


@pytest.fixture
def driver(painter):
    return painter


def request(prompt="a red", **fields):
    options = {"num_inference_steps": 2, "max_sequence_length": LENGTH, "seed": 3, **fields}
    return image_requests.request(prompt=prompt, **options)


def run(driver, *asked):
    driver.run(*asked)
    return [tensors_of(driver.images[message.id, 0][0]) for message in asked]


def counts(driver):
    status = driver.status().prompt_cache
    return status.hits, status.misses, status.entries


def encodings(driver):
    return {stage.name: stage.count for stage in driver.status().stages}.get("encode", 0)


def test_a_prompt_is_encoded_once(driver):
    first = run(driver, request(n=2))[0]
    assert counts(driver) == (0, 1, 1)
    again = run(driver, request(), request())
    assert (counts(driver), encodings(driver)) == ((2, 1, 1), 1)
    for each in again:
        assert all(np.array_equal(each[name], first[name]) for name in first)
    assert driver.status().prompt_cache.nbytes == ONE


def test_equal_prompts_that_come_together_are_encoded_once(driver):
    one, two, three = run(driver, request(), request("a blue"), request())
    assert counts(driver) == (1, 2, 2)
    assert np.array_equal(one["prompt_embeds"], three["prompt_embeds"])
    assert not np.array_equal(one["prompt_embeds"], two["prompt_embeds"])


def test_guidance_finds_its_negative_prompt(driver):
    run(driver, request(guidance_scale=2.0))
    assert counts(driver) == (0, 2, 2)
    part = run(driver, request("a blue", guidance_scale=2.0))[0]
    assert counts(driver) == (1, 3, 3)
    driver.flush()
    whole = run(driver, request("a blue", guidance_scale=2.0))[0]
    np.testing.assert_allclose(part["latents"], whole["latents"], rtol=0, atol=1e-5)


def test_differing_tokens_are_not_found(driver):
    run(driver, request())
    for message in (request("a blue"), request(max_sequence_length=LENGTH + 1), request(prompt="a red a")):
        run(driver, message)
    hits, misses, _ = counts(driver)
    assert (hits, misses) == (0, 4)
    ids = driver.engine.runner.family.tokenize("a red", LENGTH)
    run(driver, request(None, prompt_ids=ids))
    assert counts(driver)[0] == 1, "text and its ids are the same prompt"


def test_only_an_update_of_an_encoder_ends_entries(driver, other_sd3):
    before = run(driver, request())[0]
    assert driver.update(other_sd3).flushed
    kept = run(driver, request())[0]
    assert counts(driver) == (1, 1, 1)
    assert np.array_equal(before["prompt_embeds"], kept["prompt_embeds"])
    assert driver.update(other_sd3, component="text_encoder_3").committed
    assert counts(driver)[2] == 0
    after = run(driver, request())[0]
    assert counts(driver) == (1, 2, 1)
    assert not np.array_equal(before["prompt_embeds"], after["prompt_embeds"])
    for component in ("text_encoder", "text_encoder_2", "vae"):
        driver.update(other_sd3, component=component)
    found = run(driver, request())[0]
    with EngineDriver(str(other_sd3), scripted=False) as cold:
        expected = run(cold, request())[0]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_delta_of_an_encoder_ends_entries(driver, sd3, other_sd3, tmp_path):
    old, new = (load_file(each / "text_encoder" / "model.safetensors") for each in (sd3, other_sd3))
    found = [run(driver, request())[0]]
    ok(by_tensor(driver, SentDelta(old, new), DeltaBase(), tmp_path, component="text_encoder"))
    found.append(run(driver, request())[0])
    ok(driver.call(RollbackWeightsReqInput()))
    found.append(run(driver, request())[0])
    before, after, again = (each["prompt_embeds"] for each in found)
    assert not np.array_equal(before, after)
    assert np.array_equal(before, again)
    assert counts(driver) == (0, 3, 1)


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_flush_and_release_empty_it(driver, sd3, tag):
    run(driver, request())
    driver.flush()
    assert (counts(driver)[2], driver.status().prompt_cache.nbytes) == (0, 0)
    run(driver, request())
    driver.pause()
    assert counts(driver)[2] == 1, "a pause keeps it"
    driver.release(tag)
    assert (counts(driver)[2], driver.status().prompt_cache.nbytes) == (0, 0)
    driver.resume()
    if tag == "weights":
        for component in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
            driver.update(sd3, component=component)
    driver.go_on()
    run(driver, request())
    assert counts(driver) == (0, 3, 1)


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (ONE - 1, 0), (ONE, 1), (2 * ONE, 2)])
def test_bytes_are_bounded_and_the_oldest_goes_first(sd3, limit, kept):
    with EngineDriver(str(sd3), scripted=False, prompt_cache_bytes=limit) as driver:
        for prompt in ("a red", "a blue", "a green"):
            run(driver, request(prompt))
            assert driver.status().prompt_cache.nbytes <= limit
        assert counts(driver) == (0, 3, kept)
        run(driver, request("a red"))
        assert counts(driver)[0] == 0
        run(driver, request("a red"), request("a red"))
        assert counts(driver)[:2] == ((2, 4) if kept else (0, 6))
