"""OpenAI's route for images and SGLang's for trajectories, through `caesura serve` on a pipeline."""

import base64
import io
import threading
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load
from selenium.webdriver.common.by import By
from support.browser import browsing, chromium
from support.http_serve import served

pytest.importorskip("diffusers")
from PIL import Image
from support.pipelines import load_pipeline, make_sd3
from support.waiting import PATIENCE_S, eventually

from caesura.client import SchedulerClient

pytestmark = pytest.mark.slow  # its engines take seconds to start

SIZE = "32x16"
STEPS = {"num_inference_steps": 4, "max_sequence_length": 8}
IMAGES, ROLLOUT = "/v1/images/generations", "/rollout/generate"
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
    with served("--model", str(sd3), "--served-model-name", "painter") as found:
        yield found
        _, said = found.stop()
    assert "tokenizer" not in said, "a pipeline has its own"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def engine(server):
    endpoint = server.announced.split("(engine ")[1].split(")")[0]
    with SchedulerClient(endpoint) as found:
        yield found


def post(server, **changes: Any) -> httpx.Response:
    body = {"prompt": "a red circle", "size": SIZE, **STEPS, **changes}
    return httpx.post(server.url + IMAGES, json=body, timeout=None)


def pixels(element):
    with Image.open(io.BytesIO(base64.b64decode(element.b64_json))) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return np.asarray(picture)


def test_openais_client_gets_the_engines_pixels(client, engine):
    answer = client.images.generate(
        model="painter",
        prompt="a red circle",
        n=2,
        size=SIZE,
        response_format="b64_json",
        extra_body={**STEPS, "seed": 7, "guidance_scale": 3.0, "negative_prompt": "blue"},
    )
    options = {**STEPS, "width": 32, "height": 16, "negative_prompt": "blue", "guidance_scale": 3.0}
    options["sde"] = {"type": "ode"}
    expected = engine.generate_images("a red circle", n=2, seed=7, **options)
    assert len(answer.data) == 2
    for element, output in zip(answer.data, expected, strict=True):
        found = pixels(element)
        assert found.shape == (16, 32, 3)
        assert np.array_equal(found, np.asarray(output.image))
        assert found.std() > 5, "a flat image shows nothing"
    assert (answer.size, answer.output_format, answer.seed) == (SIZE, "png", 7)
    assert answer.metadata["weight_version"] == "default"


def test_a_seed_left_out_is_drawn_and_told(server):
    first, second = (post(server).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = post(server, seed=first["seed"]).json()
    assert again["data"][0]["b64_json"] == first["data"][0]["b64_json"]


def test_an_abort_marks_unfinished_images(server):
    answers = []
    body = {"rid": "long", "num_inference_steps": 900, "n": 2}
    thread = threading.Thread(target=lambda: answers.append(post(server, **body)))
    thread.start()
    eventually(lambda: server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 2)
    server.post("/abort_request", {"rid": "long"})
    thread.join()
    assert answers[0].status_code == 200, answers[0].text
    found = [(each["b64_json"], each["finish_reason"]) for each in answers[0].json()["data"]]
    assert found == [(None, "abort")] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (IMAGES, {"prompt": "a", "size": SIZE, "num_inference_steps": 900}),
        (ROLLOUT, {**BODY, "num_inference_steps": 900, "rollout_return_step_indices": []}),
    ],
)
def test_a_client_that_leaves_aborts_its_images(server, path, body):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=0.5)
    eventually(lambda: server.get("/v1/loads").json()["loads"][0]["num_reqs"] == 0)


