"""Images: a real engine, tick by tick, on a tiny pipeline."""

from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.faults import BUG, Fault
from support.lanes import every, quick
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.io_struct import (
    FlushCacheReqInput,
    GenerateReqInput,
    SdeParams,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
)
from caesura.io_struct.codec import encode
from caesura.scheduler.observability.throughput import Counters, line

pytest.importorskip("diffusers")
from support.image_requests import STEPS, TEXT, image, refusal, request, run, send_tensors, spec, specs_of
from support.pipelines import load_pipeline, tensors_of

from caesura.scheduler.images import image_batcher
from caesura.scheduler.images.admission import MAX_EMBED_TOKENS
from caesura.scheduler.images.image_batcher import RAISE_AFTER

NOISY = ["sde", "cps", "dance"]


@pytest.fixture(scope="session")
def pipeline(sd3):
    return load_pipeline(sd3)


@pytest.fixture(scope="module")
def shared(sd3):
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


@pytest.fixture
def driver(shared):
    """Return the engine of all tests that leave it as it was; ``painter`` is one of the test's own."""
    shared.abort(abort_all=True)
    shared.go_on(torch_empty_cache=False)
    shared.flush(torch_empty_cache=False)
    return shared


def test_the_grid_is_that_of_the_pipelines_scheduler(driver, pipeline):
    tensors = tensors_of(run(driver, request())[0])
    pipeline.scheduler.set_timesteps(STEPS)
    assert np.array_equal(tensors["sigmas"], pipeline.scheduler.sigmas.numpy())
    assert np.array_equal(tensors["timesteps"], pipeline.scheduler.timesteps.numpy())
    given = [1.0, 0.7, 0.2]
    tensors = tensors_of(run(driver, request(sigmas=given))[0])
    assert np.array_equal(tensors["sigmas"], np.asarray([*given, 0.0], np.float32))


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
@torch.no_grad()
def test_a_learner_finds_the_same_log_probs(painter, pipeline, traced_at_once, guidance, window):
    # The pipeline's own grid ends at 0.001, where the std is so small that float32 says little.
    fields = {"guidance_scale": guidance, "negative_prompt": "", "sigmas": [1.0, 0.8, 0.6, 0.4, 0.2]}
    for kind in NOISY:
        sde = SdeParams(type=kind, steps=window)
        for result in run(painter, request(n=3, sde=sde, **fields)):
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
    specs, buffers = specs_of({name: tensors[name] for name in tensors if name.endswith("embeds")})
    by_embeds = request(prompt=None, tensors=specs, **options)
    for result in (*run(driver, by_ids), *run(driver, by_embeds, buffers)):
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
def test_prompts_in_two_forms_must_have_one_length(driver, given):
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


def test_a_client_that_leaves_is_not_drawn_for(painter):
    rid = painter.send(request(n=4), client="leaving")
    painter.tick(3)
    painter.clients.pop("leaving").close(0)
    eventually(lambda: painter.engine.housekeeping._keep_alive() or painter.tick() or not painter.engine.live)
    assert painter.engine.outputs.finished["abort"] == 4
    assert painter.status().running_requests == 0
    assert rid not in {key[0] for key in painter.images}


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


# -- updates -------------------------------------------------------------------------------------------------


def test_an_update_is_a_cold_load(painter, other_sd3, traced_at_once):
    before = painter.check_weights()
    rid = painter.send(request(sde=SdeParams(type="sde")))
    painter.tick(3)
    painter.pause("in_place")
    done = painter.engine.live.samples(rid)[0].step
    reply = painter.update(other_sd3, flush_cache=False, weight_version="v2")
    assert (reply.committed, reply.weights_epoch) == (True, 1)
    painter.go_on()
    painter.run_until_idle()
    spans = image(painter, rid).weight_versions
    assert [(each.start, each.end, each.epoch) for each in spans] == [(0, done, 0), (done, STEPS, 1)]
    after = painter.check_weights()
    changed = {
        name.partition(".")[0] for name in after.checksums if after.checksums[name] != before.checksums[name]
    }
    assert changed == {"transformer"}
    for component in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        assert painter.update(other_sd3 / component, component=component).committed
    updated = tensors_of(run(painter, request(sde=SdeParams(type="sde")))[0])
    checksums = painter.check_weights()
    with EngineDriver(str(other_sd3), scripted=False, max_running_requests=8) as cold:
        assert cold.check_weights().checksums == checksums.checksums
        expected = tensors_of(run(cold, request(sde=SdeParams(type="sde")))[0])
    assert all(np.array_equal(updated[name], expected[name]) for name in expected)


