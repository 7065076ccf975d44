"""SGLang's route for trajectories of a diffusion policy, through `caesura serve` on a pipeline."""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load
from support.http_serve import served

from caesura.client import SchedulerClient

pytest.importorskip("diffusers")
from support.pipelines import load_pipeline, make_sd3
from support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.slow  # its engine takes seconds to start

BODY = {
    "prompt": "a red circle",
    "seed": 7,
    "width": 16,
    "height": 16,
    "num_inference_steps": 4,
    "num_outputs_per_prompt": 3,
    "guidance_scale": 1.0,
    "extra_sampling_params": {"max_sequence_length": 8},
    "rollout_return_denoising_env": True,
    "rollout_return_dit_trajectory": True,
    "generator_device": "cuda",
}


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return make_sd3(tmp_path_factory.mktemp("pipelines") / "sd3")


@pytest.fixture(scope="module")
def server(sd3):
    with served("--model", str(sd3)) as found:
        yield found


def plain(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__tensor__"):
        tensor = load(value["data"])["t"]
        assert (list(tensor.shape), str(tensor.dtype)) == (value["shape"], value["dtype"])
        return tensor
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def rollouts(server, **changes: Any) -> list[dict[str, Any]]:
    response = httpx.post(f"{server.url}/rollout/generate", json={**BODY, **changes}, timeout=None)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/msgpack"
    return plain(msgspec.msgpack.decode(response.content))


def test_the_defaults_of_python_are_those_of_http(server):
    body = {"prompt": "a", "seed": 7, "width": 16, "height": 16, "num_inference_steps": 4}
    response = httpx.post(f"{server.url}/rollout/generate", json=body, timeout=PATIENCE_S)
    (over_http,) = plain(msgspec.msgpack.decode(response.content))
    endpoint = server.announced.split("(engine ")[1].split(")")[0]
    with SchedulerClient(endpoint) as engine:
        options = {name: body[name] for name in ("seed", "width", "height", "num_inference_steps")}
        in_python = engine.generate_images("a", return_steps=None, **options)
    found = torch.tensor(np.array(in_python.log_probs), dtype=torch.float32)
    assert torch.equal(found, over_http["rollout_log_probs"])
    assert (over_http["rollout_log_probs"] != 0).all()
    evaluated = httpx.post(
        f"{server.url}/rollout/generate", json={**body, "rollout": False}, timeout=PATIENCE_S
    )
    (picture,) = plain(msgspec.msgpack.decode(evaluated.content))
    assert not torch.equal(picture["generated_output"], over_http["generated_output"])


def test_a_learner_recomputes_the_log_probabilities_of_each_output(server, sd3):
    found = rollouts(server)
    assert [each["seed"] for each in found] == [7, 8, 9]
    transformer = load_pipeline(sd3).transformer
    for each in found:
        trajectory, env = each["dit_trajectory"], each["denoising_env"]
        assert trajectory["latents"].shape[0] == trajectory["sigmas"].shape[0] == 5
        assert each["generated_output"].shape == (16, 16, 3)
        assert each["weight_versions"][0]["end"] == 4
        sigmas, x = trajectory["sigmas"], trajectory["latents"]
        with torch.no_grad():
            v = transformer(
                x[:-1],
                env["pos_cond_kwargs"]["prompt_embeds"].expand(4, -1, -1),
                env["pos_cond_kwargs"]["pooled_prompt_embeds"].expand(4, -1),
                trajectory["timesteps"],
                return_dict=False,
            )[0]
        before, after = (part.view(-1, 1, 1, 1).double() for part in (sigmas[:-1], sigmas[1:]))
        s = 0.7 * (before / (1 - before.where(before < 1, sigmas[1].double()))).sqrt()
        mean = x[:-1].double() + (v + s**2 / (2 * before) * (x[:-1] + (1 - before) * v)) * (after - before)
        std = s * (before - after).sqrt()
        expected = torch.distributions.Normal(mean, std).log_prob(x[1:].double()).flatten(1).mean(1)
        assert torch.allclose(each["rollout_log_probs"].double(), expected, atol=1e-5)
        assert torch.allclose(
            each["rollout_debug_tensors"]["rollout_noise_std_devs"].double(), std.flatten(), atol=1e-6
        )


def test_each_output_can_be_made_again_alone(server):
    together = rollouts(server)
    (alone,) = rollouts(server, seed=8, num_outputs_per_prompt=1)
    assert torch.allclose(alone["rollout_log_probs"], together[1]["rollout_log_probs"], atol=1e-5)
    assert torch.allclose(
        alone["dit_trajectory"]["latents"], together[1]["dit_trajectory"]["latents"], atol=1e-4
    )


def test_an_evaluation_has_an_image_and_nothing_else(server):
    first, *_ = rollouts(server, rollout=False)
    assert first["generated_output"].dtype == torch.uint8
    for name in ("rollout_log_probs", "rollout_debug_tensors", "denoising_env", "dit_trajectory"):
        assert first[name] is None


def test_a_window_and_steps_of_ones_own(server):
    first, *_ = rollouts(server, rollout_sde_step_indices=[1], rollout_return_step_indices=[0, 1])
    assert first["rollout_log_probs"][0] == 0.0
    assert first["rollout_log_probs"][1] != 0.0
    assert first["dit_trajectory"]["latents"].shape[0] == 3


def test_weights_are_updated_by_the_same_routes(server, sd3):
    other = make_sd3(sd3.parent / "other", seed=20)
    before, *_ = rollouts(server)
    server.ok("/update_weights_from_disk", {"model_path": str(other / "transformer"), "weight_version": "v1"})
    after, *_ = rollouts(server)
    assert after["weight_versions"][0]["version"] == "v1"
    assert not torch.equal(before["dit_trajectory"]["latents"][-1], after["dit_trajectory"]["latents"][-1])
    server.ok("/update_weights_from_disk", {"model_path": str(sd3)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_path": "x.png"}, "images as input"),
        ({"num_frames": 9}, "videos"),
        ({"width": 17}, "width"),
        ({"rollout_return_step_indices": [4]}, "return_steps"),
        ({"rollout_sde_typ": "sde"}, "rollout_sde_type"),
        ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt"),
        ({"seed": 2**63}, "seed"),
        ({"extra_sampling_params": {"teacache": True}}, "teacache"),
    ],
)
def test_unsupported_values_are_400_with_a_reason(server, changes, said):
    response = httpx.post(f"{server.url}/rollout/generate", json={**BODY, **changes}, timeout=None)
    assert response.status_code == 400, response.text
    assert said in response.text


def test_a_language_model_says_that_it_makes_no_images(tiny_model):
    with served("--model", str(tiny_model)) as language:
        response = httpx.post(f"{language.url}/rollout/generate", json=BODY, timeout=None)
    assert response.status_code == 400
    assert "image" in response.text


def test_latents_count_with_the_channels_of_the_model(tmp_path):
    """A model of 16 channels and 4 x 4 pixels to a latent takes four bytes for each pixel."""
    dense = make_sd3(tmp_path / "sd3", channels=16)
    body = {**BODY, "width": 64, "height": 64, "num_inference_steps": 256, "num_outputs_per_prompt": 256}
    with served("--model", str(dense)) as found:
        (small,) = rollouts(found, num_outputs_per_prompt=1)
        assert small["dit_trajectory"]["latents"].nbytes == 5 * 4 * 16 * 16
        response = httpx.post(f"{found.url}/rollout/generate", json=body, timeout=None)
    assert response.status_code == 400, response.text
    assert f"with their latents {256 * 64 * 64 * (3 + 4 * 257)} bytes" in response.text


def test_tokens_of_a_pipeline_are_refused(server):
    response = httpx.post(f"{server.url}/generate", json={"input_ids": [1, 2]}, timeout=None)
    assert response.status_code == 400, response.text


def test_a_client_that_leaves_aborts_its_outputs(server):
    long = {**BODY, "num_inference_steps": 900, "rollout_return_step_indices": []}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/rollout/generate", json=long, timeout=0.5)
    eventually(lambda: server.get("/v1/loads").json()["loads"][0]["num_reqs"] == 0)
