"""vLLM's weight transfer over a real socket: every transport, whole updates or none, repeated calls."""

import itertools
import re
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.engine_template import run
from support.http_serve import ServedEngine, WeightSyncClient, served
from support.plain_trainer import free_port

from caesura.client import GroupError
from caesura.client.trainer import WeightDelta
from caesura.integrations.vllm import TrainerEngine, TrainerInitInfo


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", seed=seed, tied=True, vocab_size=400, max_position_embeddings=512)
    return paths


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    options = ("--tokenizer", "none", "--enable-memory-saver", "--vllm-metrics")
    with served("--model", str(models[0]), *options) as engine:
        yield engine


def tensors_of(model: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(model / "model.safetensors").items())


def trainer(
    engine: ServedEngine, models: list[Path], transport: str, source: Any, **options: Any
) -> TrainerEngine:
    info = TrainerInitInfo(
        transport, rank=0, folder=str(models[0].parent), config=str(models[1] / "config.json"), **options
    )
    return TrainerEngine.trainer_init(info, client=WeightSyncClient(engine), source=source)


def send(engine: ServedEngine, models: list[Path], transport: str, label: str, **options: Any) -> None:
    """Send the first model whole, as the next trainer does."""
    sender = trainer(engine, models, transport, tensors_of(models[0]), **options)
    sender.send_weights(label)
    sender.shutdown()
    assert served_label(engine) == label


def served_label(engine: ServedEngine) -> str:
    (label,) = engine.get("/weight_info").json().values()
    return label


def tokens(engine: ServedEngine) -> list[int]:
    return engine.generate([5, 6, 7], sampling_params={"max_new_tokens": 12})["output_ids"]


ROADS = [("gloo", 20_000), ("gloo", 1 << 30), ("shared_memory", 20_000), ("disk", 1 << 30)]
"""Transports and bytes of a bucket: many messages, or one."""
every_transport = pytest.mark.parametrize(("transport", "bucket_bytes"), ROADS)


@every_transport
def test_an_update_by_every_transport(engine, models, transport, bucket_bytes):
    expected = []
    for model in models:
        engine.ok("/update_weights_from_disk", {"model_path": str(model)})
        expected.append(tokens(engine))
    assert expected[0] != expected[1]
    sender = trainer(engine, models, transport, tensors_of(models[0]), bucket_bytes=bucket_bytes)
    try:
        engine.ok("/pause", params={"mode": "keep"})
        sender.send_weights("step-7")
        engine.ok("/resume")
    finally:
        sender.shutdown()
    assert tokens(engine) == expected[0]
    assert served_label(engine) == "step-7"


@every_transport
def test_a_delta_by_every_transport(engine, models, transport, bucket_bytes):
    old = dict(tensors_of(models[0]))
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in list(new.values())[1:]:
        tensor.view(-1)[5::31] += 0.5
    new["model.norm.weight"] *= 3
    sender = trainer(engine, models, transport, new.items(), bucket_bytes=bucket_bytes)
    try:
        sender.send_weights("whole")
        expected = engine.ok("/weights_checker")["per_engine_checksum"]
        engine.ok("/update_weights_from_disk", {"model_path": str(models[0])})
        delta = WeightDelta.between(old, new)
        sender.send_delta(delta, "step-8")
        assert engine.ok("/weights_checker")["per_engine_checksum"] == expected
        assert served_label(engine) == "step-8"
        with pytest.raises((httpx.HTTPStatusError, GroupError)):  # its base is gone
            sender.send_delta(delta)
    finally:
        sender.shutdown()
    assert engine.ok("/weights_checker")["per_engine_checksum"] == expected


def test_sparse_names_of_other_backends_are_refused(engine):
    sparse = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[2]], "num_updates_list": [1]}
    reply = engine.post("/init_weight_transfer_engine", {"init_info": {"backend": "sparse_nccl"}})
    assert reply.status_code == 400 and "sparse_nccl needs an engine on a GPU" in reply.text
    engine.ok("/init_weight_transfer_engine", {"init_info": {"backend": "shared_memory"}})
    engine.ok("/start_weight_update", {})
    reply = engine.post("/update_weights", {"update_info": sparse})
    assert reply.status_code == 400 and "names is not known" in reply.text
    engine.ok("/shutdown_weight_transfer_engine")


def refusal(engine: ServedEngine, path: str, body: Any = None) -> tuple[int, str]:
    response = engine.post(path, body)
    return response.status_code, response.json()["error"]["code"]


