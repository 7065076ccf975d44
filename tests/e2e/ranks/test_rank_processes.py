"""Engines of two ranks: joined by hand over tcp, ended however one of them ends, and beside an engine of one.

Where rank 0 may be waiting when another ends is driven in one process by tests/loop/test_lost_ranks.py.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from click.testing import CliRunner
from support import engine_template
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.plain_trainer import free_port, weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.exceptions import EngineDied, EngineError
from caesura.client.keygen import keygen
from caesura.client.launch.launcher import LaunchedScheduler, worker_command
from caesura.client.trainer import WeightUpdateChain, clone_weights
from caesura.scheduler.executor.rpc import encode

pytestmark = pytest.mark.slow

OPTIONS = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 4096, "log_level": "WARNING"}
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 30]
SMALL = 20_000
"""Bytes of a bucket: the tiny model is many of them."""


@pytest.fixture(scope="module")
def joined(tiny_model, tmp_path_factory) -> Iterator[tuple[LaunchedScheduler, subprocess.Popen]]:
    keys, others = tmp_path_factory.mktemp("keys"), tmp_path_factory.mktemp("others")
    for folder in (keys, others):
        assert CliRunner().invoke(keygen, [str(folder), "--client", "worker"]).exit_code == 0
    address = f"tcp://127.0.0.1:{free_port()}"
    command = worker_command("--join", address, "--rank", "1", "--curve-server-key", str(keys / "server.key"))
    stranger = engine_template.Process(
        [*command, "--curve-client-key-file", str(others / "worker.key_secret")]
    )
    worker = engine_template.Process([*command, "--curve-client-key-file", str(keys / "worker.key_secret")])
    options = {
        "curve_secret_key_file": keys / "server.key_secret",
        "curve_authorized_clients": keys / "clients",
        "curve_server_key": keys / "server.key",
        "curve_client_key_file": keys / "worker.key_secret",
    }
    launched = launch_scheduler(tiny_model, tp=2, tp_joined=1, tp_address=address, **OPTIONS, **options)
    stranger.kill()
    assert stranger.wait() in (1, -9), "the engine refuses it: it has ended, or tries again"
    yield launched, worker
    launched.close()
    worker.kill()
    worker.wait()


def test_a_joined_rank_samples_the_tokens_of_one_rank(joined, tiny_model):
    launched, worker = joined
    assert [rank.pid for rank in launched.client.status().ranks] == [worker.pid]
    found = launched.client.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    with launch_scheduler(tiny_model, **OPTIONS) as client:
        expected = client.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_ids == theirs.output_ids
        np.testing.assert_allclose(ours.output_logprobs, theirs.output_logprobs, atol=1e-4)


def test_server_ends_with_the_engine(joined):
    launched, worker = joined
    launched.close()
    assert worker.wait() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 3, "ep": 2}, "ep = 2 must divide tp = 3"),  # before there is a configuration
        ({"tp": 3}, "ranks cannot divide this model"),  # before rank 0 would listen
    ],
)
def test_a_joined_rank_ends_if_rank_0_refuses_its_options(tiny_model, tmp_path, options, said):
    address = f"tcp://127.0.0.1:{free_port()}"
    with open(tmp_path / "log", "w") as log:
        command = worker_command("--join", address, "--rank", "2")
        worker = engine_template.Process(command, stderr=log)
    with pytest.raises(EngineError, match=said):
        launch_scheduler(tiny_model, tp_joined=1, tp_address=address, **options, **OPTIONS)
    assert worker.wait() == os.EX_UNAVAILABLE
    assert said in (tmp_path / "log").read_text()


def test_a_joined_rank_says_that_nobody_answers(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    with open(tmp_path / "log", "w") as log:
        command = worker_command("--join", address, "--rank", "1", "--join-timeout-s", "0.2")
        assert engine_template.Process(command, stderr=log).wait() == 1
    *waits, end = (tmp_path / "log").read_text().splitlines()
    assert len(waits) > 1
    for line in waits:
        assert f"rank 1 waits for rank 0 at {address} to start it; nobody has answered there: 0 s" in line
    assert end.endswith("no rank 0 has started this worker within 0.2 s")


@pytest.mark.parametrize("frame", [b"\xc1", encode((1, "start", (5,)))], ids=["no call", "no start"])
def test_a_rank_that_joins_something_else_says_so(tmp_path, frame):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        command = worker_command("--join", f"tcp://127.0.0.1:{port}", "--rank", "1")
        with open(tmp_path / "log", "w") as log:
            worker = engine_template.Process(command, stderr=log)
        identity, _ = other.recv_multipart()
        other.send_multipart([identity, frame])
        assert worker.wait() == 1
    assert "rank 1 has joined something that is no rank 0: " in (tmp_path / "log").read_text()


def test_rank_0_says_for_whom_it_waits(tiny_model, capfd):
    address = f"tcp://127.0.0.1:{free_port()}"
    options = OPTIONS | {"tp": 2, "tp_joined": 1, "tp_address": address, "log_level": "INFO"}
    with pytest.raises(EngineError, match=r"ranks \[1\] did not join in time"):
        launch_scheduler(tiny_model, join_timeout_s=0.2, **options)
    assert f"rank 0 waits at {address} for ranks [1]: 0 s of 0.2 s" in capfd.readouterr().err


SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}
DIVISIONS = {
    "latent, rows to experts on 3": (
        "deepseek-v3",
        {"tp": 3, "ep": 3, "dp_attention": 3},
        {"num_experts_per_tok": 1},
    ),
    "experts on 2": ("qwen3-moe", {"tp": 2, "ep": 2}, {"num_experts": 6}),
    "latent, rows on 2": ("deepseek-v3", {"tp": 2, "dp_attention": 2}, {}),
    "latent, both on 3": ("deepseek-v3", {"tp": 3, "ep": 3, "dp_attention": 3}, {}),
    "experts on 3": ("qwen3-moe", {"tp": 3, "ep": 3}, {"num_experts": 6, **SIX}),
    "latent, rows on 4": ("deepseek-v3", {"tp": 4, "dp_attention": 4}, {}),
    "experts on 4": ("deepseek-v3", {"tp": 4, "ep": 4}, {"n_routed_experts": 12}),
    "grouped, rows on 2": ("llama", {"tp": 2, "dp_attention": 2}, {}),
    "grouped, rows on 3": ("qwen3", {"tp": 3, "dp_attention": 3}, {}),
    "grouped, both on 4": ("qwen3-moe", {"tp": 4, "ep": 4, "dp_attention": 4}, {"num_experts": 8}),
    "grouped, rows to experts on 4": (
        "qwen3-moe",
        {"tp": 4, "ep": 4, "dp_attention": 4},
        {"num_experts": 8, "num_experts_per_tok": 2},
    ),
}
"""Family, options and sizes of models whose experts, or rows of attention, are divided."""


@pytest.mark.parametrize("division", quick(DIVISIONS, 2))
def test_experts_and_rows_are_divided_over_gloo(tmp_path, division):
    family, ranks, sizes = DIVISIONS[division]
    make_checkpoint(tmp_path, family, **sizes)
    address = f"tcp://127.0.0.1:{free_port()}"
    worker = engine_template.Process(worker_command("--join", address, "--rank", str(ranks["tp"] - 1)))
    options = {**ranks, "tp_joined": 1, "tp_address": address}
    prompts = [[5 + number] * (1 + 17 * number) for number in range(2 * ranks["tp"])]
    asked = {"sampling_params": PARAMS, "return_logprob": True, "return_routed_experts": "expert" in division}
    with launch_scheduler(tmp_path, **options, **OPTIONS) as client:
        found = client.generate(input_ids=prompts, **asked)
    assert worker.wait() == 0
    with launch_scheduler(tmp_path, **OPTIONS) as client:
        expected = client.generate(input_ids=prompts, **asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_ids == theirs.output_ids
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)
        np.testing.assert_allclose(ours.output_logprobs, theirs.output_logprobs, atol=1e-4)


@pytest.fixture(params=quick([1, 2]), ids=["heads divided", "rows divided"])
def launched(tiny_model, request) -> Iterator[LaunchedScheduler]:
    launched = launch_scheduler(tiny_model, tp=2, dp_attention=request.param, **OPTIONS)
    yield launched
    with suppress(EngineError):
        launched.close()


def processes_of(launched: LaunchedScheduler) -> tuple[psutil.Process, psutil.Process]:
    (rank,) = launched.client.status().ranks
    return psutil.Process(launched.pid), psutil.Process(rank.pid)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("state", quick(["mid-step", "idle", "paused", "mid-update"]))
def test_a_worker_that_is_killed_ends_the_engine(launched, other_model, state):
    client, before = launched.client, shared_memory()
    zero, one = processes_of(launched)
    handles = []
    if state in ("mid-step", "paused"):
        handles = [client.submit(input_ids=[1, 2, 3 + n], sampling_params=LONG) for n in range(8)]
        eventually(lambda: client.status().running_requests == 8)
    if state == "paused":
        client.pause("in_place")
    if state == "mid-update":
        session = client.begin_weight_update().session_id
        client.update_weights_from_disk(other_model, flush_cache=False, session_id=session)
    one.kill()
    for handle in handles:
        with pytest.raises(EngineDied, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            handle.result()
    eventually(lambda: launched.returncode is not None)
    assert launched.returncode == 1
    assert not is_alive(zero)
    assert not is_alive(one)
    assert shared_memory() <= before


@pytest.mark.long
def test_workers_end_when_rank_0_is_killed(launched):
    client, before = launched.client, shared_memory()
    zero, one = processes_of(launched)
    handle = client.submit(input_ids=[1, 2, 3], sampling_params=LONG)
    eventually(lambda: client.status().running_requests == 1)
    zero.kill()
    with pytest.raises(EngineDied):
        handle.result()
    eventually(lambda: not is_alive(one))
    assert shared_memory() <= before


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[dict[str, SchedulerClient]]:
    with launch_scheduler(tiny_model, tp=2, **OPTIONS) as two, launch_scheduler(tiny_model, **OPTIONS) as one:
        yield {"two": two, "one": one}


def assert_all_have(engines: dict[str, SchedulerClient], path: Path, label: str) -> None:
    """Assert that every rank has the same bytes as after a reload."""
    for client in engines.values():
        before, status = client.check_weights().total, client.status()
        assert (status.weights, status.weight_version, status.session) == ("valid", label, None)
        assert client.update_weights_from_disk(path, flush_cache=False).changed_tensors == 0
        assert client.check_weights().total == before


@pytest.mark.parametrize("order", ["two one", "one two"])
def test_ranks_receive_and_pass_on_one_send_of_a_trainer(engines, tiny_model, other_model, order):
    clients = [engines[name] for name in order.split()]
    handles = [client.submit([5, 6, 7], sampling_params=LONG) for client in clients]
    with WeightUpdateChain.create(clients, timeout_s=PATIENCE_S) as chain:
        for path in (other_model, tiny_model):
            replies = chain.update(
                weights_of(path).items(),
                bucket_bytes=SMALL,
                weight_version=path.name,
                flush_cache=False,
                timeout=PATIENCE_S,
            )
            assert [reply.weight_version for reply in replies] == [path.name] * 2
            assert_all_have(engines, path, path.name)
    for handle in handles:
        assert handle.result(timeout=PATIENCE_S).finish_reason.type == "length"


@pytest.mark.parametrize(("source", "target"), [("two", "one"), ("one", "two")])
def test_an_engine_of_ranks_sends_its_weights_and_serves_on(engines, other_model, tiny_model, source, target):
    for client, path in ((engines[source], other_model), (engines[target], tiny_model)):
        client.update_weights_from_disk(path, weight_version=path.name)
    handle = engines[source].submit([5, 6, 7], sampling_params=LONG)
    eventually(lambda: engines[source].status().running_requests)
    (reply,) = clone_weights(
        engines[source], [engines[target]], bucket_bytes=SMALL, timeout_s=PATIENCE_S, timeout=PATIENCE_S
    )
    assert reply.weight_version == other_model.name
    (span,) = handle.result(timeout=PATIENCE_S).weight_versions
    assert span.version == other_model.name
    assert_all_have(engines, other_model, other_model.name)
