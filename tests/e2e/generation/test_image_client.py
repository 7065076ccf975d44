"""Images through the launched engine and both clients."""

import numpy as np
import pytest
from safetensors.torch import load_file
from support.client_updates import update_by
from support.lanes import quick

from caesura.client import ImageOutput, InvalidRequest, Unsupported, WeightMismatch, launch_scheduler

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
    assert [(each.rid, each.index) for each in many] == [(f"many-{i}", j) for i in (0, 1) for j in (0, 1)]


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
        tensors = state(other, component)
        reply = update_by(engine, transport, tensors, other, component=component, bucket_bytes=16384)
        assert engine.status().weights == "valid", reply
        on_device = [each.name for each in engine.status().components if each.device_bytes]
        assert not on_device, "nothing comes for an update"
        ours = {n: s for n, s in engine.check_weights().checksums.items() if n.startswith(f"{component}.")}
        assert ours.items() <= cold_checksums.items()
        assert ours
    assert not np.array_equal(np.asarray(engine.generate_images("a red", **OPTIONS).image), before)


def test_a_partial_transformer_is_refused_by_name(engine, other):
    tensors = state(other, "vae")
    with pytest.raises(WeightMismatch) as refused:
        engine.update_weights_from_tensor(tensors)
    assert refused.value.detail["unexpected"]
    with pytest.raises(InvalidRequest, match="component"):
        engine.update_weights_from_tensor(tensors, component="unet")
    assert engine.status().weights == "valid"
