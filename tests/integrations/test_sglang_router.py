"""A router before two servers, as slime starts one: what passes it, and what it leaves out of a request."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import served
from support.plain_trainer import free_port
from support.tokenizers import make_byte_level
from support.waiting import eventually

ROUTERS = [name for name in ("sglang_router", "smg") if find_spec(name) is not None]
"""Packages of their own, the second the successor of the first."""
if not ROUTERS:
    pytest.skip("neither sglang-router nor smg is installed", allow_module_level=True)

SAMPLING = {"max_new_tokens": 6, "sampling_seed": 3, "ignore_eos": True, "no_stop_trim": True}
ROLLOUT = {"input_ids": [5, 6, 7], "rid": "rollout-1", "return_logprob": True, "sampling_params": SAMPLING}


@pytest.fixture(scope="module", params=ROUTERS)
def package(request):
    return request.param


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, package):
    model = tmp_path_factory.mktemp("router") / "experts"
    make_checkpoint(model, "qwen3-moe", seed=2, vocab_size=400)
    make_byte_level(model, vocab_size=400)
    root = ("--weights-root", str(model.parent))
    with (
        served("--model", str(model), *root) as one,
        served("--model", str(model), *root) as two,
        router(package, model.parent / "router.log", one.url, two.url) as client,
    ):
        yield client, (one, two)


@contextmanager
def router(package: str, log: Path, *workers: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--worker-urls", *workers]
    command += ["--enable-rl"] if package == "smg" else []
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            eventually(lambda: process.poll() is not None or healthy(client) == len(workers))
            assert process.poll() is None, log.read_text()
            yield client
    finally:
        process.terminate()
        process.wait()


def healthy(client: httpx.Client) -> int:
    try:
        return sum(worker["is_healthy"] for worker in client.get("/workers").json()["workers"])
    except (httpx.TransportError, ValueError, KeyError):  # it does not listen yet
        return 0


def test_a_rollout_passes_unchanged(fleet):
    client, (one, _) = fleet
    answer = client.post("/generate", json=ROLLOUT).json()
    direct = one.ok("/generate", ROLLOUT)
    assert answer["output_ids"] == direct["output_ids"]
    for name in ("id", "output_token_logprobs", "weight_version", "finish_reason", "seed"):
        assert answer["meta_info"][name] == direct["meta_info"][name], name


def test_a_stream_passes(fleet):
    client, (one, _) = fleet
    with client.stream("POST", "/generate", json={**ROLLOUT, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == one.ok("/generate", ROLLOUT)["text"]


def test_both_servers_work(fleet):
    client, servers = fleet
    for number in range(8):
        client.post("/generate", json={**ROLLOUT, "rid": f"many-{number}", "input_ids": [number + 3] * 20})
    assert all(
        server.get("/server_info").json()["internal_states"][0]["generated_tokens"] for server in servers
    )


@pytest.mark.parametrize(
    ("fields", "seen_in", "passed_by"),
    [
        ({"return_routed_experts": True}, lambda answer: "routed_experts" in answer["meta_info"], ["smg"]),
        ({"return_prompt_token_ids": True}, lambda answer: "prompt_token_ids" in answer, ["smg"]),
        (
            {"sampling_params": {**SAMPLING, "logit_bias": {"9": 100.0}}},
            lambda answer: set(answer["output_ids"]) == {9},
            [],
        ),
    ],
)
def test_keys_that_a_router_leaves_out(fleet, package, fields, seen_in, passed_by):
    client, (one, _) = fleet
    assert seen_in(one.ok("/generate", {**ROLLOUT, **fields}))
    passed = seen_in(client.post("/generate", json={**ROLLOUT, **fields}).json())
    assert passed == (package in passed_by)


def test_the_control_plane_of_smg_updates_every_server_in_a_pause(fleet, package, tmp_path_factory):
    if package != "smg":
        pytest.skip("sglang-router has none")
    smg = import_module("smg.rl")
    client, servers = fleet
    model = servers[0].get("/server_info").json()["model_path"]
    rl, every = smg.RL(str(client.base_url)), "engine=sglang"
    workers = rl.workers()
    assert {worker.url.rstrip("/") for worker in workers} == {server.url for server in servers}
    with smg.paused(rl, every, mode="in_place") as pauses:
        assert (pauses.total, pauses.succeeded) == (2, 2)
        update = {"model_path": model, "weight_version": "42", "flush_cache": False}
        done = rl.fanout("update_weights_from_disk", update, selector=every)
        assert (done.total, done.succeeded) == (2, 2)
    for server in servers:
        assert server.ok("/generate", ROLLOUT)["meta_info"]["weight_version"] == "42"
    with pytest.raises(smg.RlError):
        rl.fanout("update_weights_from_disk", {"model_path": "/nowhere"}, selector=every)
    assert client.post("/generate", json=ROLLOUT).json()["meta_info"]["weight_version"] == "42"


def test_commands_are_for_the_servers_themselves(fleet):
    client, _ = fleet
    for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert client.post(path, json={}).status_code == 404
