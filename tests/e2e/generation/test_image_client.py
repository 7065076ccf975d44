"""Images through the launched engine and both clients."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.lanes import quick

from caesura.client import (
    ImageOutput,
    InvalidRequest,
    Unsupported,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import WeightUpdateGroup, manifest

pytest.importorskip("diffusers")
from support.pipelines import make_sd3

OPTIONS = {
    "width": 16,
    "height": 16,
    "num_inference_steps": 4,
    "seed": 3,
    "max_sequence_length": 8,
    "return_steps": None,
    "sde": {"type": "sde"},
}


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return make_sd3(tmp_path_factory.mktemp("pipelines") / "sd3")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_sd3(tmp_path_factory.mktemp("pipelines") / "other", seed=20)


@pytest.fixture(scope="module")
def engine(sd3):
    with launch_scheduler(str(sd3), device="cpu", num_threads=1) as client:
        yield client


@pytest.fixture
def at_first(engine, sd3):
    yield engine
    engine.update_weights_from_disk(sd3, weight_version="default")


def state(path, component="transformer"):
    name = "model" if component.startswith("text") else "diffusion_pytorch_model"
    return load_file(path / component / f"{name}.safetensors")


def latents(output: ImageOutput) -> np.ndarray:
    return np.asarray(output.latents)


def test_one_prompt_several_samples_several_prompts(engine):
    one = engine.generate_images("a red", **OPTIONS)
    assert isinstance(one, ImageOutput)
    assert (np.asarray(one.image).shape, np.asarray(one.image).dtype) == ((16, 16, 3), np.uint8)
    assert latents(one).shape == (5, 4, 4, 4)
    assert (len(one.log_probs), len(one.noise_stds), len(one.timesteps), len(one.sigmas)) == (4, 4, 4, 5)
    assert one.embeds.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    two = engine.generate_images("a red", n=2, **OPTIONS)
    assert [each.index for each in two] == [0, 1]
    assert np.array_equal(np.asarray(two[0].embeds["prompt_embeds"]), np.asarray(one.embeds["prompt_embeds"]))
    many = engine.generate_images(["a red", "a blue"], n=2, rid="many", **OPTIONS)
    assert [(each.rid, each.index) for each in many] == [
        ("many-0", 0),
        ("many-0", 1),
        ("many-1", 0),
        ("many-1", 1),
    ]


def test_embeddings_of_a_result_are_a_prompt(engine):
    first = engine.generate_images("a red", guidance_scale=2.0, **OPTIONS)
    again = engine.generate_images(embeds=first.embeds, guidance_scale=2.0, **OPTIONS)
    assert np.array_equal(latents(first), latents(again))
    as_tensors = {name: torch.from_numpy(np.array(each)) for name, each in first.embeds.items()}
    third = engine.generate_images(embeds=as_tensors, guidance_scale=2.0, **OPTIONS)
    assert np.array_equal(latents(first), latents(third))


def test_an_abort_ends_with_the_steps_that_were_made(engine):
    many = {**OPTIONS, "num_inference_steps": 900, "return_steps": [0, 1]}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate_images, "a red", rid="long", **many)
        while engine.status().generated_tokens == 0 or not engine.abort("long").aborted:
            assert not waiting.done()
        output = waiting.result()
    assert output.finish_reason.type == "abort"
    assert 0 <= output.steps_done < output.steps == 900
    assert len(output.step_indices) == min(2, output.steps_done)


def test_engine_refusals_are_raised(engine):
    with pytest.raises(InvalidRequest, match="width"):
        engine.generate_images("a red", **{**OPTIONS, "width": 17})
    with pytest.raises(TypeError, match="did you mean guidance_scale"):
        engine.generate_images("a red", guidance_scal=1.0)
    with pytest.raises(InvalidRequest, match="sde"):
        engine.generate_images("a red", sde={"type": "euler"})
    with pytest.raises(InvalidRequest):
        engine.generate_images(embeds={"prompt_embeds": "text"})
    with pytest.raises(Unsupported):
        engine.generate([1, 2, 3])


@pytest.mark.parametrize("transport", quick(["disk", "tensor", "ipc"], 2))
def test_an_update_by_any_transport_is_a_cold_load(at_first, other, transport):
    engine = at_first
    engine.pause(mode="in_place")
    if transport == "disk":
        reply = engine.update_weights_from_disk(other, weight_version="v1", flush_cache=False)
    else:
        update = getattr(engine, f"update_weights_from_{transport}")
        with engine.weight_update(weight_version="v1", manifest=manifest(state(other))) as session:
            update(state(other), flush_cache=False, bucket_bytes=4096)
        reply = session.result
    engine.continue_generation()
    assert (reply.committed, reply.weight_version) == (True, "v1")
    found = engine.generate_images(embeds=embeds(engine), **OPTIONS)
    assert {span.version for span in found.weight_versions} == {"v1"}
    with launch_scheduler(str(other), device="cpu", num_threads=1) as cold:
        expected = cold.generate_images(embeds=embeds(engine), **OPTIONS)
        names = {n: s for n, s in cold.check_weights().checksums.items() if n.startswith("transformer.")}
    assert np.array_equal(latents(found), latents(expected))
    assert names.items() <= engine.check_weights().checksums.items()


@pytest.fixture(scope="module")
def moving(sd3):
    with launch_scheduler(
        str(sd3), device="cpu", num_threads=1, frozen_residency="offload", transformer_residency="layerwise"
    ) as client:
        yield client


@pytest.fixture(scope="module")
def cold_checksums(other):
    with launch_scheduler(str(other), device="cpu", num_threads=1) as cold:
        return cold.check_weights().checksums


@pytest.mark.parametrize("transport", quick(["disk", "tensor", "ipc", "distributed"]))
def test_any_transport_writes_offloaded_components(moving, sd3, other, cold_checksums, transport):
    engine = moving
    for component in ("transformer", "text_encoder_2", "vae"):
        engine.update_weights_from_disk(sd3, component=component)
    before = np.asarray(engine.generate_images("a red", **OPTIONS).image)
    for component in ("transformer", "text_encoder_2", "vae"):
        assert not any(each.device_bytes for each in engine.status().components)
        if transport == "disk":
            reply = engine.update_weights_from_disk(other, component=component)
        elif transport == "distributed":
            with WeightUpdateGroup.create([engine]) as group:
                reply = engine.update_weights_from_distributed(
                    state(other, component), group=group, component=component
                )
        else:
            update = getattr(engine, f"update_weights_from_{transport}")
            reply = update(state(other, component), component=component, bucket_bytes=16384)
        assert engine.status().weights == "valid", reply
        assert not any(each.device_bytes for each in engine.status().components), (
            "nothing comes for an update"
        )
        ours = {n: s for n, s in engine.check_weights().checksums.items() if n.startswith(f"{component}.")}
        assert ours.items() <= cold_checksums.items()
        assert ours
    assert not np.array_equal(np.asarray(engine.generate_images("a red", **OPTIONS).image), before)


def embeds(engine):
    shapes = {"prompt_embeds": (5, 40), "pooled_prompt_embeds": (24,)}
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_broadcast_update(at_first, other):
    engine = at_first
    with WeightUpdateGroup.create([engine]) as group:
        engine.update_weights_from_distributed(state(other), group=group, weight_version="v2")
    assert engine.status().weight_version == "v2"
    ours = {n: s for n, s in engine.check_weights().checksums.items() if n.startswith("transformer.")}
    engine.update_weights_from_disk(other)
    assert {n: s for n, s in engine.check_weights().checksums.items() if n.startswith("transformer.")} == ours


def test_a_partial_transformer_is_refused_by_name_and_poisons_nothing(engine, other):
    tensors = state(other, "vae")
    with pytest.raises(WeightMismatch) as refused:
        engine.update_weights_from_tensor(tensors)
    assert refused.value.detail["unexpected"]
    with pytest.raises(InvalidRequest, match="component"):
        engine.update_weights_from_tensor(tensors, component="unet")
    assert engine.status().weights == "valid"
