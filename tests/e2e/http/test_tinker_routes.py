"""Tinker's routes over a real socket and a real engine, without its SDK."""

import itertools
import json
import math
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_serve import ServedEngine, make_text_model, served
from support.lora import ALL_LINEAR, logprobs_by_peft, make_adapter
from support.tinker_trainer import MODEL, TinkerTrainer, training
from support.waiting import eventually

PROMPT = [5, 6, 7, 8, 9]
PROTOBUF = "application/x-protobuf"
GREEDY = {"max_tokens": 6, "temperature": 0.0, "stop": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [make_adapter(model, model.parent / f"a{i}", ALL_LINEAR, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def trainer() -> TinkerTrainer:
    return TinkerTrainer([])


@pytest.fixture(scope="module")
def engine(model: Path, trainer: TinkerTrainer) -> Iterator[ServedEngine]:
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-waiting-requests", "3")
    with (
        training(trainer) as url,
        served(
            "--model",
            str(model),
            "--served-model-name",
            "base",
            "--dtype",
            "float32",
            "--tinker-trainer",
            url,
            *options,
        ) as engine,
    ):
        yield engine


class Client:
    """A session and its samplers."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.session = engine.ok("/api/v1/create_session", {"tags": []})["session_id"]
        self._numbers = itertools.count()

    def sampler(self, **model: str) -> str:
        found = self.post("create_sampling_session", sampling_session_seq_id=next(self._numbers), **model)
        assert found.status_code == 200, found.text
        return found.json()["sampling_session_id"]

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.engine.post(f"/api/v1/{route}", {"session_id": self.session, **body})

    def asked(self, sampler: str, params: dict[str, Any] = GREEDY, **body: Any) -> httpx.Response:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": body.pop("prompt", PROMPT)}]}
        given = {"sampling_session_id": sampler, "seq_id": next(self._numbers), "prompt": prompt, **body}
        return self.engine.post("/api/v1/asample", {"sampling_params": params, "type": "sample", **given})

    def result(self, promise: httpx.Response, **headers: str) -> httpx.Response:
        assert promise.status_code == 200, promise.text
        body = {"request_id": promise.json()["request_id"]}
        return self.engine.post("/api/v1/retrieve_future", body, headers=headers)

    def sampled(self, sampler: str, params: dict[str, Any] = GREEDY, **body: Any) -> dict[str, Any]:
        found = self.result(self.asked(sampler, params, **body))
        assert found.status_code == 200, found.text
        return found.json()


@pytest.fixture
def client(engine: ServedEngine) -> Iterator[Client]:
    client = Client(engine)
    yield client
    engine.ok(f"/api/v1/sessions/{client.session}/finish")


def scored(model: Path, adapter: Path | None, found: dict[str, Any]) -> list[float]:
    return logprobs_by_peft(model, adapter, [*PROMPT, *found["tokens"]], len(PROMPT))


def test_the_answer_says_which_weights_made_it(engine, client):
    engine.ok("/update_weight_version", {"new_version": "schön"})
    answer = client.result(client.asked(client.sampler(base_model="base")))
    ((span,),) = json.loads(answer.headers["x-caesura-weight-versions"])
    assert (span["version"], span["start"], span["end"], span["adapter"]) == ("schön", 0, 6, None)
    assert answer.json()["sequences"][0]["weight_versions"] == [span]


def test_a_repeated_request_is_the_same_promise(engine, client):
    sampler = client.sampler(base_model="base")
    params = {"max_tokens": 6, "temperature": 1.0}  # of a random seed
    promises = [client.asked(sampler, params, seq_id=5, num_samples=count) for count in (1, 2)]
    assert promises[0].json() == promises[1].json()
    assert len({client.result(each).text for each in promises}) == 1
    other = client.sampler(base_model="base")
    assert client.asked(other, seq_id=5).json()["request_id"] != promises[0].json()["request_id"]


def fields(encoded: bytes) -> list[tuple[int, int | bytes]]:
    """Return the fields of a protobuf message of varints and bytes."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = encoded[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(encoded):
        number, kind = divmod(varint(), 8)
        size = varint()
        if kind == 0:
            found.append((number, size))
        else:
            found.append((number, encoded[at : at + size]))
            at += size
    return found


@pytest.mark.parametrize(("samples", "count"), [(2, 3), (3, 128)], ids=["small", "encoded in a thread"])
def test_protobuf_has_what_json_has(client, samples, count):
    body = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": count}
    promise = client.asked(client.sampler(base_model="base"), num_samples=samples, **body)
    expected = client.result(promise).json()
    answer = client.result(promise, accept=PROTOBUF)
    assert answer.headers["content-type"] == PROTOBUF
    *sequences, prompt, top, cached, weights = fields(answer.content)
    for (number, sequence), each in zip(sequences, expected["sequences"], strict=True):
        assert number == 1
        (_, stop), (_, tokens), (_, logprobs), (_, likely) = fields(sequence)
        assert stop == (each["stop_reason"] == "length")
        assert struct.unpack("<6i", tokens) == tuple(each["tokens"])
        assert struct.unpack("<6f", logprobs) == pytest.approx(each["logprobs"])
        assert [value for _, value in fields(likely)[2:]] == [count, 6]
    values = struct.unpack("<5f", prompt[1])
    assert math.isnan(values[0])
    assert list(values[1:]) == pytest.approx(expected["prompt_logprobs"][1:])
    ids = struct.unpack("<10i", fields(top[1])[0][1])
    assert list(ids) == [0, 0, *(token for row in expected["topk_prompt_logprobs"][1:] for token, _ in row)]
    assert (top[0], cached) == (3, (4, expected["prompt_cache_hit_tokens"]))
    assert weights[0] == 1000
    assert json.loads(weights[1]) == [each["weight_versions"] for each in expected["sequences"]]


def test_logprobs_of_impossible_prompt_tokens_are_refused(client):
    sampler = client.sampler(base_model="base")
    sparse = {
        "data": [3, 4],
        "shape": [4, 2],
        "sparse_crow_indices": [0, 1, 1, 2, 2],
        "sparse_col_indices": [1, 1],
    }
    for wrong in (
        {"data": [1], "shape": [1, 1]},
        {"data": [-1] * 4, "shape": [4, 1]},
        {**sparse, "data": [3]},
        {**sparse, "shape": [4, -1]},
        {**sparse, "sparse_col_indices": [2**63, 1]},
    ):
        refused = client.asked(sampler, target_prompt_logprobs=wrong)
        assert (refused.status_code, "target_prompt_logprobs" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"record_stability_info": True}, "record_stability_info is not supported"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "must be below 5"),
        ({"prompt": [5] * 600}, "512"),
        ({"prompt": [399, 400]}, "400"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"sampling_session_id": "nobody:0"}, "is not known"),
        ({"topk_prompt_logprobs": 129}, "128"),
    ],
)
def test_what_cannot_be_sampled_is_refused_at_once(client, body, reason):
    refused = client.asked(client.sampler(base_model="base"), **body)
    assert (refused.status_code, reason in refused.json()["error"]["message"]) == (400, True), refused.text