def test_a_running_engine_begins_its_samples_again(painter, other_sd3):
    rid = painter.send(request(n=2))
    painter.tick(4)
    assert painter.update(other_sd3).flushed
    painter.run_until_idle()
    for index in range(2):
        result = image(painter, rid, index)
        assert [(each.start, each.end, each.epoch) for each in result.weight_versions] == [(0, STEPS, 1)]
        assert result.num_retractions == 1


def test_a_changed_text_encoder_encodes_what_has_not_begun(painter, other_sd3):
    begun = painter.send(request(n=10))  # 8 run at once
    painter.tick(3)
    painter.pause("in_place")
    waiting = painter.send(request())
    path = other_sd3 / "text_encoder"
    assert painter.update(path, component="text_encoder", flush_cache=False).committed
    painter.go_on()
    painter.run_until_idle()
    embeds = [tensors_of(image(painter, begun, index))["prompt_embeds"] for index in range(10)]
    assert all(np.array_equal(each, embeds[0]) for each in embeds)
    assert not np.array_equal(tensors_of(image(painter, waiting))["prompt_embeds"], embeds[0])


def test_poisoned_components_make_nothing_until_complete(painter, sd3, other_sd3):
    rid = painter.send(request())
    painter.tick(2)
    painter.check_weights("reset_tensors")
    assert painter.status().weights == "poisoned"
    components = painter.engine.model.components
    for component in components:
        step = painter.status().step
        painter.tick(3)
        assert painter.status().step == step
        painter.update(sd3 / component, component=component)
    assert painter.status().weights == "valid"
    painter.run_until_idle()
    assert image(painter, rid).finish_reason.type == "length"


def halves(path):
    tensors = load_file(path / "transformer" / "diffusion_pytorch_model.safetensors")
    names = sorted(tensors)
    middle = len(names) // 2
    return [{name: tensors[name] for name in some} for some in (names[:middle], names[middle:])]


def test_a_failed_session_poisons_its_component_alone(painter, sd3, other_sd3):
    before = painter.check_weights().checksums
    first, _ = halves(other_sd3)
    session = painter.begin()
    assert not send_tensors(painter, first, session_id=session, flush_cache=False).committed
    painter.end(session_id=session, commit=False)
    assert painter.status().weights == "poisoned"
    assert not painter.update(sd3 / "vae", component="vae").committed
    assert painter.status().weights == "poisoned", "the transformer is what is broken"
    assert painter.update(sd3).committed
    assert painter.check_weights().checksums == before
    assert painter.status().weights == "valid"


def test_a_paused_update_commits_with_its_last_tensor(painter, other_sd3):
    painter.pause()
    first, second = halves(other_sd3)
    assert not send_tensors(painter, first, flush_cache=False).committed
    reply = send_tensors(painter, second, flush_cache=False)
    assert (reply.committed, reply.weights_epoch) == (True, 1)


def test_a_session_may_write_several_components(painter, other_sd3):
    session = painter.begin()
    for component in ("transformer", "vae"):
        assert not painter.update(other_sd3 / component, component=component, session_id=session).committed
    assert painter.end(session_id=session).weights_epoch == 1
    with EngineDriver(str(other_sd3), scripted=False) as cold:
        expected = cold.check_weights().checksums
    found = painter.check_weights().checksums
    assert all(found[name] == expected[name] for name in found if name.startswith(("transformer.", "vae.")))