SIZES = [
    "0x16", "16x0", "17x16", "16", "8193x16", "99999x16", "-1x16", "1e3x16", "x", "16x16\n", "16x16 ",
]  # fmt: skip
REFUSED = {
    "response_format": ["url", "jpeg"],
    "size": SIZES,
    "n": [0, -1, 257, 10000, 2**63, 2**70, 1.5],
    "num_inference_steps": [0, 1_000_000, 2**63, 2**70],
    "seed": [2**63, -(2**64), 2**80],
    "guidance_scale": [-1, 1e9, 1e308],
    "prompt": ["x" * (1 << 17), None, ["a", "b"]],
    "style": ["vivid"],
    "quality": ["hd"],
    "background": ["transparent"],
    "output_format": ["webp"],
    "stream": [True],
    "max_sequence_length": [10**6],
    "rid": ["", "x" * 10_000],
    "min_weights_epoch": [2**64],
}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *[({param: value}, param) for param, values in REFUSED.items() for value in values],
        ({"n": 200, "size": "8192x8192"}, "n"),
        ({"min_weights_epoch": 10**6}, None),
    ],
)
def test_unsupported_values_are_400_with_the_field(server, changes, param):
    response = post(server, **changes)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"prompt": "a", "guidance_scale": NaN}', b"\xff\xfe", b"[" * 5000]
)
def test_bodies_that_are_no_request(server, body):
    response = httpx.post(server.url + IMAGES, content=body, timeout=None)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("model", ["dall-e-3", "x" * 1_000_000])
def test_an_unknown_model_is_404(client, model):
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model=model, prompt="a")
    assert len(caught.value.response.content) < 1000
    assert caught.value.code == "model_not_found"


def test_the_empty_prompt_is_a_prompt(server):
    assert post(server, prompt="", seed=1).json()["data"][0]["finish_reason"] == "length"