def test_images_and_unknown_models_are_refused(client):
    sampler = client.sampler(base_model="base")
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": image, "sampling_params": {}}
    refused = client.post("asample", **body)
    assert (refused.status_code, "'image'" in refused.text) == (400, True)
    for given, status in (
        ({"base_model": "other"}, 404),
        ({}, 404),
        ({"model_path": "/etc"}, 400),
        ({"model_path": "tinker://nobody"}, 404),
    ):
        found = client.post("create_sampling_session", sampling_session_seq_id=9, **given)
        assert found.status_code == status, found.text


def test_a_sampler_has_one_version_of_an_adapter(engine, client, model, adapters):
    def load(path: Path) -> None:
        engine.ok("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(path)})

    load(adapters[0])
    first = client.sampler(model_path="tinker://policy")
    known = client.post("weights_info", tinker_path="tinker://policy").json()
    assert known == {"base_model": "base", "is_lora": True, "lora_rank": 4}
    found = client.sampled(first)["sequences"][0]
    assert found["logprobs"] == pytest.approx(scored(model, adapters[0], found), abs=1e-4)
    assert found["weight_versions"][0]["adapter"] == "policy"
    load(adapters[1])
    refused = client.asked(first)
    assert refused.status_code == 404
    assert "tinker://policy was adapter_epoch" in refused.json()["error"]["message"]
    second = client.sampler(model_path="tinker://policy")
    found = client.sampled(second)["sequences"][0]
    assert found["logprobs"] == pytest.approx(scored(model, adapters[1], found), abs=1e-4)
    engine.ok("/unload_lora_adapter", {"lora_name": "policy"})
    refused = client.asked(second)
    assert (refused.status_code, "policy" in refused.text) == (404, True)


def test_a_full_queue_is_429_and_a_pause_is_waited_for(engine, client):
    sampler = client.sampler(base_model="base")
    engine.ok("/pause_generation", {"mode": "in_place"})
    try:
        waiting = [client.asked(sampler) for _ in range(3)]
        full = client.asked(sampler, seq_id=77)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["code"] == "queue_full"
    finally:
        engine.ok("/continue_generation", {})
    results = [client.result(each).json()["sequences"][0]["tokens"] for each in waiting]
    assert results == [results[0]] * 3
    later = client.asked(sampler, seq_id=77)  # the same request, which was not taken
    assert client.result(later).json()["sequences"][0]["tokens"] == results[0]
    assert engine.post("/pause?mode=wait").status_code == 200
    assert client.asked(sampler).status_code == 429
    assert engine.post("/resume").status_code == 200


def test_promises_end(engine, client):
    sampler = client.sampler(base_model="base")
    engine.ok("/pause_generation", {"mode": "in_place"})
    try:
        cancelled, ended, aborted = (client.asked(sampler) for _ in range(3))
        assert client.post("cancel_future", request_id=cancelled.json()["request_id"]).status_code == 200
        assert client.result(cancelled).status_code == 410
        assert engine.post("/abort_request", {"rid": aborted.json()["request_id"]}).status_code == 200
        gone = client.result(aborted)
        assert (gone.status_code, "aborted" in gone.json()["error"]) == (410, True)
        engine.ok(f"/api/v1/sessions/{client.session}/finish")
    finally:
        engine.ok("/continue_generation", {})
    assert client.result(ended).status_code == 410
    assert client.post("session_heartbeat").status_code == 410
    assert client.asked(sampler).status_code == 400


def test_sessions_samplers_and_clones(engine, client):
    assert client.post("session_heartbeat").json() == {"type": "session_heartbeat"}
    sampler = client.sampler(base_model="base")
    found = engine.get(f"/api/v1/samplers/{sampler}").json()
    assert found == {"sampler_id": sampler, "base_model": "base", "model_path": None}
    joined = [client.post("join_sampling_session", sampling_session_id=sampler).json() for _ in range(2)]
    assert [each["client_counter"] for each in joined] == [1, 2]
    assert engine.get("/api/v1/healthz").json() == {"status": "ok"}
    assert engine.ok("/api/v1/telemetry", {"events": []}) == {"status": "accepted"}
    (known,) = engine.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert (known["model_name"], known["max_context_length"], known["trainable"]) == ("base", 512, True)


def made(client: Client) -> None:
    promise = client.post("create_model", model_seq_id=0, base_model="base")
    assert client.result(promise).json()["model_id"] == MODEL


def test_weights_that_a_trainer_saves_while_samplers_wait(engine, client, adapters, trainer):
    trainer.folders = [str(each) for each in adapters]
    made(client)
    save = {"model_id": MODEL, "type": "save_weights_for_sampler", "kind": "inflight"}
    newer = {**save, "sampling_session_seq_id": 99}
    saved = client.result(client.post("save_weights_for_sampler", **newer, seq_id=9))
    sampler, fixed = saved.json()["sampling_session_id"], client.sampler(model_path=f"tinker://{MODEL}")
    assert not {"authorization", "x-api-key"} & set(trainer.headers)
    engine.ok("/pause_generation", {"mode": "in_place"})
    asked, follows = client.asked(fixed), client.asked(sampler)
    assert client.result(client.post("save_weights_for_sampler", **newer, seq_id=10)).status_code == 200
    engine.ok("/continue_generation", {})
    assert client.result(follows).json()["sequences"][0]["stop_reason"] == "length"
    refused = client.result(asked).json()  # it went on with the newer weights, which are not its own
    assert (refused["category"], f"tinker://{MODEL} was adapter_epoch" in refused["error"]) == ("user", True)


def test_failures_of_a_trainer_reach_the_client(client, trainer):
    made(client)
    trainer.folders = ["/etc"]
    save = {"model_id": MODEL, "path": "two"}
    outside = client.result(client.post("save_weights_for_sampler", **save, seq_id=11)).json()
    assert (outside["category"], "/etc" in outside["error"]) == ("user", True)
    trainer.saved = {"error": "the disk is full", "category": "server"}
    failed = client.result(client.post("save_weights_for_sampler", **save, seq_id=12)).json()
    assert failed == {"error": "the disk is full", "category": "server"}
    trainer.saved = {"type": "save_weights_for_sampler"}
    failed = client.result(client.post("save_weights_for_sampler", **save, seq_id=13)).json()
    assert "has no path" in failed["error"]
    unknown = client.post("save_weights_for_sampler", model_id="other", seq_id=14)
    assert (unknown.status_code, "was not made here" in unknown.text) == (400, True)


def test_other_training_routes_are_the_trainers(engine, client, trainer):
    assert client.post("optim_step").json() == {"error": "there is no such route"}
    found = engine.get("/api/v1/training_runs?limit=2")
    assert found.json() == {"asked": "/api/v1/training_runs?limit=2"}
    asked = "/api/v1/training_runs/a%2Fb%3Fx%0A"
    assert engine.get(asked).json() == {"asked": asked}
    assert engine.get("/api/v1/x/%2e%2e/secret").status_code == 400
    large = {"data": "x" * 5_000_000}  # the SDK's parts of a batch are as large
    assert client.post("forward_backward", **large).json() == {"error": "there is no such route"}
    assert json.loads(trainer.asked[-1][1])["data"] == large["data"]
    assert engine.ok("/api/v1/retrieve_future", {"request_id": "theirs"}) == {"type": "optim_step"}
    assert engine.post("/api/v1/retrieve_future", {"request_id": "nobody's"}).status_code == 410


def test_a_restarted_engine_has_the_samplers_version(model, adapters):
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--restart")
    with served("--model", str(model), "--dtype", "float32", *options) as engine:
        client = Client(engine)
        engine.ok("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(adapters[0])})
        sampler = client.sampler(model_path="tinker://policy")
        before = client.sampled(sampler)["sequences"][0]
        os.kill(engine.engine_pid, signal.SIGKILL)
        eventually(lambda: client.asked(sampler, seq_id=99).status_code == 200)
        found = client.sampled(sampler)["sequences"][0]
        assert (found["tokens"], found["logprobs"]) == (before["tokens"], before["logprobs"])
        (now,), (then,) = found["weight_versions"], before["weight_versions"]
        assert now["incarnation"] != then["incarnation"]


def test_replicas_have_one_version_and_no_trainer(model, adapters):
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--replicas", "2")
    with served(
        "--model", str(model), "--served-model-name", "base", "--dtype", "float32", *options
    ) as engine:
        client = Client(engine)
        body = {"lora_name": "policy", "lora_path": str(adapters[0])}
        engine.ok("/load_lora_adapter", body)
        sampler = client.sampler(model_path="tinker://policy")
        engines: set[str] = set()
        for key in itertools.takewhile(lambda _: len(engines) < 2, itertools.count()):
            engine.http.headers["x-smg-routing-key"] = str(key)
            found = client.sampled(sampler)["sequences"][0]
            assert found["logprobs"] == pytest.approx(scored(model, adapters[0], found), abs=1e-4)
            engines.add(found["weight_versions"][0]["incarnation"])
        engine.ok("/load_lora_adapter", {**body, "lora_path": str(adapters[1])})
        assert "tinker://policy was adapter_epoch 1" in client.asked(sampler).text
        for path in ("create_model", "save_weights_for_sampler", "forward_backward"):
            refused = engine.post(f"/api/v1/{path}", {})
            assert refused.status_code == 404
            assert f"/api/v1/{path} is not served" in refused.json()["error"]["message"]
        unknown = engine.post("/api/v1/weights_info", {"tinker_path": "tinker://other"})
        assert (unknown.status_code, "no adapter 'other' is loaded" in unknown.text) == (404, True)
        (known,) = engine.get("/api/v1/get_server_capabilities").json()["supported_models"]
        assert known["trainable"] is False