def test_a_failure_at_any_tensor_serves_nothing_half_new(engine, models):
    """Whatever came before the tensor of a wrong shape is never sampled from."""
    tensors = tensors_of(models[1])
    for bad in (0, 1, len(tensors) - 1):
        send(engine, models, "shared_memory", "whole")
        before = tokens(engine)
        broken = [
            (name, torch.zeros(3) if position == bad else tensor)
            for position, (name, tensor) in enumerate(tensors)
        ]
        sender = trainer(engine, models, "shared_memory", broken, bucket_bytes=1)
        with pytest.raises(httpx.HTTPStatusError):
            sender.send_weights("broken")
        status, code = refusal(engine, "/finish_weight_update")
        assert (status, code) == (400, "weight_mismatch")
        weights = engine.get("/server_info").json()["internal_states"][0]["weights"]
        response = engine.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0})
        if bad == 0:  # nothing had been written
            assert (weights, tokens(engine)) == ("valid", before)
        else:
            assert (weights, response.status_code) == ("poisoned", 503)
        sender.shutdown()
    send(engine, models, "shared_memory", "whole")
    assert tokens(engine) == before


@pytest.mark.parametrize("position", [0, 1, -1], ids=["first", "second", "last"])
def test_a_trainer_that_dies_in_a_broadcast(engine, models, position):
    """The next trainer sends everything again; meanwhile nothing that is half new is sampled from."""
    tensors = tensors_of(models[1])
    last = position % len(tensors)
    port = free_port()
    sender = trainer(engine, models, "gloo", tensors, bucket_bytes=1, master_port=port)
    calls = itertools.count()

    def die(update_info: dict[str, Any]) -> dict[str, Any]:
        if next(calls) == last:
            sender.shutdown()
        return update_info

    sender._client.tamper = die
    with pytest.raises((httpx.HTTPStatusError, GroupError)):
        sender.send_weights("broken")
    assert refusal(engine, "/finish_weight_update")[0] == 400
    weights = engine.get("/server_info").json()["internal_states"][0]["weights"]
    assert weights == ("valid" if last == 0 else "poisoned")
    send(engine, models, "gloo", "whole", master_port=port, timeout_s=20)
    assert len(tokens(engine)) == 12


def test_a_repeated_call_does_nothing_again(engine, models):
    sender = trainer(engine, models, "shared_memory", tensors_of(models[1]))
    sent = []

    def remember(update_info: dict[str, Any]) -> dict[str, Any]:
        sent.append(update_info)
        return update_info

    sender._client.tamper = remember
    sender.send_weights("before")
    epoch = engine.get("/weight_version").json()["weights_epoch"]
    for _ in range(3):
        engine.ok("/init_weight_transfer_engine", {"init_info": {"backend": "shared_memory"}})
    for _ in range(3):
        engine.ok("/start_weight_update")
    for _ in range(3):
        assert engine.ok("/update_weights", {"update_info": sent[0]}) == {"message": "Weights updated"}
    for _ in range(3):
        engine.ok("/finish_weight_update", {"weight_version": "once"})
    assert engine.get("/weight_version").json() == {"weight_version": "once", "weights_epoch": epoch + 1}
    sender.shutdown()


def test_another_trainer_waits_until_an_update_has_ended(engine, models):
    send(engine, models, "shared_memory", "first")

    def interrupted(update_info: dict[str, Any]) -> dict[str, Any]:
        engine.ok("/update_weights", {"update_info": update_info})
        other = {"init_info": {"backend": "disk"}}
        assert refusal(engine, "/init_weight_transfer_engine", other) == (409, "session_open")
        assert refusal(engine, "/start_weight_update") == (409, "session_open")
        assert refusal(engine, "/update_weights", {"weight_dir": str(models[1])}) == (409, "session_open")
        return update_info

    second = trainer(engine, models, "shared_memory", tensors_of(models[1]))
    second._client.tamper = interrupted
    second.send_weights("second")
    assert served_label(engine) == "second"
    second.shutdown()


def killed_between_two_calls(engine: ServedEngine, models: list[Path], port: int) -> None:
    """Run a trainer in a process that ends after the first of its calls of an update."""
    code = (
        "import os, sys, httpx, torch\n"
        "from support.http_serve import WeightSyncClient\n"
        "from types import SimpleNamespace\n"
        "from caesura.integrations.vllm import TrainerEngine, TrainerInitInfo\n"
        "from safetensors.torch import load_file\n"
        "client = WeightSyncClient(SimpleNamespace(http=httpx.Client(base_url=sys.argv[1], timeout=None)))\n"
        "def die(info, calls=[]):\n"
        "    calls.append(info)\n"
        "    return info if len(calls) < 3 else os._exit(9)\n"
        "client.tamper = die\n"
        "info = TrainerInitInfo('gloo', rank=0, bucket_bytes=1, master_port=int(sys.argv[3]))\n"
        "source = list(load_file(sys.argv[2]).items())\n"
        "TrainerEngine.trainer_init(info, client=client, source=source).send_weights()\n"
    )
    weights = str(models[1] / "model.safetensors")
    done = run(code, engine.url, weights, str(port), cwd=Path(__file__).parents[2])
    assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("same", [True, False], ids=["same port", "another port"])
