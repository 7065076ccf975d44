"""Updates by a parameter server over checkpoint-engine's protocol, against real engine processes."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.lanes import every
from support.parameter_server import ParameterServer
from support.plain_trainer import weights_of
from support.waiting import eventually

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.exceptions import EngineError
from caesura.io_struct import WeightUpdateReqOutput

OPTIONS = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 256, "log_level": "WARNING"}
PARAMS = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        dtype = (torch.float32, torch.bfloat16)[seed]
        make_checkpoint(path, "qwen3", tied=True, dtype=dtype, seed=seed)
    return paths


@pytest.fixture(scope="module")
def shared_engine(models) -> Iterator[SchedulerClient]:
    with launch_scheduler(str(models[0]), allow_legacy_pickle=True, **OPTIONS) as client:
        yield client


@pytest.fixture
def engine(shared_engine, models) -> SchedulerClient:
    shared_engine.update_weights_from_disk(models[0], abort_all_requests=True)
    shared_engine.continue_generation(torch_empty_cache=False)
    return shared_engine


@pytest.fixture(scope="module")
def expected(shared_engine, models) -> str:
    """Checksum of the second model, as read from its folder."""
    shared_engine.update_weights_from_disk(models[1], abort_all_requests=True)
    return shared_engine.check_weights("checksum").total


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def start(
    pool: ThreadPoolExecutor, engine: SchedulerClient, server: ParameterServer, **options: object
) -> "Future[WeightUpdateReqOutput]":
    handles = {"GPU-of-another": "ipc:///nowhere", "cpu": server.address}
    return pool.submit(
        engine.update_weights_from_checkpoint_engine, handles, **{"timeout_s": 20.0, **options}
    )


def failure(update: "Future[WeightUpdateReqOutput]", code: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        update.result()
    assert caught.value.code == code, caught.value
    return caught.value


def push(server: ParameterServer, weights: dict[str, torch.Tensor]) -> int:
    assert server.ask(server.handle) == ""
    count = 0
    for bucket in server.buckets(weights):
        assert server.ask(bucket) == ""
        count += 1
    assert server.ask(None) == ""
    assert server.ask(None) == ""
    return count


def pushed(
    pool: ThreadPoolExecutor, engine: SchedulerClient, weights: dict[str, torch.Tensor], half_bytes: int
) -> WeightUpdateReqOutput:
    with ParameterServer(half_bytes) as server:
        update = start(pool, engine, server)
        push(server, weights)
        return update.result()


def maps_its_memory(engine: SchedulerClient) -> bool:
    return "parameter-server" in Path(f"/proc/{engine.status().pid}/maps").read_text()


@pytest.mark.parametrize("paused", [None, "in_place", "abort"])
@pytest.mark.parametrize("half_bytes", [20_000, 1 << 20])
def test_a_whole_update_equals_one_from_disk(expected, engine, pool, models, paused, half_bytes):
    if paused is not None:
        engine.pause(paused)
    epoch = engine.status().weights_epoch
    with ParameterServer(half_bytes) as server:
        update = start(pool, engine, server, weight_version=f"v{half_bytes}")
        count = push(server, weights_of(models[1]))
        reply = update.result()
    assert (count > 3) == (half_bytes == 20_000)
    assert reply.committed
    assert (reply.weights_epoch, reply.weight_version) == (epoch + 1, f"v{half_bytes}")
    assert reply.written_tensors == reply.cast_tensors == len(weights_of(models[1]))
    assert engine.check_weights("checksum").total == expected
    assert not maps_its_memory(engine)
    engine.continue_generation()
    assert len(engine.generate(input_ids=[5, 6], sampling_params=PARAMS).output_ids) == 8


def test_the_buffer_is_let_go_before_the_commit(engine, pool, models):
    epoch = engine.status().weights_epoch
    with ParameterServer(1 << 20) as server:
        update = start(pool, engine, server)
        assert server.ask(server.handle) == ""
        for bucket in server.buckets(weights_of(models[1])):
            assert server.ask(bucket) == ""
        assert engine.status().weights == "updating"
        assert maps_its_memory(engine)
        assert server.ask(None) == ""
        assert not maps_its_memory(engine)
        assert engine.status().weights_epoch == epoch
        assert server.ask(None) == ""
        assert engine.status().weights_epoch == epoch + 1
        update.result()


@pytest.mark.parametrize("paused", [False, True])
def test_a_part_of_the_weights_is_an_update_too(engine, pool, models, paused):
    if paused:
        engine.pause("retract")
    norm = torch.full_like(weights_of(models[0])["model.norm.weight"], 2.0)
    reply = pushed(pool, engine, {"model.norm.weight": norm}, 4096)
    assert (reply.committed, reply.written_tensors, reply.changed_tensors) == (True, 1, 1)
    assert engine.status().weights == "valid"


def test_update_joins_an_explicit_session(expected, engine, pool, models):
    with engine.weight_update(weight_version="session") as session:
        assert not pushed(pool, engine, weights_of(models[1]), 20_000).committed
        assert engine.status().weights == "updating"
    assert session.result.committed
    assert engine.check_weights("checksum").total == expected


def test_generation_goes_on_while_the_server_is_silent(engine, pool, models):
    with ParameterServer(20_000) as server:
        update = start(pool, engine, server)
        for said in (False, True):
            if said:
                assert server.ask(server.handle) == ""
            assert len(engine.generate(input_ids=[5, 6], sampling_params=PARAMS).output_ids) == 8
        waiting = None
        for bucket in server.buckets(weights_of(models[1])):
            assert server.ask(bucket) == ""
            waiting = waiting or engine.submit([7, 8], sampling_params=PARAMS)
            assert engine.status().weights == "updating"
        assert not waiting.done()
        assert server.ask(None) == ""
        assert server.ask(None) == ""
        update.result()
        spans = waiting.result().weight_versions
    assert [span.epoch for span in spans] == [engine.status().weights_epoch]


def test_a_silent_server_ends_in_a_typed_error(engine, pool):
    with ParameterServer(4096) as server:
        update = start(pool, engine, server, timeout_s=0.5)
        eventually(lambda: engine.status().generation == "running")
        failure(update, "deadline_exceeded")
    status = engine.status()
    assert (status.weights, status.session) == ("valid", None)


def test_a_server_that_dies_in_mid_update_poisons(expected, engine, pool, models):
    with ParameterServer(20_000) as server:
        update = start(pool, engine, server, timeout_s=1.0)
        assert server.ask(server.handle) == ""
        assert server.ask(next(server.buckets(weights_of(models[1])))) == ""
        while not update.done():
            assert engine.status().weights in ("updating", "poisoned")
    failure(update, "deadline_exceeded")
    assert engine.status().weights == "poisoned"
    assert pushed(pool, engine, weights_of(models[1]), 1 << 20).committed
    assert engine.check_weights("checksum").total == expected


def test_a_session_that_expires_ends_the_update(engine, pool, models):
    engine.begin_weight_update(deadline_s=0.5)
    with ParameterServer(20_000) as server:
        update = start(pool, engine, server)
        assert server.ask(server.handle) == ""
        assert server.ask(next(server.buckets(weights_of(models[1])))) == ""
        error = failure(update, "deadline_exceeded")
        assert error.message in server.ask(None)
    assert engine.status().weights == "poisoned"


def test_shutting_down_does_not_wait_for_the_server(models, pool):
    launched = launch_scheduler(str(models[0]), allow_legacy_pickle=True, **OPTIONS)
    with ParameterServer(4096) as server:
        update = start(pool, launched.client, server)
        assert server.ask(server.handle) == ""
        launched.client.shutdown()
        failure(update, "shutting_down")
        assert eventually(lambda: launched.returncode is not None)
        launched.close()
        assert launched.returncode == 0


def test_a_new_update_ends_the_talk_with_the_last_server(engine, pool, models):
    process = psutil.Process(engine.status().pid)

    def resources() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    for _ in range(2):
        pushed(pool, engine, weights_of(models[1]), 20_000)
    before = resources()
    for _ in range(5):
        with ParameterServer(4096) as server:
            update = start(pool, engine, server, timeout_s=1000.0)
            assert server.ask(7) != ""
            failure(update, "malformed_message")
            pushed(pool, engine, weights_of(models[1]), 20_000)
    eventually(lambda: resources() <= before)


def test_poisoned_weights_still_need_every_parameter(engine, pool, models):
    engine.check_weights("reset_tensors")
    weights = weights_of(models[1])
    for names, committed in ((list(weights)[:3], False), (list(weights)[3:], True)):
        part = {name: weights[name] for name in names}
        assert pushed(pool, engine, part, 1 << 20).committed == committed
        assert engine.status().weights == ("valid" if committed else "poisoned")


MISFITS = {
    "unknown name": ({"name": "model.nothing"}, "weight_mismatch"),
    "another shape": ({"shape": torch.Size([3, 3])}, "weight_mismatch"),
    "an integer dtype": ({"dtype": torch.int32}, "weight_mismatch"),
    "beyond the buffer": ({"offset": 1 << 40}, "invalid_request"),
    "misaligned": ({"offset": 3}, "invalid_request"),
    "negative offset": ({"offset": -256}, "malformed_message"),
    "no integer": ({"offset": "0"}, "malformed_message"),
    "no dtype": ({"dtype": "float32"}, "malformed_message"),
    "a function as dtype": ({"dtype": torch.zeros}, "malformed_message"),
    "a negative length": ({"shape": [-1, 40]}, "malformed_message"),
    "huge lengths": ({"shape": [1 << 62] * 4}, "malformed_message"),
    "an extra field": ({"shard": 1}, "malformed_message"),
}


@pytest.mark.parametrize(("fault", "written"), every(product(MISFITS, [False, True]), 3))
def test_a_bucket_that_does_not_fit_ends_the_update(engine, pool, models, fault, written):
    change, code = MISFITS[fault]
    with ParameterServer(1 << 20) as server:
        update = start(pool, engine, server)
        assert server.ask(server.handle) == ""
        (bucket,) = server.buckets(weights_of(models[1]))
        if written:
            assert server.ask(bucket[:2]) == ""
        text = server.ask([{**bucket[2], **change}])
        assert text != ""
        error = failure(update, code)
        assert error.message in text
        assert server.ask(bucket) == text
        server.tell(RuntimeError("some rank failed"))
    assert engine.status().weights == ("poisoned" if written else "valid")
    assert engine.status().session is None


def test_engine_refusals_reach_the_server(engine, pool, models):
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    handles = [
        engine.submit([5, 6, 7], sampling_params=params) for _ in range(8)
    ]  # one after the other: a small pool
    eventually(lambda: engine.status().kv.held)
    engine.pause("in_place")
    with ParameterServer(4096) as server:
        update = start(pool, engine, server, flush_cache=True)
        text = server.ask(server.handle)
        assert "flush_cache cannot be honoured" in text
        assert failure(update, "not_idle").message in text
    engine.pause("abort")
    assert all(handle.result().finish_reason.type in ("abort", "length") for handle in handles)


def test_memory_that_is_not_sealed_or_not_ours_is_refused(engine, pool):
    for change in ({"nbytes": 64}, {"inode": 1}, {"pid": 2**22 - 1}, {"fd": -1}, {"fd": None}, {"more": 1}):
        with ParameterServer(4096) as server:
            update = start(pool, engine, server)
            assert server.ask({**server.handle, **change}) != ""
            with pytest.raises(EngineError) as caught:
                update.result()
            assert caught.value.code in ("invalid_request", "malformed_message")
    assert engine.status().weights == "valid"


def test_a_pickle_is_accepted_only_where_the_option_is_set(models):
    with launch_scheduler(str(models[0]), **OPTIONS) as client, ParameterServer(4096) as server:
        with pytest.raises(EngineError, match="allow_legacy_pickle") as caught:
            client.update_weights_from_checkpoint_engine({"cpu": server.address})
        assert caught.value.code == "unsupported"
        assert client.status().weights == "valid"


ADDRESSES = [
    "tcp://10.0.0.1:5555", "tcp://127.0.0.1:1;tcp://10.0.0.1:5555", "tcp://example.com:80", "tcp://*:80",
    "inproc://x",
    "ipc://", f"ipc:///{'x' * 107}", "udp://127.0.0.1:1", "pgm://127.0.0.1:1", "ipc://a\0b", "",
    "tcp://127.0.0.1",
]  # fmt: skip


def test_only_this_host_is_connected_to(engine):
    for address in ADDRESSES:
        with pytest.raises(EngineError) as caught:
            engine.update_weights_from_checkpoint_engine({"cpu": address}, timeout_s=5)
        assert caught.value.code == "invalid_request", address


def test_an_engine_without_an_address_says_which_it_needs(engine):
    with pytest.raises(EngineError, match="'cpu'") as caught:
        engine.update_weights_from_checkpoint_engine({"GPU-1": "ipc://@x"})
    assert caught.value.code == "invalid_request"


TURNS = ["buffer", "bucket", "first None", "second None"]


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    ("turn", "kind"), every(product(TURNS, ["payload", "garbage", "two frames", "number"]), 3)
)
def test_hostile_messages_are_refused_and_never_run(engine, pool, models, tmp_path, turn, kind):
    marker = tmp_path / "owned"
    with ParameterServer(1 << 20) as server:
        update = start(pool, engine, server)
        messages = [server.handle, *server.buckets(weights_of(models[1])), None]
        for message in messages[: TURNS.index(turn)]:
            assert server.ask(message) == ""
        hostile = {"payload": [Malice(marker)], "garbage": b"\x80\x04\xff\x00", "number": 7}.get(kind)
        server.tell(hostile, *([b"more"] if kind == "two frames" else []))
        assert server.answer() != ""
        failure(update, "malformed_message")
        server.tell(Malice(marker))
    assert not marker.exists()
    status = engine.status()
    assert status.weights == ("valid" if turn in ("buffer", "bucket") else "poisoned")


ENDS = {
    "an exception": (
        RuntimeError("rank 3 has no memory"),
        "checkpoint_error",
        "RuntimeError: rank 3 has no memory",
    ),
    "a call alone": (Malice, "checkpoint_error", "system"),
    "no tensors": (None, "invalid_request", "no tensors"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_message_for_the_first_bucket_ends_the_update(engine, pool, tmp_path, what):
    """An object that a call would make is only ever read as the server's exception."""
    message, code, said = ENDS[what]
    with ParameterServer(4096) as server:
        update = start(pool, engine, server)
        assert server.ask(server.handle) == ""
        server.tell(Malice(tmp_path / "owned") if message is Malice else message)
        assert said in failure(update, code).message
    assert engine.status().weights == "valid"
    assert not (tmp_path / "owned").exists()