def test_a_restart_goes_on_with_the_last_transformer(sd3, other_sd3, tmp_path):
    state = str(tmp_path / "state.json")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.update(other_sd3, weight_version="v5")
        before = driver.check_weights().checksums
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.assert_status(weights="valid", weight_version="v5", weights_epoch=2)
        assert driver.check_weights().checksums == before
        driver.update(other_sd3 / "vae", component="vae")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        assert driver.status().weights == "invalid", "the VAE's update is in no record"
        assert driver.update(sd3).weights == "valid"


def test_a_restart_does_not_restore_other_components(sd3, other_sd3, tmp_path):
    state = str(tmp_path / "state.json")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.update(other_sd3 / "vae", component="vae")
        reply = driver.update(other_sd3, weight_version="v5")
        assert (reply.committed, reply.durable) == (True, True)
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        assert driver.status().weights == "invalid"
        driver.update(other_sd3, weight_version="v6")
    with EngineDriver(str(sd3), scripted=False, state_file=state) as driver:
        driver.assert_status(weights="valid", weight_version="v6")


# -- refusals ------------------------------------------------------------------------------------------------


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
    ({"prompt": None, "prompt_ids": [[1] * 4000]}, "prompt_ids"),
    ({"sigmas": [0.5] * 1000}, "sigmas"),
]


def test_unsupported_values_are_refused_by_field(driver):
    for fields, field in REFUSED:
        reply = refusal(driver, request(**fields))
        assert (reply.code, reply.detail["field"]) == ("invalid_request", field)
        assert len(encode(reply)) < 1000, "a long value is not repeated"
    assert len(driver.engine.live) == 0


def test_embeddings_that_do_not_fit_are_refused(driver):
    """A piece would be taken for the whole, and of two with one name one would be lost, without a word."""
    zeros = [bytes(4 * 40 * 3), bytes(4 * 24)]
    pooled = spec("pooled_prompt_embeds", [24], 1)
    nan = np.full((3, 40), np.nan, np.float32).tobytes()
    rows = {"name": "prompt_embeds", "dtype": "F32"}
    first = TensorSpec(shape=[3, 40], nbytes=160, **rows)
    rest = TensorSpec(shape=[3, 40], nbytes=320, offset=160, start_row=1, **rows)
    last = TensorSpec(shape=[3, 40], nbytes=160, start_row=2, **rows)
    long = MAX_EMBED_TOKENS + 1
    for specs, buffers in (
        ([spec("prompt_embeds", [3, 40])], zeros),
        ([spec("prompt_embeds", [3, 41]), pooled], [bytes(4 * 41 * 3), bytes(96)]),
        ([spec("embeds", [3, 40]), pooled], zeros),
        ([spec("prompt_embeds", [3, 40]), pooled], zeros[:1]),
        ([spec("prompt_embeds", [3, 40]), pooled], [*zeros, b"more"]),
        ([spec("prompt_embeds", [3, 40]), pooled], [nan, bytes(96)]),
        ([spec("prompt_embeds", [3, 40], dtype="I32"), pooled], zeros),
        ([spec("prompt_embeds", [3, 40], dtype="F64"), pooled], [np.full(120, 1e300).tobytes(), bytes(96)]),
        ([first, pooled], zeros),
        ([last, pooled], zeros),
        ([first, rest, pooled], zeros),
        ([spec("prompt_embeds", [3, 40]), spec("prompt_embeds", [1, 40]), pooled], zeros),
        ([TensorSpec(shape=[0, 2**63 - 1, 2**63 - 1], **rows), pooled], zeros),
        ([spec("prompt_embeds", [long, 40]), pooled], [bytes(160 * long), bytes(96)]),
    ):
        reply = refusal(driver, request(prompt=None, tensors=specs), buffers)
        assert (reply.code, reply.detail["field"]) == ("invalid_request", "tensors")
    specs = [spec("prompt_embeds", [3, 40]), pooled]
    assert run(driver, request(prompt=None, tensors=specs), zeros)[0].finish_reason.type == "length"


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


def test_undescribed_frames_and_tokens_are_refused(driver):
    assert refusal(driver, request(), [b"junk"]).detail["field"] == "tensors"
    assert refusal(driver, GenerateReqInput(input_ids=[1, 2])).code == "unsupported"


