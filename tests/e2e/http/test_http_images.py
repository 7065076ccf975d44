"""OpenAI's route for images, through `caesura serve` on a pipeline; and which routes go with which engine."""

import base64
import io
import json
import threading

import httpx
import numpy as np
import openai
import pytest
from selenium.webdriver.common.by import By
from support.browser import browsing, chromium
from support.http_serve import make_text_model, served

pytest.importorskip("diffusers")
from PIL import Image
from support.pipelines import make_sd3
from support.waiting import PATIENCE_S, eventually

from caesura.client import SchedulerClient

pytestmark = pytest.mark.slow  # its engines take seconds to start

SIZE = "32x16"
STEPS = {"num_inference_steps": 4, "max_sequence_length": 8}


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


def test_released_weights_become_valid_again_component_by_component(sd3):
    options = ("--model", str(sd3), "--enable-memory-saver", "--weights-root", str(sd3))
    with served(*options) as found, httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http:

        def ok(path, **body):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        ok("/release_memory_occupation")
        ok("/resume_memory_occupation")
        written = ok("/update_weights_from_disk", model_path=str(sd3), weight_version="1")
        assert (written["success"], written["committed"]) == (True, False)
        assert written["message"].startswith("Written, not committed: the weights are invalid until ")
        refused = http.post("/update_weights", json={"weight_dir": str(sd3)})
        assert (refused.status_code, "not committed" in refused.text) == (400, True)
        unknown = http.post("/update_weights_from_disk", json={"model_path": str(sd3), "component": "nose"})
        assert (unknown.status_code, "vae" in unknown.json()["message"]) == (400, True)
        replies = [
            ok("/update_weights_from_disk", model_path=str(sd3), component=component, weight_version="1")
            for component in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
        ]
        assert [reply["committed"] for reply in replies] == [False, False, False, True]
        assert replies[-1]["message"] == "Succeeded to update model weights."
        assert post(found).status_code == 200


def post(server, **changes):
    body = {"prompt": "a red circle", "size": SIZE, **STEPS, **changes}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=None)


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


def test_a_client_that_leaves_aborts_its_images(server):
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "a", "size": SIZE, "num_inference_steps": 900}
        httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=0.5)
    eventually(lambda: server.get("/v1/loads").json()["loads"][0]["num_reqs"] == 0)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": "url"}, "response_format"),
        ({"response_format": "jpeg"}, "response_format"),
        *[
            ({"size": size}, "size")
            for size in (
                "0x16",
                "16x0",
                "17x16",
                "16",
                "8193x16",
                "99999x16",
                "-1x16",
                "1e3x16",
                "x",
                "16x16\n",
            )
        ],
        ({"size": "16x16 "}, "size"),
        *[({"n": n}, "n") for n in (0, -1, 257, 10000, 2**63, 2**70, 1.5)],
        ({"n": 200, "size": "8192x8192"}, "n"),
        *[({"num_inference_steps": n}, "num_inference_steps") for n in (0, 1_000_000, 2**63, 2**70)],
        *[({"seed": n}, "seed") for n in (2**63, -(2**64), 2**80)],
        *[({"guidance_scale": n}, "guidance_scale") for n in (-1, 1e9, 1e308)],
        ({"prompt": "x" * (1 << 17)}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"style": "vivid"}, "style"),
        ({"quality": "hd"}, "quality"),
        ({"background": "transparent"}, "background"),
        ({"output_format": "webp"}, "output_format"),
        ({"stream": True}, "stream"),
        ({"max_sequence_length": 10**6}, "max_sequence_length"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 10_000}, "rid"),
        ({"min_weights_epoch": 2**64}, "min_weights_epoch"),
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
    response = httpx.post(f"{server.url}/v1/images/generations", content=body, timeout=None)
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
        "style": None,
        "stream": False,
        "quality": "auto",
        "user": "x",
        "background": "opaque",
        "n": None,
    }
    assert post(server, **nothing, output_format="png", response_format=None).status_code == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**63},
        {"seed": 2**70},
        {"width": 2**70},
        {"width": 0},
        {"height": -8},
        {"num_inference_steps": 10**6},
        {"num_inference_steps": 2**64},
        {"guidance_scale": 1e308},
        {"rollout_noise_level": -1.0},
        {"rollout_noise_level": 1e300},
        {"rollout_sde_step_indices": [2**40]},
        {"rollout_return_step_indices": [-1]},
        {"num_outputs_per_prompt": 10_000},
        {"num_outputs_per_prompt": 256, "width": 1024, "height": 1024},
        *[
            {"extra_sampling_params": extra}
            for extra in (
                {"sigmas": [0.2, 0.9]},
                {"sigmas": []},
                {"sigmas": [1.0, 1.0]},
                {"sigmas": [2.0, 1.0]},
                {"sigmas": [0.5, 1e-60]},
                {"shift": 0.0},
                {"shift": 1e308},
                {"max_sequence_length": 2**70},
            )
        ],
    ],
)
def test_extremes_of_a_trajectory_are_400(server, changes):
    body = {"prompt": "a", "width": 16, "height": 16, "num_inference_steps": 2, **changes}
    response = httpx.post(f"{server.url}/rollout/generate", content=json.dumps(body), timeout=None)
    assert response.status_code == 400, response.text
    field = next(iter(changes.get("extra_sampling_params", changes)))
    assert field.removeprefix("rollout_") in response.text, "the field is named"


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


def test_an_image_route_of_a_language_model_says_so(tmp_path):
    with served("--model", str(make_text_model(tmp_path / "text"))) as language:
        for path in ("/v1/images/generations", "/rollout/generate"):
            response = language.post(path, {"prompt": "a"})
            assert response.status_code == 400, response.text
            assert "diffusion pipeline" in response.text
        assert language.get("/v1/models").json()["data"][0]["max_model_len"] > 0


def test_the_dashboards_data_has_the_last_image_once(server):
    post(server, n=2, seed=3)
    told = server.get("/dashboard/data").json()["image"]
    assert (told["width"], told["height"]) == (32, 16)
    with Image.open(io.BytesIO(base64.b64decode(told["png"]))) as small:
        assert small.size == (32, 16)
    assert server.get(f"/dashboard/data?image={told['number']}").json()["image"] is None
    post(server, seed=4)
    newer = server.get(f"/dashboard/data?image={told['number']}").json()["image"]
    assert newer["number"] == told["number"] + 1
    assert newer["png"] != told["png"]


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