def test_a_trainer_takes_over_from_one_that_was_killed(engine, models, same):
    """The closed connection of its store says that it is gone, long before five minutes without a call."""
    port = free_port()
    killed_between_two_calls(engine, models, port)
    assert refusal(engine, "/start_weight_update") == (409, "session_open")
    send(engine, models, "gloo", "taken over", master_port=port if same else 0, timeout_s=20)


def test_a_trainer_is_back_at_once_on_the_same_port(engine, models):
    port = free_port()
    for number in range(2):
        send(engine, models, "gloo", f"number {number}", master_port=port, timeout_s=20)


def test_a_live_trainer_is_not_replaced(engine, models):
    """Neither between two calls nor during one, and the refusal says for how long and what ends it."""
    sender = trainer(engine, models, "gloo", tensors_of(models[0]), bucket_bytes=1)
    calls = itertools.count()

    def interrupted(update_info: dict[str, Any]) -> dict[str, Any]:
        if next(calls) == 1:
            other = engine.post("/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
            assert (other.status_code, other.json()["error"]["code"]) == (409, "session_open")
            assert re.search(
                r"gone, or [23]\d\d s .* /shutdown_weight_transfer_engine", other.json()["error"]["message"]
            )
        return update_info

    sender._client.tamper = interrupted
    sender.send_weights("kept")
    sender.shutdown()
    assert served_label(engine) == "kept"


def test_a_finish_that_lacks_tensors_ends_the_update(engine, models):
    engine.ok("/weight_checker", {"action": "reset"})
    sender = trainer(engine, models, "shared_memory", tensors_of(models[1])[:3])
    with pytest.raises(httpx.HTTPStatusError, match="finish_weight_update"):
        sender.send_weights()
    sender.shutdown()
    assert refusal(engine, "/finish_weight_update") == (400, "weight_mismatch")
    send(engine, models, "shared_memory", "whole")
    assert len(tokens(engine)) == 12


def test_a_shutdown_ends_a_broadcast_that_never_comes(engine, models):
    sender = trainer(engine, models, "gloo", tensors_of(models[1]))
    engine.ok("/start_weight_update")
    part = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[40]]}
    with ThreadPoolExecutor() as threads:
        call = threads.submit(engine.post, "/update_weights", {"update_info": part})
        while engine.get("/server_info").json()["internal_states"][0]["update"] is None:
            pass
        other = {"init_info": {"backend": "disk"}}
        assert refusal(engine, "/init_weight_transfer_engine", other) == (409, "session_open")
        assert refusal(engine, "/finish_weight_update") == (409, "session_open")
        engine.ok("/shutdown_weight_transfer_engine")
        assert call.result().status_code == 400
    sender.shutdown()
    send(engine, models, "gloo", "whole")