def test_a_language_engine_makes_no_images(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        assert refusal(driver, request()).code == "unsupported"
        reply = driver.update(tiny_model, component="vae")
        assert (reply.code, reply.detail["field"]) == ("invalid_request", "component")


def test_latents_that_are_not_finite_fail_their_sample(painter):
    family = painter.engine.runner.family
    real = family.velocity

    def broken(*arguments):
        family.velocity = real
        velocity = real(*arguments)
        velocity[0] = torch.nan
        return velocity

    rid, second = painter.send(request()), painter.send(request(seed=3))
    painter.tick(3)
    family.velocity = broken
    painter.run_until_idle()
    reason = image(painter, rid).finish_reason
    assert (reason.type, "not finite" in reason.message) == ("error", True)
    assert image(painter, second).finish_reason.type == "length"


@pytest.mark.parametrize("failures", [1, 3])
def test_a_step_without_memory_is_made_again_in_halves(painter, failures):
    def several(batch):
        return batch.kind == "denoise" and len(batch.samples) > 1

    expected = [tensors_of(each) for each in run(painter, request(n=4, sde=SdeParams(type="sde")))]
    with Fault(painter.engine.runner, "execute", MemoryError("not enough"), range(failures), only=several):
        results = run(painter, request(n=4, sde=SdeParams(type="sde")))
    for result, tensors in zip(results, expected, strict=True):
        np.testing.assert_allclose(tensors_of(result)["latents"], tensors["latents"], rtol=0, atol=1e-5)
    status = painter.status().step_failures
    assert (status.failed, status.token_limit) == (min(failures, 2), 2 if failures == 1 else 1)
    if failures == 3:
        for _ in range(RAISE_AFTER // STEPS * 4):
            run(painter, request(n=4))
        assert painter.status().step_failures.token_limit is None


def test_a_step_that_fails_ends_its_samples_and_no_others(driver):
    first = driver.send(request())
    driver.tick(3)
    with Fault(driver.engine.runner, "_velocity", BUG):
        driver.tick()
    second = driver.send(request())
    driver.run_until_idle()
    assert image(driver, first).finish_reason.type == "error"
    assert image(driver, first).steps_done > 0
    assert image(driver, second).finish_reason.type == "length"


@pytest.mark.parametrize(
    ("error", "ticks", "code"), [(BUG, 1, "internal"), (MemoryError("not enough"), 2, "out_of_memory")]
)
def test_a_prompt_that_cannot_be_encoded_ends_its_samples(driver, error, ticks, code):
    with Fault(driver.engine.runner, "_encode", error, range(1000)):
        rid = driver.send(request(n=12, prompt="a blue"))  # more than may run
        driver.tick(ticks)
        ended = [image(driver, rid, index).finish_reason for index in range(12)]
    assert {(reason.type, reason.code) for reason in ended} == {("error", code)}
    assert run(driver, request())[0].finish_reason.type == "length"


def test_small_steps_take_one_thread_of_an_engines_several(painter):
    family, seen = painter.engine.runner.family, {}

    def watch(kind, call):
        setattr(family, kind, lambda *a: (seen.update({kind: torch.get_num_threads()}), call(*a))[1])

    for kind in ("velocity", "decode", "encode"):
        watch(kind, getattr(family, kind))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(painter, request())
        assert (seen, torch.get_num_threads()) == ({"encode": 3, "velocity": 1, "decode": 1}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("most", "steps"), [(1 << 20, 1), (2 * (8 + 8 + TEXT), 2), (1, 3)])
def test_long_prompts_are_encoded_few_at_a_time(painter, monkeypatch, most, steps):
    monkeypatch.setattr(image_batcher, "ENCODED_TOKENS", most)
    rids = [painter.send(request(prompt=prompt)) for prompt in ("a red", "a blue", "a green")]
    painter.run_until_idle()
    stages = {stage.name: stage.count for stage in painter.status().stages}
    assert stages["encode"] == steps
    assert {image(painter, rid).finish_reason.type for rid in rids} == {"length"}
