"""The commands of a real server over a real engine, in the orders that trainers of the field send them."""

import base64
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import save
from support.http_serve import ServedEngine, served
from support.pickles import LocalSerializedTensor, flattened, payload_of, shared_by_file_name
from support.plain_trainer import PlainTrainer, Weights, weights_of
from support.verl_flushes import flush

OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[ServedEngine]:
    root = tiny_model.parents[1]
    options = ("--weights-root", str(root), "--allow-pickled-tensors", "--enable-memory-saver")
    options += ("--profile-dir", str(tmp_path_factory.mktemp("profiles")))
    with served("--model", str(tiny_model), *options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_at_start(server, tiny_model) -> Iterator[None]:
    yield
    server.post("/end_weight_update", {"commit": False, "force": True})
    server.post("/resume_memory_occupation", {})
    server.ok("/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "start"})
    server.ok("/continue_generation")


def checksum(server: ServedEngine) -> str:
    return server.ok("/weights_checker")["per_engine_checksum"]


def version(server: ServedEngine) -> str:
    return server.get("/get_weight_version").json()["weight_version"]


@pytest.fixture(scope="module")
def others_checksum(server, tiny_model, other_model) -> str:
    server.ok("/update_weights_from_disk", {"model_path": str(other_model)})
    found = checksum(server)
    server.ok("/update_weights_from_disk", {"model_path": str(tiny_model)})
    assert checksum(server) != found
    return found


def described(weights: Weights) -> dict[str, list]:
    return {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def halves(weights: Weights) -> list[Weights]:
    items = list(weights.items())
    return [dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])]


@pytest.fixture
def by_file_name() -> Iterator[None]:
    with shared_by_file_name():
        yield


def test_slime_from_disk(server, other_model, others_checksum):
    server.ok("/pause_generation", {})
    assert server.get("/flush_cache").status_code == 200
    body = {"model_path": str(other_model), "weight_version": "7"}
    reply = server.ok("/update_weights_from_disk", body)
    assert (reply["success"], reply["num_paused_requests"]) == (True, 0)
    assert version(server) == "7"
    reply = server.ok("/continue_generation", {})
    assert (reply["status"], reply["message"]) == ("ok", "Generation continued successfully.")
    assert checksum(server) == others_checksum
    spans = server.generate([5])["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["7"]


@pytest.fixture
def trainer() -> Iterator[PlainTrainer]:
    trainer = PlainTrainer(name="slime-pp_0")
    yield trainer
    trainer.close()


def join(server: ServedEngine, trainer: PlainTrainer, **fields: object) -> None:
    trainer.beside(trainer.join)
    body = {
        "master_address": "127.0.0.1",
        "master_port": str(trainer.port),  # AReaL sends text
        "rank_offset": 1,
        "world_size": 2,
        "group_name": trainer.name,
        "backend": "gloo",
        **fields,
    }
    reply = server.ok("/init_weights_update_group", body)
    assert reply["message"] == "Succeeded to initialize custom process group."
    trainer.finish()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_slime_distributed(server, trainer, other_model, others_checksum, load_format):
    assert server.post("/destroy_weights_update_group", {"group_name": trainer.name}).status_code == 400
    join(server, trainer)
    server.ok("/pause_generation", {})
    assert server.get("/flush_cache").status_code == 200
    messages = []
    for bucket in halves(weights_of(other_model)):
        send: Callable[[Weights], None] = trainer.broadcast_flat if load_format else trainer.broadcast_each
        trainer.beside(lambda send=send, bucket=bucket: send(bucket))
        options = {"group_name": trainer.name, "flush_cache": False, "weight_version": "8"}
        body = {**described(bucket), **options, "load_format": load_format}
        reply = server.ok("/update_weights_from_distributed", body)
        assert reply["success"]
        messages.append(reply["message"])
        trainer.finish()
    first, last = messages
    assert first.startswith("Written, not committed yet: session ")
    assert "/continue_generation" in first
    assert last == "Succeeded to update parameter online. Weight version updated to 8."
    server.ok("/continue_generation", {})
    assert (version(server), checksum(server)) == ("8", others_checksum)
    server.ok("/destroy_weights_update_group", {"group_name": trainer.name})


def test_areal_distributed(server, trainer, other_model, others_checksum):
    join(server, trainer, pp_rank=0)
    found: list = []
    server.ok("/pause_generation", {"mode": "in_place"})
    waiting = threading.Thread(target=lambda: found.append(server.generate([5], return_logprob=True)))
    waiting.start()
    server.ok("/pause_generation", {})
    for bucket in halves(weights_of(other_model)):
        trainer.beside(lambda bucket=bucket: trainer.broadcast_each(bucket))
        body = {**described(bucket), "group_name": trainer.name, "abort_all_requests": True}
        server.ok("/update_weights_from_distributed", body)
        trainer.finish()
    label = version(server)
    server.ok("/continue_generation", {})
    waiting.join()
    assert checksum(server) == others_checksum
    assert version(server) == label == "start"
    server.ok("/destroy_weights_update_group", {"group_name": trainer.name})
    (answer,) = found  # aborted, or generated after continue if it came that late
    assert answer["meta_info"]["output_token_logprobs_length"] == len(answer["output_ids"])


def test_slime_colocated(server, other_model, others_checksum, by_file_name):
    assert server.get("/flush_cache").status_code == 200
    assert server.ok("/release_memory_occupation", {}) is None
    assert server.ok("/release_memory_occupation", {}) is None
    assert server.ok("/resume_memory_occupation", {"tags": ["weights"]}) is None
    server.ok("/pause_generation", {})
    assert server.get("/flush_cache").status_code == 200
    for bucket in halves(weights_of(other_model)):
        body = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": "9"}
        payload = flattened(bucket)
        server.ok("/update_weights_from_tensor", {"serialized_named_tensors": [payload_of(payload)], **body})
    padding = {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
    reply = server.ok(
        "/update_weights_from_tensor", {"serialized_named_tensors": [payload_of(padding)], **body}
    )
    assert (reply["success"], reply["message"]) == (True, "The call has no tensors: nothing was written.")
    server.ok("/continue_generation", {})
    assert server.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}) is None
    assert server.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}) is None
    assert (version(server), checksum(server)) == ("9", others_checksum)
    assert len(server.generate([5])["output_ids"]) == 8