def test_neutral_values_pass(server):
    nothing = {
        "style": None, "stream": False, "quality": "auto", "user": "x", "background": "opaque", "n": None,
    }  # fmt: skip
    assert post(server, **nothing, output_format="png", response_format=None).status_code == 200


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A server of a model of 16 channels, whose memory can be released, and its folder."""
    path = make_sd3(tmp_path_factory.mktemp("pipelines") / "dense", channels=16)
    with served("--model", str(path), "--enable-memory-saver", "--weights-root", str(path)) as found:
        yield found, str(path)


def test_released_components_become_valid_one_by_one(dense):
    found, folder = dense
    update = {"model_path": folder, "weight_version": "1"}
    found.ok("/release_memory_occupation")
    found.ok("/resume_memory_occupation")
    written = found.ok("/update_weights_from_disk", update)
    assert (written["success"], written["committed"]) == (True, False)
    assert written["message"].startswith("Written, not committed: the weights are invalid until ")
    refused = found.post("/update_weights", {"weight_dir": folder})
    assert (refused.status_code, "not committed" in refused.text) == (400, True)
    unknown = found.post("/update_weights_from_disk", {**update, "component": "nose"})
    assert (unknown.status_code, "vae" in unknown.json()["message"]) == (400, True)
    replies = [
        found.ok("/update_weights_from_disk", {**update, "component": component})
        for component in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    ]
    assert [reply["committed"] for reply in replies] == [False, False, False, True]
    assert replies[-1]["message"] == "Succeeded to update model weights."
    assert post(found).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/generate"]
)
def test_routes_of_language_models_name_the_route_to_call(server, path):
    response = httpx.post(f"{server.url}{path}", json={"prompt": "a", "messages": []}, timeout=None)
    assert response.status_code == 400, response.text
    assert "/v1/images/generations" in response.text
    assert "unsupported" in response.text


def test_models_has_the_pipeline(client):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("painter", None)
    assert card.created > 0
    assert client.models.retrieve("painter").id == "painter"


def test_the_dashboards_data_has_the_last_image_once(server):
    post(server, n=2, seed=3)
    told = server.get("/dashboard/data").json()["image"]
    assert (told["width"], told["height"]) == (32, 16)
    with Image.open(io.BytesIO(base64.b64decode(told["png"]))) as small:
        assert small.size == (32, 16)
    assert server.get(f"/dashboard/data?image={told['number']}").json()["image"] is None


@browsing
def test_the_dashboard_shows_steps_and_the_last_image(server):
    post(server, seed=3)
    with chromium() as browser:
        browser.get(f"{server.url}/dashboard")
        picture = browser.find_element(By.ID, "last-image")
        eventually(lambda: picture.is_displayed() and picture.get_property("naturalWidth") == 32)
        assert "32 x 16 pixels" in browser.find_element(By.ID, "picture-note").text
        assert "denoise steps/s" in browser.find_element(By.ID, "tiles").text
        assert "token" not in browser.find_element(By.ID, "load").text
        assert not browser.find_element(By.ID, "kv").is_displayed()
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_metrics_have_steps_and_no_tokens(server):
    post(server)
    text = server.get("/metrics").text
    assert "caesura:denoise_steps_total" in text
    assert "caesura:num_used_tokens" not in text


# -- trajectories --------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__tensor__"):
        tensor = load(value["data"])["t"]
        assert (list(tensor.shape), str(tensor.dtype)) == (value["shape"], value["dtype"])
        return tensor
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def rollouts(server, **changes: Any) -> list[dict[str, Any]]:
    return decoded(httpx.post(server.url + ROLLOUT, json={**BODY, **changes}, timeout=None))


def decoded(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/msgpack"
    return plain(msgspec.msgpack.decode(response.content))


def test_the_defaults_of_python_are_those_of_http(server, engine):
    body = {"prompt": "a", "seed": 7, "width": 16, "height": 16, "num_inference_steps": 4}
    (over_http,) = decoded(httpx.post(server.url + ROLLOUT, json=body, timeout=PATIENCE_S))
    in_python = engine.generate_images(return_steps=None, **body)
    found = torch.tensor(np.array(in_python.log_probs), dtype=torch.float32)
    assert torch.equal(found, over_http["rollout_log_probs"])
    assert (over_http["rollout_log_probs"] != 0).all()
    (picture,) = decoded(httpx.post(server.url + ROLLOUT, json={**body, "rollout": False}, timeout=None))
    assert not torch.equal(picture["generated_output"], over_http["generated_output"])


def test_a_learner_recomputes_the_log_probabilities(server, sd3):
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


EXTREMES = {
    "seed": [2**63, 2**70],
    "width": [0, 17, 2**70],
    "height": [-8],
    "num_inference_steps": [10**6, 2**64],
    "guidance_scale": [1e308],
    "rollout_noise_level": [-1.0, 1e300],
    "rollout_sde_step_indices": [[2**40]],
    "rollout_return_step_indices": [[-1]],
    "num_outputs_per_prompt": [0, 10_000],
}
SCHEDULES = {
    "sigmas": [[0.2, 0.9], [], [1.0, 1.0], [2.0, 1.0], [0.5, 1e-60]],
    "shift": [0.0, 1e308],
    "max_sequence_length": [2**70],
    "teacache": [True],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *[({f: v}, f.removeprefix("rollout_")) for f, values in EXTREMES.items() for v in values],
        *[({"extra_sampling_params": {f: v}}, f) for f, values in SCHEDULES.items() for v in values],
        ({"num_outputs_per_prompt": 256, "width": 1024, "height": 1024}, "num_outputs_per_prompt"),
        ({"image_path": "x.png"}, "images as input"),
        ({"num_frames": 9}, "videos"),
        ({"rollout_return_step_indices": [4]}, "return_steps"),
        ({"rollout_sde_typ": "sde"}, "rollout_sde_type"),
    ],
)
def test_unsupported_values_of_a_trajectory_are_400(server, changes, said):
    response = httpx.post(server.url + ROLLOUT, json={**BODY, **changes}, timeout=None)
    assert response.status_code == 400, response.text
    assert said in response.text


def test_latents_count_with_the_channels_of_the_model(dense):
    """A model of 16 channels and 4 x 4 pixels to a latent takes four bytes for each pixel."""
    found, _ = dense
    body = {**BODY, "width": 64, "height": 64, "num_inference_steps": 256, "num_outputs_per_prompt": 256}
    (small,) = rollouts(found, num_outputs_per_prompt=1)
    assert small["dit_trajectory"]["latents"].nbytes == 5 * 4 * 16 * 16
    response = httpx.post(found.url + ROLLOUT, json=body, timeout=None)
    assert response.status_code == 400, response.text
    assert f"with their latents {256 * 64 * 64 * (3 + 4 * 257)} bytes" in response.text
