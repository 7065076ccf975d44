"""Every family of image pipelines, on a tiny pipeline of its own."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.scripted import EngineDriver

from caesura.io_struct import CaesuraError, SdeParams

pytest.importorskip("diffusers")
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from support.image_requests import refusal, request
from support.image_requests import run as run_request
from support.pipelines import load_pipeline, make_flux, make_qwen_image, make_sd3, tensors_of

STEPS, TEXT = 4, 6


def run(driver, **fields):
    options = {"width": 24, "num_inference_steps": STEPS, "seed": 5, "max_sequence_length": TEXT, **fields}
    return run_request(driver, request(**options))


def guided(guidance, **options):
    return {"guidance_scale": guidance, "max_sequence_length": TEXT, **options}


SD3 = {"negative_prompt": "blue"}, lambda guidance: guided(guidance, negative_prompt=["blue"] * 2), 1e-5
FLUX = {}, guided, 1e-4
QWEN = (
    {"negative_prompt": "no", "max_sequence_length": 400},
    lambda scale: {"negative_prompt": ["no"] * 2, "true_cfg_scale": scale, "max_sequence_length": 400},
    1e-4,
)
DYNAMIC = partial(make_sd3, t5=False, use_dynamic_shifting=True, base_image_seq_len=4)


@pytest.mark.parametrize(
    ("make", "pipeline", "guidance", "options"),
    [
        pytest.param(make_sd3, StableDiffusion3Pipeline, 1.0, SD3, id="sd3", marks=pytest.mark.long),
        pytest.param(make_sd3, StableDiffusion3Pipeline, 4.5, SD3, id="sd3 guided"),
        pytest.param(DYNAMIC, StableDiffusion3Pipeline, 1.0, SD3, id="sd3 with dynamic shifting, without T5"),
        pytest.param(make_flux, FluxPipeline, 3.5, FLUX, id="flux dev"),
        pytest.param(
            partial(make_flux, guidance=False),
            FluxPipeline,
            3.5,
            FLUX,
            id="flux schnell",
            marks=pytest.mark.long,
        ),
        pytest.param(make_qwen_image, QwenImagePipeline, 1.0, QWEN, id="qwen", marks=pytest.mark.long),
        pytest.param(make_qwen_image, QwenImagePipeline, 4.0, QWEN, id="qwen guided"),
    ],
)
def test_images_are_those_of_diffusers(tmp_path, make, pipeline, guidance, options):
    path = make(tmp_path / "pipeline")
    theirs, (ours, options, tolerance) = load_pipeline(path, pipeline), options
    with EngineDriver(str(path), scripted=False) as driver:
        results = run(driver, n=2, guidance_scale=guidance, **ours)
    first = torch.from_numpy(np.stack([tensors_of(each)["latents"][0] for each in results]))
    call = partial(theirs, ["a red"] * 2, width=24, height=16, num_inference_steps=STEPS, **options(guidance))
    latents = call(latents=first, output_type="latent").images
    images = call(latents=first, output_type="np").images
    assert np.array_equal(tensors_of(results[0])["sigmas"], theirs.scheduler.sigmas.numpy())
    for result, latent, image in zip(results, latents, images, strict=True):
        tensors = tensors_of(result)
        masked = [not tensors[name].all() for name in tensors if name.endswith("mask")]
        assert masked == ([False, True][: 1 + (guidance > 1)] if pipeline is QwenImagePipeline else [])
        np.testing.assert_allclose(tensors["latents"][-1], latent.numpy(), rtol=0, atol=tolerance)
        np.testing.assert_allclose(tensors["image"] / 255, image, rtol=0, atol=0.5 / 255 + 1e-4)
        assert tensors["image"].std() > 10, "a flat image shows nothing"


def test_flux_takes_no_negative_prompt(tmp_path):
    with EngineDriver(str(make_flux(tmp_path / "flux")), scripted=False) as driver:
        assert refusal(driver, request(negative_prompt="red")).detail["field"] == "negative_prompt"


def test_a_prompt_without_tokens_of_its_own_is_refused(tmp_path):
    """The transformer would have no token to attend to."""
    with EngineDriver(str(make_qwen_image(tmp_path / "qwen")), scripted=False) as driver:
        for field, fields in (
            ("max_sequence_length", {"max_sequence_length": 0}),
            ("prompt_ids", {"prompt": None, "prompt_ids": [[1] * 34]}),
        ):
            assert refusal(driver, request(**fields)).detail["field"] == field


def test_a_text_encoder_that_an_older_library_saved(tmp_path):
    new = make_qwen_image(tmp_path / "new")
    old = tmp_path / "old"
    shutil.copytree(new, old)
    file = old / "text_encoder" / "model.safetensors"
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = {}
    for name, tensor in load_file(file).items():
        start = next((each for each in names if name.startswith(each)), "")
        tensors[names.get(start, "") + name.removeprefix(start)] = tensor
    save_file(tensors, file)
    found = []
    for path in (new, old):
        with EngineDriver(str(path), scripted=False) as driver:
            found.append(tensors_of(run(driver, max_sequence_length=400)[0])["latents"])
            assert driver.update(path, component="text_encoder").changed_tensors == 0
    assert np.array_equal(*found)


def test_bfloat16_keeps_latents_in_float32(tmp_path):
    path = make_sd3(tmp_path / "sd3")
    with EngineDriver(str(path), scripted=False, dtype="bfloat16") as driver:
        result = run(driver, sde=SdeParams(type="sde"), guidance_scale=2.0)[0]
        assert driver.status().dtype == "bfloat16"
    dtypes = {spec.name: spec.dtype for spec in result.tensors}
    assert dtypes["latents"] == "F32"
    assert {dtype for name, dtype in dtypes.items() if "embeds" in name} == {"BF16"}
    assert result.finish_reason.type == "length"


@pytest.mark.parametrize(
    ("make", "pipeline", "options"),
    [
        pytest.param(make_sd3, StableDiffusion3Pipeline, SD3, id="sd3"),
        pytest.param(make_flux, FluxPipeline, FLUX, id="flux"),
        pytest.param(make_qwen_image, QwenImagePipeline, QWEN, id="qwen"),
    ],
)
def test_bfloat16_is_as_near_float32_as_diffusers(tmp_path, make, pipeline, options):
    path, (ours, options, _) = make(tmp_path / "pipeline"), options
    with EngineDriver(str(path), scripted=False, dtype="bfloat16") as driver:
        results = run(driver, n=2, guidance_scale=4.0, **ours)
    latents = torch.from_numpy(np.stack([tensors_of(each)["latents"] for each in results]))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        theirs = load_pipeline(path, pipeline).to(torch.bfloat16).to(dtype)
        call = partial(theirs, ["a red"] * 2, width=24, height=16, num_inference_steps=STEPS, **options(4.0))
        found.append(call(latents=latents[:, 0].to(dtype), output_type="latent").images.float())
    errors = [(each - found[0]).square().mean().sqrt() for each in (latents[:, -1], found[1])]
    assert errors[0] <= 3 * errors[1]  # they round the timesteps in other places


def start(path, **options):
    with pytest.raises(CaesuraError) as refused:
        EngineDriver(str(path), scripted=False, **options)
    return refused.value


UNSERVED = {
    "video": ("unsupported_model", {"_class_name": "WanPipeline"}, "WanPipeline"),
    "scheduler": ("unsupported_model", {"scheduler": ["diffusers", "DDIMScheduler"]}, "DDIMScheduler"),
    "module": ("unsupported_model", {"vae": ["os", "system"]}, "vae"),
}


def test_unserved_features_are_refused_by_name(tmp_path):
    whole = make_sd3(tmp_path / "sd3")

    def changed(name, file="model_index.json", **entries):
        path = Path(shutil.copytree(whole, tmp_path / name))
        text = (path / file).read_text()
        (path / file).write_text(json.dumps(json.loads(text) | entries) if entries else "{")
        return path

    for name, (code, entries, word) in UNSERVED.items():
        error = start(changed(name, **entries))
        assert (error.code, word in error.message) == (code, True)
    lacking = changed("lacking", _class_name="StableDiffusion3Pipeline")
    shutil.rmtree(lacking / "vae")
    odd = changed("odd", "transformer/config.json", num_layers="many")
    for path in (lacking, changed("broken"), odd):
        assert start(path).code == "checkpoint_error"
    for option, value in (("reference_model_path", str(whole)), ("deterministic", True)):
        assert start(whole, **{option: value}).detail["field"] == option