def test_verl(server, other_model, others_checksum, by_file_name):
    assert server.ok("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}) is None
    assert server.ok("/resume_memory_occupation", {"tags": ["weights"]}) is None
    for bucket in halves(weights_of(other_model)):
        keep = list(bucket.items())
        wrapped = [(name, LocalSerializedTensor([base64.b64decode(payload_of(each))])) for name, each in keep]
        body = {"serialized_named_tensors": [payload_of(wrapped)], "load_format": None, "flush_cache": True}
        server.ok("/update_weights_from_tensor", body)
    assert server.get("/flush_cache").status_code == 200
    assert server.ok("/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert checksum(server) == others_checksum
    assert len(server.generate([5])["output_ids"]) == 8


def test_flushes_of_verl(server, tiny_model, by_file_name):
    before, weights = checksum(server), weights_of(tiny_model)
    loader = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    places = [7, 3]
    old = {name: weights[name].view(-1)[places].tolist() for name in names}

    def send(values: dict[str, list[float]]) -> None:
        server.ok("/pause_generation", {"mode": "in_place"})
        for name in names:  # a flush for each
            named = flush(
                [(name, list(weights[name].shape), places, values[name])], dtype=weights[name].dtype
            )
            wrapped = [
                (key, LocalSerializedTensor([base64.b64decode(payload_of(each))])) for key, each in named
            ]
            body = {
                "serialized_named_tensors": [payload_of(wrapped)],
                "load_format": loader,
                "flush_cache": False,
            }
            server.ok("/update_weights_from_tensor", body)
        assert server.get("/flush_cache").status_code == 200
        server.ok("/continue_generation", {})

    send({name: [3.0, -3.0] for name in names})
    assert checksum(server) != before
    send(old)
    assert checksum(server) == before


def test_a_safetensors_body(server, other_model, others_checksum):
    content = (other_model / "model.safetensors").read_bytes()
    query = "weight_version=10&flush_cache=true&torch_empty_cache=1"
    response = server.http.post(f"/update_weights_from_tensor?{query}", content=content, headers=OCTETS)
    assert response.json()["message"].endswith("Weight version updated to 10.")
    assert (version(server), checksum(server)) == ("10", others_checksum)
    for broken in (b"", content[:100], content[:-8], b"\xff" * 64):
        response = server.http.post("/update_weights_from_tensor", content=broken, headers=OCTETS)
        assert (response.status_code, response.json()["success"]) == (400, False)
    wrong = save({"no.such.weight": torch.zeros(2)})
    headers = {"content-type": "application/x-safetensors"}
    assert server.http.post("/update_weights_from_tensor", content=wrong, headers=headers).status_code == 400
    assert checksum(server) == others_checksum


def test_a_session_commits_at_its_end(server, other_model, others_checksum):
    before = checksum(server)
    assert server.post("/end_weight_update", {}).status_code == 400
    opened = server.ok("/begin_weight_update", {"selector": "all"})
    assert opened["message"] == "Success"
    assert server.post("/begin_weight_update", {}).status_code == 400
    assert server.post("/continue_generation", {}).status_code == 200  # it runs: nothing to do
    headers = {**OCTETS, "X-Caesura-Session": opened["session_id"]}
    for bucket in halves(weights_of(other_model)):
        content = save(bucket)
        path = "/update_weights_from_tensor?weight_version=s"
        assert server.http.post(path, content=content, headers=OCTETS).json()["code"] == "session_open"
        reply = server.http.post(path, content=content, headers=headers).json()
        assert (reply["success"], reply["committed"], version(server)) == (True, False, "start")
        assert reply["session_id"] == opened["session_id"]
        assert "/end_weight_update" in reply["message"]
        assert "updated" not in reply["message"]
    assert server.post("/end_weight_update", {}).json()["code"] == "session_open"
    assert server.ok("/end_weight_update", {"session_id": opened["session_id"]})["committed"] is True
    assert server.http.post(path, content=content, headers=headers).json()["code"] == "no_session"
    assert (version(server), checksum(server)) == ("s", others_checksum)
    assert others_checksum != before


def test_the_end_of_an_aborted_session_claims_no_success(server, other_model, others_checksum):
    opened = server.ok("/begin_weight_update", {})
    headers = {**OCTETS, "X-Caesura-Session": opened["session_id"]}
    content = save(weights_of(other_model))
    assert server.http.post("/update_weights_from_tensor", content=content, headers=headers).is_success
    reply = server.ok("/end_weight_update", {"session_id": opened["session_id"], "commit": False})
    assert reply["committed"] is False
    assert reply["message"] == "Aborted, nothing is committed: the weights are poisoned."
    server.ok("/update_weights_from_disk", {"model_path": str(other_model)})
    assert checksum(server) == others_checksum


def test_in_place_with_a_flush_changes_no_weights(server, other_model):
    before = checksum(server)
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": [5], "stream": True, "sampling_params": sampling}
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        reply = server.ok("/pause_generation", {"mode": "in_place"})
        assert reply["held_requests"] == 1
        refused = server.post("/update_weights_from_disk", {"model_path": str(other_model)})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert checksum(server) == before
        flush = server.get("/flush_cache")
        assert (flush.status_code, flush.text[:19]) == (400, "Flush cache failed.")
        assert flush.headers["content-type"].startswith("text/plain")
        late = server.get("/flush_cache?timeout=0.05")
        assert late.text.startswith("Timed out waiting for idle state.")
        options = {"model_path": str(other_model), "flush_cache": False, "weight_version": "mid"}
        server.ok("/update_weights_from_disk", options)
        assert server.post("/pause_generation", {"mode": "abort"}).json()["aborted_requests"] == 1
    assert server.get("/flush_cache").status_code == 200


def test_health_answers_in_every_state_and_costs_no_tokens(server, tiny_model):
    def statuses() -> list[int]:
        return [server.get(path).status_code for path in ("/health", "/health_generate", "/ping", "/ready")]

    def tokens() -> int:
        return server.get("/server_info").json()["internal_states"][0]["generated_tokens"]

    before = tokens()
    assert statuses() == [200, 200, 200, 200]
    server.ok("/pause_generation", {})
    assert statuses() == [200, 200, 200, 503]
    server.ok("/release_memory_occupation", {})
    assert statuses() == [200, 200, 200, 503]
    server.ok("/resume_memory_occupation", {})
    assert server.post("/generate", {"input_ids": [5]}).status_code == 503  # weights came back without values
    server.ok("/update_weights_from_disk", {"model_path": str(tiny_model)})
    server.ok("/continue_generation")
    assert statuses() == [200, 200, 200, 200]
    assert tokens() == before


def test_checker(server, other_model):
    answer = server.ok("/weights_checker", None)
    assert len(answer["ranks"][0]["checksums"]) > 5
    server.ok("/weights_checker", {"action": "snapshot"})
    assert server.ok("/weights_checker", {"action": "compare"})["success"] is True
    server.ok("/update_weights_from_disk", {"model_path": str(other_model)})
    response = server.post("/weights_checker", {"action": "compare"})
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert response.json()["changed"]


def test_bodies_are_read_as_sglang_does(server):
    assert server.http.post("/pause_generation").status_code == 200
    assert server.post("/continue_generation", {"torch_empty_cache": None}).status_code == 200
    assert server.post("/pause_generation", {"mode": None}).json()["mode"] == "abort"
    for body in ({"mode": "keep"}, {"mode": 3}, {"mod": "in_place"}, [], "x", 3):
        response = server.post("/pause_generation", body)
        assert response.status_code == 400
        assert set(response.json()) == {"object", "message", "type", "param", "code"}
    assert server.get("/v1/loads?include=all,core").status_code == 200
    assert server.get("/v1/loads?include=everything").status_code == 400
    assert server.get("/flush_cache?timeout=-1").status_code == 400
    assert server.ok("/post_process_weights", {"restore_weights_before_load": True})["success"] is True
    assert server.post("/begin_weight_update", {"selector": "draft"}).status_code == 400


def test_tensors_that_cannot_be_read_are_refused_by_name(server, tiny_model):
    weights = list(weights_of(tiny_model).items())[:1]
    before = checksum(server)
    name = weights[0][0]
    for value, message in (
        (weights, "rebuild_storage_fd"),
        ([(name, 3)], "is not a tensor"),
        ({"flattened_tensor": weights[0][1]}, "named tensors must be a list"),
        ([(name, LocalSerializedTensor([b"", b""]))], "one rank"),
        (print, "named tensors must be a list"),
    ):
        response = server.post(
            "/update_weights_from_tensor", {"serialized_named_tensors": [payload_of(value)]}
        )
        assert response.status_code == 400, response.text
        assert message in response.json()["message"]
    for payloads in ([], ["", ""], ["!!"], ["AAAA"]):
        body = {"serialized_named_tensors": payloads}
        assert server.post("/update_weights_from_tensor", body).status_code == 400
    assert checksum(server) == before


def test_a_trace_of_steps_as_sglangs_clients_ask_for_it(server):
    activities = {"activities": ["CPU", "GPU"], "profile_by_stage": False}
    assert server.post("/stop_profile").status_code == 400
    refused = server.post("/start_profile", {"output_dir": "/etc"})
    assert (refused.status_code, "--profile-dir" in refused.json()["message"]) == (400, True)
    assert "merge_profiles" in server.post("/start_profile", {"merge_profiles": True}).json()["message"]
    started = server.ok("/start_profile", {"output_dir": "today", "num_steps": "3", **activities})
    assert server.post("/start_profile").json()["code"] == "busy"
    server.generate([5, 6, 7])
    ended = server.ok("/stop_profile", {"num_steps": "3"})
    assert (ended["path"], ended["steps"], started["success"]) == (started["path"], 3, True)
    path = Path(ended["path"])
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert (path.parent.name, path.parents[1].name.startswith("profiles")) == ("today", True)


def test_two_trainers_behind_one_server_do_not_mix(server, other_model, others_checksum):
    path = "/update_weights_from_tensor?flush_cache=false&weight_version="
    first, second = (save(bucket) for bucket in halves(weights_of(other_model)))
    server.ok("/pause_generation", {"mode": "abort"})
    reply = server.http.post(f"{path}A", content=first, headers=OCTETS).json()
    assert (reply["success"], reply["committed"]) == (True, False)
    refused = server.http.post(f"{path}B", content=second, headers=OCTETS)
    assert (refused.status_code, refused.json()["code"]) == (400, "session_open")
    disk = server.post("/update_weights_from_disk", {"model_path": str(other_model)})
    assert disk.json()["code"] == "session_open"
    stale = {**OCTETS, "X-Caesura-Session": "another"}
    assert server.http.post(f"{path}A", content=second, headers=stale).json()["code"] == "no_session"
    both = server.http.post(f"{path}A&session_id=x", content=second, headers=stale)
    assert both.status_code == 400
    mine = {**OCTETS, "X-Caesura-Session": reply["session_id"]}
    assert server.http.post(f"{path}A", content=second, headers=mine).json()["committed"] is True
    assert (version(server), checksum(server)) == ("A", others_checksum)
    server.ok("/continue_generation", {})


def test_a_label_changes_no_weights(server):
    label, before = {"new_version": "mine"}, (server.get("/weight_version").json(), checksum(server))
    stale = server.post("/update_weight_version", label, headers={"X-Caesura-Session": "another"})
    assert (stale.status_code, stale.json()["code"]) == (400, "no_session")
    opened = server.ok("/begin_weight_update", {})["session_id"]
    refused = server.post("/update_weight_version", {**label, "session_id": opened})
    assert (refused.status_code, refused.json()["code"]) == (400, "session_open")
    server.ok("/end_weight_update", {"commit": False, "session_id": opened})
    assert server.post("/update_weight_version", {}).status_code == 400
    assert (server.get("/weight_version").json(), checksum(server)) == before
    reply = server.ok("/update_weight_version", label)
    assert (reply["success"], reply["new_version"], version(server)) == (True, "mine", "mine")
    info = server.get("/get_model_info").json()
    assert (info["weight_version"], info["model_type"], info["is_generation"]) == ("mine", "qwen3", True)
    assert checksum(server) == before[1]


def test_a_successor_ends_a_dead_trainers_session(server):
    server.ok("/begin_weight_update", {})
    assert server.post("/begin_weight_update", {}).json()["code"] == "session_open"
    assert server.post("/end_weight_update", {"force": True}).json()["code"] == "invalid_request"
    assert server.ok("/end_weight_update", {"commit": False, "force": True})["committed"] is False
    opened = server.ok("/begin_weight_update", {})
    server.ok("/end_weight_update", {"commit": False, "session_id": opened["session_id"]})


def test_a_trainers_logprobs_are_compared(server):
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    found = server.ok("/generate", {**asked, "return_logprob": True})
    pairs = found["meta_info"]["output_token_logprobs"]
    sample = {
        "token_ids": [5, 6, 7, *found["output_ids"]],
        "prompt_len": 3,
        "logprobs": [pair[0] for pair in pairs],
        "rid": "mine",
    }
    report = server.ok("/rollout/drift", {"samples": [sample]})
    assert (report["tokens"], report["samples"], report["state"]) == (6, 1, "ok")
    assert report["max_abs"] < 1e-4
    moved = {**sample, "logprobs": [each - 1.0 for each in sample["logprobs"]]}
    report = server.ok("/rollout/drift", {"samples": [moved]})
    assert report["mean_abs"] == pytest.approx(1.0, abs=1e-4)
    assert (report["worst"][0]["rid"], report["clip_share"]) == ("mine", 1.0)
    huge = server.post("/rollout/drift", {"samples": [{**sample, "prompt_len": 10**20}]})
    assert (huge.status_code, "prompt_len" in huge.text) == (400, True)
    refused = server.get("/rollout/drift")
    assert (refused.status_code, "enable_drift_check" in refused.text) == (400, True)
    assert server.post("/rollout/drift", {"samples": []}).status_code == 400