def test_calls_that_name_their_session_are_of_no_other(engine, models):
    sender = trainer(engine, models, "disk", tensors_of(models[1]))
    gone = engine.ok("/start_weight_update")["session_id"]
    assert engine.ok("/start_weight_update")["session_id"] == gone
    engine.ok("/shutdown_weight_transfer_engine")
    engine.ok("/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
    own = engine.ok("/start_weight_update")["session_id"]
    update = {"update_info": {"path": str(models[1])}}
    for named in ({"session_id": gone}, {"session_id": "x"}):
        assert refusal(engine, "/update_weights", {**update, **named}) == (400, "no_session")
        assert refusal(engine, "/finish_weight_update", named) == (400, "no_session")
    engine.ok("/update_weights", update, headers={"x-caesura-session": own})
    engine.ok("/finish_weight_update", {"session_id": own, "weight_version": "named"})
    assert served_label(engine) == "named"
    sender.shutdown()


def test_an_update_can_be_given_up(engine, models):
    before = tokens(engine)
    sender = trainer(engine, models, "disk", tensors_of(models[1]))
    engine.ok("/start_weight_update")
    engine.ok("/shutdown_weight_transfer_engine")
    assert refusal(engine, "/finish_weight_update") == (400, "no_session")
    assert refusal(engine, "/update_weights", {"update_info": {}}) == (400, "invalid_request")
    assert tokens(engine) == before
    sender.shutdown()


GLOO = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
ID, ID_FIELD = b64encode(bytes(128)).decode(), "nccl_unique_id_b64"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/init_weight_transfer_engine", {"init_info": {**GLOO, "master_port": 2**64}}, "master_port"),
        ("/init_weight_transfer_engine", {"init_info": {**GLOO, "world_size": 2**70}}, "world_size"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_tokens": 2**64}},
            "max_tokens",
        ),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "gloo"}}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "backend"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"nccl_unique_id_b64": ID, "world_size": 2}},
            "backend",
        ),
        ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": ID[:-4]}}, ID_FIELD),
        ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": f"-{ID[1:]}"}}, ID_FIELD),
        (
            "/init_weight_transfer_engine",
            {"init_info": {**GLOO, "backend": "nccl", "nccl_unique_id_b64": ID}},
            ID_FIELD,
        ),
        ("/init_weight_transfer_engine", {"init_info": {**GLOO, "nccl_unique_id_b64": ID}}, ID_FIELD),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "sparse_nccl"}}, "backend"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "mooncake"}}, "init_info.backend"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "ipc"}}, "backend"),
        ("/collective_rpc", {"method": "exec"}, "method"),
        ("/collective_rpc", {"method": "update_weights_nccl"}, "args"),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": [3]}, "args"),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "args": [True, 1]}, "args"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/update_weights", {}, "weight_dir"),
        ("/update_weights", {"update_infos": {}}, "update_infos"),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": []}}, "init_info.master_port"),
        ("/pause", {"mode": "drain"}, "mode"),
        ("/sleep", {"level": 3}, "level"),
        ("/wake_up", {"tags": ["cuda"]}, "tags[0]"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids[0]"),
        ("/weight_checker", {}, "action"),
    ],
)
def test_a_wrong_body_is_refused_by_name(engine, path, body, field):
    response = engine.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"]


NOBODYS = {"type": "SharedMemoryHandle", "pid": 2**62, "fd": 0, "inode": 0, "nbytes": 1}


WRONG: list[Any] = [
    {"names": ["a"], "dtype_names": [], "shapes": []},
    {"names": ["a"], "dtype_names": ["complex64"], "shapes": [[1]], "packed": True},
    {"names": "a", "dtype_names": ["float32"], "shapes": [[1]]},
    {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]},
    {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2**63, 2**63]], "packed": True},
    {"names": [], "dtype_names": [], "shapes": []},
    {"handle": NOBODYS, "specs": [{"name": "a", "dtype": "F32", "shape": [2**64]}]},
    {"handle": NOBODYS, "specs": []},
    {"path": "/etc"},
    {"path": "\\0"},
    [],
    [{}, {"path": "a"}],
]


@pytest.mark.parametrize("backend", ["gloo", "shared_memory", "disk"])
def test_a_wrong_update_is_a_refusal(engine, models, backend):
    sender = trainer(engine, models, backend, tensors_of(models[0]))
    for info in WRONG:
        engine.ok("/start_weight_update")
        response = engine.post("/update_weights", {"update_info": info})
        assert response.status_code == 400, (info, response.text)
    engine.ok("/shutdown_weight_transfer_engine")
    sender.shutdown()
    assert engine.get("/server_info").json()["internal_states"][0]["weights"] == "valid"


def test_methods_that_are_called_by_name(engine, models):
    send(engine, models, "shared_memory", "first")
    expected = tokens(engine)
    assert engine.ok("/collective_rpc", {"method": "update_weights_from_path", "args": [str(models[1])]}) == {
        "results": [None]
    }
    assert tokens(engine) != expected
    sender = trainer(engine, models, "shared_memory", tensors_of(models[0]))

    def by_name(method: str, **kwargs: Any) -> None:
        engine.ok("/collective_rpc", {"method": method, "kwargs": kwargs})

    sender._client.start_weight_update = lambda: by_name(
        "skyrl_start_weight_update", is_checkpoint_format=True
    )
    sender._client.update_weights = lambda info: by_name("update_weights_ipc", update_info=info)
    sender._client.finish_weight_update = lambda: by_name("skyrl_finish_weight_update")
    sender.send_weights()
    sender.shutdown()
    assert tokens(engine) == expected


