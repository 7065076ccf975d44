"""Images: a real engine, tick by tick, on a tiny pipeline."""

from itertools import product

import numpy as np
import pytest
import torch
from support.lanes import every, quick
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.io_struct import FlushCacheReqInput, SdeParams, TensorSpec, UpdateWeightFromDiskReqInput

pytest.importorskip("diffusers")
from support.image_requests import STEPS, TEXT, image, request, run, spec
from support.pipelines import load_pipeline, make_sd3, tensors_of

from caesura.scheduler.images import traced_module
from caesura.scheduler.observability.throughput import Counters, line

NOISY = ["sde", "cps", "dance"]


@pytest.fixture(scope="session")
def pipeline(sd3):
    return load_pipeline(sd3)


@pytest.fixture
def driver(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


def by_diffusers(pipeline, results, **options):
    latents = torch.from_numpy(np.stack([tensors_of(each)["latents"][0] for each in results]))
    options = {"height": 16, "width": 16, "num_inference_steps": STEPS, "guidance_scale": 1.0, **options}
    return pipeline(latents=latents, max_sequence_length=TEXT, **options).images


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_ode_equals_diffusers(driver, pipeline, guidance):
    results = run(driver, request(n=3, guidance_scale=guidance, negative_prompt="blue"))
    options = {"prompt": ["a red"] * 3, "negative_prompt": ["blue"] * 3, "guidance_scale": guidance}
    latents = by_diffusers(pipeline, results, **options, output_type="latent")
    images = by_diffusers(pipeline, results, **options, output_type="np")
    for result, latent, expected in zip(results, latents, images, strict=True):
        tensors = tensors_of(result)
        np.testing.assert_allclose(tensors["latents"][-1], latent.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(tensors["image"] / 255, expected, rtol=0, atol=0.5 / 255 + 1e-4)
        assert tensors["image"].std() > 10, "a flat image shows nothing"


def test_the_grid_is_that_of_the_pipelines_scheduler(driver, pipeline):
    tensors = tensors_of(run(driver, request())[0])
    pipeline.scheduler.set_timesteps(STEPS)
    assert np.array_equal(tensors["sigmas"], pipeline.scheduler.sigmas.numpy())
    assert np.array_equal(tensors["timesteps"], pipeline.scheduler.timesteps.numpy())
    given = [1.0, 0.7, 0.2]
    tensors = tensors_of(run(driver, request(sigmas=given))[0])
    assert np.array_equal(tensors["sigmas"], np.asarray([*given, 0.0], np.float32))


def test_dynamic_shifting_and_a_folder_without_t5(tmp_path):
    path = make_sd3(tmp_path / "dynamic", t5=False, use_dynamic_shifting=True, base_image_seq_len=4)
    pipeline = load_pipeline(path)
    with EngineDriver(str(path), scripted=False) as driver:
        results = run(driver, request(n=2))
        latents = by_diffusers(pipeline, results, prompt=["a red"] * 2, output_type="latent")
    assert np.array_equal(tensors_of(results[0])["sigmas"], pipeline.scheduler.sigmas.numpy())
    for result, latent in zip(results, latents, strict=True):
        np.testing.assert_allclose(tensors_of(result)["latents"][-1], latent.numpy(), rtol=0, atol=1e-5)


def recomputed(pipeline, result, sde, guidance):
    from unit.scheduler.images.test_scheduler_step import reference

    tensors = {name: torch.from_numpy(value.copy()) for name, value in tensors_of(result).items()}
    places = {place: row for row, place in enumerate(result.latent_indices)}
    found = []
    for step in result.step_indices:
        x, after = tensors["latents"][places[step]], tensors["latents"][places[step + 1]]
        names = ["", "negative_"] if guidance > 1 else [""]
        v = [
            pipeline.transformer(
                hidden_states=x[None],
                timestep=tensors["timesteps"][step][None],
                encoder_hidden_states=tensors[f"{name}prompt_embeds"][None],
                pooled_projections=tensors[f"{name}pooled_prompt_embeds"][None],
                return_dict=False,
            )[0][0]
            for name in names
        ]
        v = v[0] if len(v) == 1 else v[1] + guidance * (v[0] - v[1])
        inside = sde.steps is None or step in sde.steps
        mean, std = reference(
            sde.type if inside else "ode", x.numpy().astype(float), v.numpy().astype(float),
            tensors["sigmas"].numpy().astype(float), step, sde.noise_level,
        )  # fmt: skip
        if std == 0:
            found.append(0.0)
            continue
        density = -((after.numpy() - mean) ** 2) / (2 * std**2) - np.log(std) - 0.5 * np.log(2 * np.pi)
        found.append(density.mean())
    return np.asarray(found)


@pytest.mark.parametrize(
    ("guidance", "window"), quick([(3.0, None), (1.0, [1, 2]), (1.0, None), (3.0, [1, 2])], 2)
)
@pytest.mark.parametrize("kind", NOISY)
@torch.no_grad()
def test_a_learner_finds_the_same_log_probs(driver, pipeline, monkeypatch, kind, guidance, window):
    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    monkeypatch.setattr(traced_module, "WORTH_S", float("inf"))
    sde = SdeParams(type=kind, steps=window)
    # The pipeline's own grid ends at 0.001, where the std is so small that float32 says little.
    message = request(
        n=3, sde=sde, guidance_scale=guidance, negative_prompt="", sigmas=[1.0, 0.8, 0.6, 0.4, 0.2]
    )
    for result in run(driver, message):
        tensors = tensors_of(result)
        assert result.step_indices == [0, 1, 2, 3, 4]
        learner = recomputed(pipeline, result, sde, guidance)
        np.testing.assert_allclose(tensors["log_probs"], learner, rtol=0, atol=1e-5)
        noisy = tensors["noise_stds"] > 0
        inside = [step in (window or range(5)) and not (kind == "cps" and step == 4) for step in range(5)]
        assert noisy.tolist() == inside


def test_samples_differ_and_a_seed_repeats(driver):
    first = run(driver, request(n=2, sde=SdeParams(type="sde")))
    again = run(driver, request(n=2, sde=SdeParams(type="sde")))
    for one, two in zip(first, again, strict=True):
        assert np.array_equal(tensors_of(one)["latents"], tensors_of(two)["latents"])
    a, b = (tensors_of(each)["latents"] for each in first)
    assert abs(a[0] - b[0]).max() > 0.5
    assert run(driver, request(seed=None))[0].seed != run(driver, request(seed=None))[0].seed


def test_rows_at_different_steps_share_a_batch(driver):
    alone = {
        seed: tensors_of(run(driver, request(seed=seed, sde=SdeParams(type="cps")))[0]) for seed in (1, 2, 3)
    }
    rids = []
    before = driver.status().step
    for seed in alone:
        rids.append(driver.send(request(seed=seed, sde=SdeParams(type="cps"))))
        driver.tick(2)
    driver.run_until_idle()
    assert driver.status().step - before < 3 * (STEPS + 2), "the samples shared no step"
    for rid, expected in zip(rids, alone.values(), strict=True):
        tensors = tensors_of(image(driver, rid))
        np.testing.assert_allclose(tensors["latents"], expected["latents"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(tensors["log_probs"], expected["log_probs"], rtol=0, atol=1e-5)


def test_sizes_and_guidance_that_do_not_fit_take_turns(driver):
    messages = [request(), request(width=32), request(guidance_scale=3.0), request(max_sequence_length=7)]
    rids = [driver.send(message) for message in messages]
    driver.run_until_idle()
    shapes = [tensors_of(image(driver, rid))["image"].shape for rid in rids]
    assert shapes == [(16, 16, 3), (16, 32, 3), (16, 16, 3), (16, 16, 3)]


@pytest.mark.parametrize(("after", "mode"), every(product(range(STEPS + 3), ["in_place", "retract"]), 3))
def test_a_pause_at_any_step_changes_nothing(driver, mode, after):
    message = request(n=2, sde=SdeParams(type="sde"), guidance_scale=2.0)
    expected = [tensors_of(each) for each in run(driver, message)]
    again = request(n=2, sde=SdeParams(type="sde"), guidance_scale=2.0)
    rid = driver.send(again)
    driver.tick(after)
    assert driver.pause(mode).mode == mode
    step = driver.status().step
    driver.tick(3)
    assert driver.status().step == step
    driver.go_on()
    driver.run_until_idle()
    for index in range(2):
        result = image(driver, rid, index)
        tensors = tensors_of(result)
        assert tensors.keys() == expected[index].keys()
        assert all(np.array_equal(tensors[name], expected[index][name]) for name in tensors)
        assert [(span.start, span.end) for span in result.weight_versions] == [(0, STEPS)]


def test_an_abort_returns_the_steps_that_were_made(driver):
    whole = tensors_of(run(driver, request(sde=SdeParams(type="sde")))[0])
    rid = driver.send(request(sde=SdeParams(type="sde")))
    driver.tick(3)  # one encodes, two denoise
    assert driver.abort(rid).aborted == 1
    result = image(driver, rid)
    done = result.steps_done
    assert (result.finish_reason.type, result.steps) == ("abort", STEPS)
    assert 0 < done < STEPS
    assert result.step_indices == list(range(done))
    assert result.latent_indices == list(range(done + 1))
    tensors = tensors_of(result)
    assert np.array_equal(tensors["latents"], whole["latents"][: done + 1])
    assert np.array_equal(tensors["log_probs"], whole["log_probs"][:done])
    assert "image" not in tensors
    assert driver.engine.live.samples(rid) == []


@pytest.mark.parametrize("when", [0, 1])
def test_an_abort_before_the_first_step(driver, when):
    driver.pause()
    rid = driver.send(request())
    if when:
        driver.go_on()
    driver.abort(rid)
    result = image(driver, rid)
    assert (result.finish_reason.type, result.steps_done, result.weight_versions) == ("abort", 0, [])


def test_a_pause_that_aborts_ends_every_sample(driver):
    rids = [driver.send(request(n=2)) for _ in range(6)]
    driver.tick(4)
    assert driver.pause("abort").aborted_requests == 12
    assert {image(driver, rid, index).finish_reason.type for rid in rids for index in range(2)} == {"abort"}
    assert len(driver.engine.live) == 0


def test_unrequested_fields_are_not_sent(driver):
    tensors = tensors_of(run(driver, request(return_steps=[], return_embeds=False, output="latents"))[0])
    assert tensors.keys() == {"timesteps", "sigmas", "final_latents"}
    everything = tensors_of(run(driver, request())[0])
    assert np.array_equal(tensors["final_latents"], everything["latents"][-1])
    result = run(driver, request(return_steps=[1, 3, 4], sde=SdeParams(type="sde")))[0]
    whole = tensors_of(run(driver, request(sde=SdeParams(type="sde")))[0])
    assert (result.step_indices, result.latent_indices) == ([1, 3, 4], [1, 2, 3, 4, 5])
    assert np.array_equal(tensors_of(result)["latents"], whole["latents"][1:])
    assert np.array_equal(tensors_of(result)["log_probs"], whole["log_probs"][[1, 3, 4]])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_text_ids_and_embeddings_are_the_same_prompt(driver, guidance):
    options = {"guidance_scale": guidance}
    tensors = tensors_of(run(driver, request(negative_prompt="blue", **options))[0])
    family = driver.engine.runner.family
    ids, against = family.tokenize("a red", TEXT), family.tokenize("blue", TEXT)
    by_ids = request(prompt=None, prompt_ids=ids, negative_prompt_ids=against, **options)
    names = [name for name in tensors if name.endswith("embeds")]
    specs = [
        TensorSpec(
            name=name,
            dtype="F32",
            shape=list(tensors[name].shape),
            nbytes=tensors[name].nbytes,
            buffer=number,
        )
        for number, name in enumerate(names)
    ]
    by_embeds = request(prompt=None, tensors=specs, **options)
    for result in (
        *run(driver, by_ids),
        *run(driver, by_embeds, [tensors[name].tobytes() for name in names]),
    ):
        assert all(np.array_equal(value, tensors[name]) for name, value in tensors_of(result).items())


def test_trajectory_owns_its_tensors(driver):
    """A view of a step's rows would keep the latents of every sample of the step."""
    keeps, others = request(), request(n=7, return_steps=[])
    driver.send(keeps)
    driver.send(others)
    driver.tick(4)
    (sample,) = driver.engine.live.samples(keeps.id)
    assert len(sample.latents) > 1
    assert all(latent.base is None for latent in sample.latents.values())
    driver.run_until_idle()


@pytest.mark.parametrize("given", ["", "negative_"])
def test_prompts_in_two_forms_must_make_embeddings_of_one_length(driver, given):
    """Two tensors of other lengths are no batch: the step would fail, for those that share it, too."""
    text = "negative_prompt" if given == "" else "prompt"
    other = driver.send(request(guidance_scale=2.0))
    for tokens, reason in ((3, "error"), (20, "length")):
        specs = [spec(f"{given}prompt_embeds", [tokens, 40]), spec(f"{given}pooled_prompt_embeds", [24], 1)]
        message = request(**{"prompt": None, text: "blue", "tensors": specs, "guidance_scale": 2.0})
        rid = driver.send(message, buffers=[bytes(4 * 40 * tokens), bytes(96)])
        driver.run_until_idle()
        if reason == "error":
            assert driver.replies.pop(rid).detail["field"] == "negative_prompt"
        else:
            assert image(driver, rid).finish_reason.type == "length"
    assert image(driver, other).finish_reason.type == "length"


def test_noise_too_small_to_be_seen_has_a_log_probability(driver):
    """The square of such noise would be 0 in float32."""
    for noise_level in (1e-22, 1e-30, 1e-300):
        result = run(driver, request(sde=SdeParams(type="sde", noise_level=noise_level)))[0]
        assert np.isfinite(tensors_of(result)["log_probs"]).all()


def test_a_client_that_leaves_is_not_drawn_for(driver):
    rid = driver.send(request(n=4), client="leaving")
    driver.tick(3)
    driver.clients.pop("leaving").close(0)
    eventually(lambda: driver.engine.housekeeping._keep_alive() or driver.tick() or not driver.engine.live)
    assert driver.engine.outputs.finished["abort"] == 4
    assert driver.status().running_requests == 0
    assert rid not in {key[0] for key in driver.images}


def test_a_retry_gets_the_same_results(driver):
    message = request(n=2)
    first = run(driver, message)
    driver.images.clear()
    driver.send(message)
    driver.tick()
    again = [image(driver, message.id, index) for index in range(2)]
    assert [tensors_of(each)["image"].tobytes() for each in again] == [
        tensors_of(each)["image"].tobytes() for each in first
    ]


def test_flushes_in_a_pause_speak_of_latents(driver, sd3, caplog):
    rid = driver.send(request())
    driver.tick(3)
    with caplog.at_level("INFO"):
        driver.pause("in_place")
    assert "1 requests hold latents" in caplog.text
    for refused in (FlushCacheReqInput(), UpdateWeightFromDiskReqInput(model_path=str(sd3))):
        error = driver.call(refused)
        assert error.code == "not_idle"
        assert "latents" in error.message
        assert "KV" not in error.message
    driver.go_on()
    driver.run_until_idle()
    assert image(driver, rid).finish_reason.type == "length"
    driver.flush()


def test_status_has_the_samples_of_each_stage(driver):
    driver.send(request(n=2))
    seen = []
    for _ in range(STEPS + 4):
        driver.tick()
        load = driver.engine.batcher.images  # asking for status would run a step
        seen.append((load.encoding, load.denoising, load.decoding))
    assert {(0, 2, 0), (0, 0, 2)} <= set(seen)
    load = driver.status().images
    assert (load.encoding, load.denoising, load.decoding) == (0, 0, 0)


def test_the_log_line_about_load_has_steps_and_no_tokens():
    counters = dict.fromkeys(Counters._fields, 0) | {"paused_s": 0.0, "images": True, "state": "running"}
    before = Counters(**counters)
    text = line(before, before._replace(at=10.0, generated_tokens=50, running=3, waiting=2))
    assert text == "running; 3 running, 2 waiting, denoised 5.0 steps/s; over 10.0 s"
