"""vLLM's routes as prime-rl calls them, over a real socket and a real engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.openai_server import NAME, VOCABULARY, Served, serve_openai

from caesura.client import SamplingParams

PROMPT = [5, 6, 7, 8]
LONG = {"max_tokens": 400, "ignore_eos": True, "logprobs": 1, "seed": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


@pytest.fixture(scope="module")
def step_7(served: Served) -> str:
    """Write other weights where a trainer would have written them."""
    path = served.path.parent / "step_7"
    make_checkpoint(
        path,
        "qwen3-moe",
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=512,
        seed=6,
    )
    return str(path)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=None) as client:
        yield client
        client.post("/resume").raise_for_status()


def generate(http: httpx.Client, **fields: Any) -> Any:
    body = {"model": NAME, "token_ids": PROMPT, "sampling_params": LONG, **fields}
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_update_while_a_request_is_frozen(served, http, step_7):
    params = SamplingParams(max_new_tokens=400, ignore_eos=True, seed=3)
    handle = served.engine.submit(PROMPT, sampling_params=params, stream=True)
    next(iter(handle))
    paused = http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
    status = served.engine.status()
    assert (status.pause_mode, status.running_requests) == ("in_place", 1)
    assert http.get("/liveness").json() == {"status": "ok"}
    assert http.post("/update_weights", json={"weight_dir": step_7}).json() == {"status": "ok"}
    assert http.post("/resume").json() == {"status": "resumed"}
    assert [span.version for span in handle.result().weight_versions] == ["default", "step_7"]


def test_tokens_and_logprobs_are_the_engines(served, http):
    found = generate(http, sampling_params={**LONG, "n": 2, "max_tokens": 12}, output_mode="tokens")
    params = SamplingParams(n=2, max_new_tokens=12, ignore_eos=True, seed=3)
    expected = served.engine.generate(PROMPT, sampling_params=params, return_logprob=True)
    for choice, output in zip(found["choices"], expected, strict=True):
        assert (choice["index"], choice["token_ids"]) == (output.index, list(output.output_ids))
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in output.output_ids]
        assert [entry["logprob"] for entry in content] == pytest.approx(output.output_logprobs, abs=1e-5)
        assert [len(entry["top_logprobs"]) for entry in content] == [1] * 12
        assert (choice["finish_reason"], choice["routed_experts"]) == ("length", None)
    assert found["prompt_logprobs"] is None
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (4, 24)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_of_a_prompt_with_its_likeliest_tokens(served, http, count):
    found = generate(http, sampling_params={"max_tokens": 1, "prompt_logprobs": count})
    (scored,) = served.engine.generate(
        [PROMPT],
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )
    first, *rest = found["prompt_logprobs"]
    assert first is None
    for position, (entry, token) in enumerate(zip(rest, PROMPT[1:], strict=True)):
        top = list(scored.input_top_logprobs.at(position))[:count]
        assert next(iter(entry)) == str(token)
        assert set(entry) == {str(token), *(str(id) for _, id in top)}
        assert entry[str(token)]["logprob"] == pytest.approx(scored.input_logprobs[position + 1], abs=1e-5)
        for rank, (logprob, id) in enumerate(top, 1):
            assert entry[str(id)] == {"logprob": pytest.approx(logprob, abs=1e-5), "rank": rank}
    assert found["choices"][0]["logprobs"] is None


def test_logprobs_of_given_tokens(served, http):
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, seed=3)
    expected = served.engine.generate(
        PROMPT, sampling_params=params, return_logprob=True, token_ids_logprob=[9, 4]
    )
    asked = {"max_tokens": 3, "ignore_eos": True, "seed": 3, "logprob_token_ids": [9, 4]}
    (choice,) = generate(http, sampling_params=asked)["choices"]
    for position, entry in enumerate(choice["logprobs"]["content"]):
        found = {each["token"]: each["logprob"] for each in entry["top_logprobs"]}
        wanted = {f"token_id:{id}": lp for lp, id in expected.output_token_ids_logprobs.at(position)}
        assert found == pytest.approx(wanted, abs=1e-5)


def test_stop_strings_end_a_sample(served, http):
    asked = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 0.0}
    (whole,) = generate(http, sampling_params=asked)["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    text = served.tokenizer.decode(whole["token_ids"])
    stop = text[len(text) // 2 :][:2]
    (choice,) = generate(http, sampling_params={**asked, "stop": [stop], "logprobs": 0})["choices"]
    count = len(choice["token_ids"])
    assert choice["token_ids"] == whole["token_ids"][:count]
    assert stop in served.tokenizer.decode(choice["token_ids"])
    assert stop not in served.tokenizer.decode(choice["token_ids"][:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["logprobs"]["content"]) == count < 24


def test_experts_of_tokens(http):
    found = generate(
        http, sampling_params={"max_tokens": 3, "ignore_eos": True, "return_routed_experts": True}
    )
    experts = found["choices"][0]["routed_experts"]
    assert list(experts) == ["data", "shape", "start", "dtype"]
    assert (experts["dtype"], experts["start"]) == ("uint8", 0)
    assert experts["shape"][0] == len(PROMPT) + 3 - 1


def test_parameters_that_describe_the_request(http):
    salted = {"max_tokens": 1, "cache_salt": "a", "stream": True, "echo": True, "prompt": "x"}
    prompt = list(range(3, 203))
    first, other = (
        generate(http, token_ids=prompt, sampling_params={**salted, "cache_salt": salt})["usage"]
        for salt in "ab"
    )
    again = generate(http, token_ids=prompt, sampling_params={"max_tokens": 1}, cache_salt="a")["usage"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, other, again)]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


@pytest.mark.parametrize("space", [0, 40_000], ids=["at once", "in a worker"])
def test_a_body_of_any_size_is_read_alike(http, caplog, space):
    sampling = {"max_tokens": 5, "ignore_eos": True, "seed": 1}
    expected = generate(http, sampling_params=sampling)["choices"]
    unknown = {"max_tokns" + "s" * (space > 0): 2}
    body = {"token_ids": PROMPT, "sampling_params": sampling | unknown, "cache_slat" + "t" * (space > 0): ""}
    found = http.post("/inference/v1/generate", content=" " * space + json.dumps(body)).json()
    assert found["choices"] == expected
    said = " ".join(caplog.messages)
    assert f"the key {next(iter(unknown))} is not known and ignored (did you mean max_tokens?)" in said
    assert f"the key {list(body)[-1]} is not known and ignored (did you mean cache_salt?)" in said
    refused = json.dumps({**body, "features": {"mm_hashes": {}}})
    answer = http.post("/inference/v1/generate", content=" " * space + refused)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "features")


def test_without_a_limit_the_context_is_filled(http):
    found = generate(http, token_ids=PROMPT * 100, sampling_params={"ignore_eos": True})
    assert len(found["choices"][0]["token_ids"]) == 512 - 400


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [VOCABULARY + 10**6]}, "outside the vocabulary"),
        ({"features": {"mm_hashes": {}}}, "features is not supported"),
        ({"stream": True}, "stream is not supported"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"sampling_params": {"logprob_token_ids": "9"}}, "logprob_token_ids"),
        ({"output_mode": "text"}, "output_mode"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "structured_outputs is not supported"),
        ({"token_ids": [5] * 600}, "context"),
    ],
)
def test_unservable_models_are_refused_by_name(http, fields, said):
    answer = http.post("/inference/v1/generate", json={"token_ids": PROMPT, **fields})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("/pause", {"params": {"mode": "drain"}}, "mode"),
        ("/pause", {"json": {"clear_cash": False}}, "clear_cash"),
        ("/pause", {"params": {"mod": "keep"}}, "mod"),
        ("/update_weights", {"json": {"weight_dir": None}}, "weight_broadcast.type"),
        ("/update_weights", {"json": {"weight_dir": "/etc"}}, "--weights-root"),
        ("/update_weights", {"json": {"update_info": {}}}, "/init_weight_transfer_engine"),
    ],
)
def test_commands_that_cannot_be_served_change_nothing(served, http, path, options, said):
    before = served.engine.status()
    answer = http.post(path, **options)
    assert answer.status_code == 400, answer.text
    assert said in answer.text
    after = served.engine.status()
    assert (after.generation, after.weights_epoch) == (before.generation, before.weights_epoch)