def test_sleep_and_wake_by_tags(engine, models):
    assert engine.get("/is_sleeping").json() == {"is_sleeping": False}
    assert refusal(engine, "/sleep") == (400, "unsupported")  # level 1 without a copy of the weights
    assert engine.ok("/sleep", params={"level": 2}) == {"status": "sleeping", "level": 2}
    assert engine.get("/is_sleeping").json() == {"is_sleeping": True}
    assert refusal(engine, "/resume") == (400, "memory_released")
    sender = trainer(engine, models, "shared_memory", tensors_of(models[1]))
    with pytest.raises(httpx.HTTPStatusError):  # the weights' memory is released
        sender.send_weights()
    assert engine.ok("/wake_up", params={"tags": "weights"}) == {"status": "sleeping", "tags": ["weights"]}
    assert engine.get("/is_paused").json() == {"is_paused": True}
    sender.send_weights("awake")
    answer = engine.ok("/wake_up", params={"tags": ["kv_cache", "scheduling"]})
    assert answer == {"status": "awake", "tags": ["kv_cache", "scheduling"]}
    assert engine.get("/is_sleeping").json() == {"is_sleeping": False}
    assert len(tokens(engine)) == 12
    assert engine.ok("/sleep", params={"level": 0, "mode": "keep"}) == {"status": "sleeping", "level": 0}
    assert engine.ok("/wake_up") == {"status": "awake", "tags": None}
    sender.shutdown()


def test_caches_and_checks(engine):
    tokens(engine)
    assert engine.ok("/reset_prefix_cache") == {"success": True}
    assert refusal(engine, "/release_kv_cache_memory") == (400, "not_idle")
    engine.ok("/pause", params={"mode": "keep"})
    assert engine.ok("/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert engine.ok("/wake_up")["status"] == "awake"
    checksums = engine.ok("/weight_checker", {"action": "checksum"})["checksums"]
    same = engine.ok("/weight_checker", {"action": "compare", "baseline": checksums})
    assert same == {"match": True, "mismatches": []}
    name = next(iter(checksums))
    other = engine.ok("/weight_checker", {"action": "compare", "baseline": {**checksums, name: "0"}})
    assert other == {"match": False, "mismatches": [name]}
    assert engine.get("/get_world_size").json() == {"world_size": 1}
    config = engine.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"}
    assert config["model_config"]["dtype"] == "torch.float32"


def test_a_reset_poisons(engine, models):
    assert engine.ok("/weight_checker", {"action": "reset"}) == {"status": "reset"}
    response = engine.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "weights_poisoned")
    send(engine, models, "shared_memory", "whole")
    assert len(tokens(engine)) == 12


def test_requests_are_aborted_by_their_names(engine):
    engine.ok("/pause", params={"mode": "keep"})
    bodies = [
        {"request_id": f"r{i}", "token_ids": [5, 6], "sampling_params": {"max_tokens": 9}} for i in range(3)
    ]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(engine.ok, "/inference/v1/generate", body) for body in bodies]
        while engine.get("/server_info").json()["internal_states"][0]["waiting_requests"] < 3:
            pass
        assert engine.ok("/abort_requests", {"request_ids": ["r0", "nobody"]}) == {
            "status": "aborted",
            "aborted": 1,
        }
        named = {"request_ids": [f"nobody-{i}" for i in range(50_000)]}
        assert engine.ok("/abort_requests", named)["aborted"] == 0
        assert calls[0].result()["choices"][0]["finish_reason"] == "abort"
        assert engine.ok("/inference/v1/abort_requests") == {"status": "aborted", "aborted": 2}
        assert [call.result()["choices"][0]["finish_reason"] for call in calls] == ["abort"] * 3
    engine.ok("/resume")


def test_metrics_have_vllms_names_as_well(engine):
    tokens(engine)
    text = engine.get("/metrics").text
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    same = {
        "num_requests_running": "num_running_reqs", "num_requests_waiting": "num_queue_reqs",
        "kv_cache_usage_perc": "token_usage", "generation_tokens": "generation_tokens",
        "prefix_cache_hits": "cached_tokens", "num_preemptions": "num_retracted_requests",
    }  # fmt: skip
    for name, own in same.items():
        assert found[f"vllm:{name}"][0].value == found[f"caesura:{own}"][0].value
    (config,) = found["vllm:cache_config_info"]
    assert config.labels["block_size"] == "16"
    assert sum(each.value for each in found["vllm:request_success"]) > 0
    assert found["vllm:e2e_request_latency_seconds"]


def test_a_pause_of_a_trainer_that_is_gone_ends(models):
    with served("--model", str(models[0]), "--tokenizer", "none", "--pause-lease", "1.5") as engine:
        for path, body in (("/pause", {"mode": "keep"}), ("/pause_generation", {"mode": "in_place"})):
            engine.ok(path, body)
            assert len(tokens(engine)) == 12  # a request by HTTP is no sign of life of a trainer
