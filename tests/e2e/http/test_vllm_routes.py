"""vLLM's routes as prime-rl calls them, over a real socket and a real engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.openai_server import CONTEXT, NAME, VOCABULARY, Served, messages

from caesura.client import SamplingParams

PROMPT = [5, 6, 7, 8]
LONG = {"max_tokens": 400, "ignore_eos": True, "logprobs": 1, "seed": 3}


@pytest.fixture(scope="module")
def step_7(served: Served) -> Iterator[str]:
    """Write other weights where a trainer would have written them, and go back to the engine's own."""
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
    yield str(path)
    served.engine.update_weights_from_disk(str(served.path), weight_version="default")


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
    before = served.engine.status().weight_version
    handle = served.engine.submit(PROMPT, sampling_params=params, stream=True)
    next(iter(handle))
    paused = http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
    status = served.engine.status()
    assert (status.pause_mode, status.running_requests) == ("in_place", 1)
    assert http.get("/liveness").json() == {"status": "ok"}
    assert http.post("/update_weights", json={"weight_dir": step_7}).json() == {"status": "ok"}
    assert http.post("/resume").json() == {"status": "resumed"}
    assert [span.version for span in handle.result().weight_versions] == [before, "step_7"]


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


def test_given_tokens_are_replayed(http):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 0}}
    sampled = http.post("/inference/v1/generate", json=body).json()["choices"][0]
    body["sampling_params"] = {"logprobs": 0, "trace_decode_token_ids": sampled["token_ids"]}
    replayed = http.post("/inference/v1/generate", json=body).json()["choices"][0]
    assert replayed["token_ids"] == sampled["token_ids"]
    found, expected = (
        [each["logprob"] for each in one["logprobs"]["content"]] for one in (replayed, sampled)
    )
    assert found == pytest.approx(expected, abs=1e-4)


FORCED = list(range(20, 50))
FULL = {"max_tokens": 1, "truncate_prompt_tokens": -1}


@pytest.mark.parametrize(
    ("path", "prompt", "options"),
    [
        ("/generate", {"input_ids": PROMPT}, {"max_new_tokens": 0}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, {"max_tokens": 0}),
        ("/v1/completions", {"prompt": PROMPT * CONTEXT}, FULL),
        ("/v1/chat/completions", {"messages": messages("once " * CONTEXT), "max_completion_tokens": 1}, FULL),
        ("/inference/v1/generate", {"token_ids": PROMPT * CONTEXT}, FULL),
    ],
)
def test_a_replay_is_as_long_as_its_ids(http, path, prompt, options):
    def answer(**more: Any) -> httpx.Response:
        params = {**options, "forced_output_ids": FORCED, "ignore_eos": True, **more}
        nested = {"sampling_params": params} if "generate" in path else {**params, "return_token_ids": True}
        return http.post(path, json={"model": NAME, **prompt, **nested})

    found = answer().json()
    assert (found["output_ids"] if path == "/generate" else found["choices"][0]["token_ids"]) == FORCED
    refused = answer(stop=["a"])
    assert refused.status_code == 400 and "stop strings cannot end forced_output_ids" in refused.text


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


def events(http: httpx.Client, **fields: Any) -> Iterator[Any]:
    body = {"token_ids": PROMPT, "stream": True, **fields}
    with http.stream("POST", "/inference/v1/generate", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_a_stream_adds_up(http):
    asked = {"sampling_params": {**LONG, "n": 2, "max_tokens": 12}, "return_token_ids": True}
    whole = generate(http, **asked)
    *chunks, usage, done = events(http, **asked, stream_options={"include_usage": True})
    assert done == "[DONE]"
    usage = json.loads(usage)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    chunks = [json.loads(chunk) for chunk in chunks]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == PROMPT
    assert len({chunk["request_id"] for chunk in chunks} | {usage["request_id"]}) == 1
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    for expected in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == expected["index"]]
        assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [entry["token_id"] for entry in content] == expected["token_ids"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"] == "length"
        assert parts[-1]["weight_versions"] == expected["weight_versions"]


def test_a_stream_ends_when_its_request_is_aborted_by_name(http):
    asked = {"sampling_params": {"ignore_eos": True}, "request_id": "rollout-7"}
    stream = events(http, **asked)
    first = json.loads(next(stream))
    assert first["request_id"] == "rollout-7"
    http.post("/abort_request", json={"rid": "rollout-7"}).raise_for_status()
    *_, last, done = stream
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort"


def test_ranks_of_tokens(served, http):
    asked = {"max_tokens": 8, "ignore_eos": True, "seed": 3, "logprobs": 2, "logprob_token_ids": [9]}
    found = generate(http, sampling_params=asked)
    (choice,) = found["choices"]
    assert found["model"] == NAME
    assert found["created"] > 0
    assert [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]] == [
        (choice["weight_versions"][0]["version"], 0, 8)
    ]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        top = entry["top_logprobs"]
        assert [each["rank"] for each in top[:2]] == [1, 2]
        assert [each["logprob"] for each in top[:2]] == sorted((e["logprob"] for e in top[:2]), reverse=True)
        assert {each["rank"] for each in top[2:]} <= {None}
        assert 9 in {each["token_id"] for each in top}
        ranks = {each["token_id"]: each["rank"] for each in top[:2]}
        assert (entry["token_id"], entry["token"]) == (token, f"token_id:{token}")
        assert entry["rank"] == ranks.get(token)


def test_skyrl_calls_it_by_another_name(http):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "temperature": 0.0}}
    answer = http.post("/skyrl/v1/generate", json=body)
    assert answer.json()["choices"] == generate(http, **body)["choices"]


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
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs cannot be streamed"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"sampling_params": {"logprob_token_ids": "9"}}, "logprob_token_ids"),
        ({"output_mode": "text"}, "output_mode"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"sampling_params": {"structured_outputs": {"json": 1}}}, "structured_outputs"),
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
