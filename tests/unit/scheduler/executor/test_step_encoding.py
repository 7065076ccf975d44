"""A step is the same on both ends of the line, and only workers that fit join it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from socket import create_connection
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch
import zmq
from support.checkpoints import make_checkpoint
from support.drafting import draft_all
from support.lora import make_adapter
from support.plain_trainer import free_port
from support.scripted import EngineDriver, compile_grammars_at_once, prompt_of
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura import __version__
from caesura.io_struct import CaesuraError, LoadAdapterReqInput, SamplingParams
from caesura.scheduler.execution.forward import (
    ForwardBatch,
    InputTokens,
    SamplingBatch,
    SpecialRows,
    StateStep,
)
from caesura.scheduler.executor import worker_process
from caesura.scheduler.executor.rpc import (
    Answer,
    Failure,
    Join,
    decode_batch,
    decode_call,
    encode,
    encode_batch,
)
from caesura.scheduler.executor.worker_process import Connection, RankZeroGoneError
from caesura.scheduler.executor.worker_socket import WorkerSocket
from caesura.scheduler.executor.workers import Workers, identity_of
from caesura.scheduler.runtime.engine_config import EngineConfig


def assert_same(one: object, other: object, seen: set[str]) -> None:
    """Compare what a step holds, and add the names of its fields that hold something."""
    if is_dataclass(one):
        assert type(one) is type(other)
        for field in fields(one):
            value = getattr(one, field.name)
            assert_same(value, getattr(other, field.name), seen)
            seen |= set() if value is None or value is False else {f"{type(one).__name__}.{field.name}"}
    elif isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    elif isinstance(one, tuple | list):
        assert isinstance(other, tuple | list)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs, seen)
    else:
        assert one == other


KINDS = (
    {"temperature": 0.0},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.01},
    {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {11: 3.0}},
    {"allowed_token_ids": [5, 6, 7], "min_new_tokens": 3, "bad_words_ids": [[5, 6], [6, 7], [7, 5]]},
    {"forced_output_ids": [5, 6, 7, 8]},
    {"grammar": "start: /[!-~]{100,}/"},
)
DETAILS = {
    "return_logprob": True, "return_raw_logprob": True, "return_sampled_logprob": True,
    "return_sampling_mask": True, "return_hidden_states": True, "logprob_start_len": 0,
    "top_logprobs_num": 2, "token_ids_logprob": [4, 9],
}  # fmt: skip


FIELDS = {
    f"{kind.__name__}.{field.name}"
    for kind in (ForwardBatch, SamplingBatch, SpecialRows, InputTokens, StateStep)
    for field in fields(kind)
}
OF_THE_DEVICE = {f"ForwardBatch.{name}" for name in ("page_table_host", "window_table_host")}
OF_THE_DEVICE.add("SamplingBatch.want_last_kept")


def test_every_step_comes_back_as_it_was(tmp_path, monkeypatch):
    """Steps of real engines, which between them fill every field, and memory that can be written."""
    compile_grammars_at_once(monkeypatch)
    draft_all(monkeypatch)
    seen: set[str] = set()
    for family in ("gemma3", "qwen3.5"):
        make_checkpoint(tmp_path / family, family)
        make_byte_level(tmp_path / family)
        options: dict[str, Any] = {"chunked_prefill_size": 32}
        if family == "gemma3":
            options |= {"enable_lora": True, "speculation": "suffix"}
        with EngineDriver(str(tmp_path / family), scripted=False, **options) as driver:
            if family == "gemma3":
                path = make_adapter(tmp_path / family, tmp_path / "adapter", ["q_proj"])
                driver.call(LoadAdapterReqInput(name="adapter", path=str(path)))
                driver.generate(prompt_of(9), 4, adapter="adapter")
            execute = driver.engine.runner.execute

            def through_the_line(batch: ForwardBatch, execute=execute) -> object:
                turned = replace(batch, page_table=batch.page_table.T.contiguous().T)  # as numpy may leave it
                arrived = decode_batch(*encode_batch(turned))
                assert_same(turned, arrived, seen)
                arrived.input_ids.fill_(7)
                return execute(batch)

            driver.engine.runner.execute = through_the_line
            for details in ({}, DETAILS):
                for number, kind in enumerate(KINDS):
                    params = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=3, **kind)
                    driver.generate(prompt_of(40 + number), sampling_params=params, **details)
            driver.generate(list(range(3, 97)), 6)  # whatever is sampled goes on somewhere
            driver.run_until_idle()
            driver.complete(
                prompt_of(40), sampling_params=SamplingParams(max_new_tokens=6, presence_penalty=0.5)
            )
            assert driver.status().step_failures.failed == 0
    assert FIELDS - seen == OF_THE_DEVICE


DEEP = b"\x82\xa4type\xa6Answer\xa5value" + b"\x91" * 100_000
"""An answer whose value is lists within lists."""


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def workers(address) -> Iterator[Workers]:
    workers = Workers(EngineConfig(model_path="", tp=3, tp_joined=2, tp_address=address))
    yield workers
    workers.close()


@pytest.fixture
def connect(address) -> Iterator:
    context, sockets = zmq.Context(), []

    def connected(identity: bytes) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        sockets.append(socket)
        return socket

    yield connected
    for socket in sockets:
        socket.close(0)
    context.term()


def join(rank: int, version: str = __version__) -> Join:
    return Join(rank=rank, pid=1, host="here/boot", version=version)


def heard_by(workers: Workers) -> list[tuple[int, Answer]]:
    assert workers.socket.poll(None)
    return workers.receive()


def reaches(workers: Workers, rank: int) -> bool:
    try:
        workers.socket.send_multipart([identity_of(rank), b""])
    except zmq.ZMQError:
        return False
    return True


def test_only_workers_that_fit_join(workers, connect):
    for identity, said in (
        (b"rank 3", join(3)),
        (b"rank 0", join(0)),
        (b"rank 2 ", join(2)),
        (b"someone", join(1)),
        (b"older", join(1, "0.0.1")),
    ):
        socket = connect(identity)
        socket.send(encode(said))
        heard_by(workers)
        assert socket.poll(None)
        assert decode_call(socket.recv()).method == "refuse"
    assert workers.joined == {}


def test_a_rank_that_ends_before_all_are_there_joins_again(workers, connect):
    first = connect(identity_of(1))
    first.send(encode(join(1)))
    heard_by(workers)
    first.close(0)
    eventually(lambda: not reaches(workers, 1))
    connect(identity_of(2)).send(encode(join(2)))
    with ThreadPoolExecutor(1) as thread:
        all_there = thread.submit(workers.await_all)
        eventually(lambda: 2 in workers.joined and 1 not in workers.joined)
        assert not all_there.done()
        connect(identity_of(1)).send(encode(join(1)))
        all_there.result()
    assert sorted(workers.joined) == [1, 2]


def test_the_last_process_that_joins_is_the_rank(workers, connect):
    for _ in range(2):
        last = connect(identity_of(1))
        last.send(encode(join(1)))
        heard_by(workers)
    workers.send_to(1, [b"wait"])
    assert last.poll(None)


@pytest.mark.parametrize("who", ["silent", "foreign", "the rank itself, twice"])
def test_a_stranger_does_not_hide_the_end_of_a_worker(workers, connect, address, who):
    if who == "silent":
        stranger: Any = create_connection(("127.0.0.1", urlsplit(address).port))
    else:
        stranger = connect(b"someone" if who == "foreign" else identity_of(1))
        stranger.send(b"x" if who == "foreign" else encode(join(1)))
        heard_by(workers)
    worker = connect(identity_of(1))
    worker.send(encode(join(1)))
    heard_by(workers)
    connect(identity_of(2)).send(encode(join(2)))
    workers.await_all()
    assert workers.lost is None
    with pytest.raises(TimeoutError):
        create_connection(("127.0.0.1", urlsplit(address).port), timeout=1.0)
    worker.close(0)
    eventually(lambda: workers.lost)
    stranger.close()


def test_a_worker_whose_rank_another_one_has_taken_ends(workers, address, connect, monkeypatch):
    monkeypatch.setattr(worker_process, "_FORGOTTEN_S", 0.1)
    first = Connection(address, 1, None, None, 10.0)
    first.join()
    heard_by(workers)
    assert workers._missing() == {2}
    assert first.socket.poll(None)
    connect(identity_of(1)).send(encode(join(1)))
    heard_by(workers)
    with pytest.raises(RankZeroGoneError, match="another one has joined as rank 1"):
        first.await_start()
    first.socket.disable_monitor()
    first.socket.context.destroy(0)


def test_who_sends_without_end_holds_nothing_up(workers, connect, monkeypatch):
    stranger = connect(b"someone")

    def another(*said: bytes) -> None:
        stranger.send(b"x")
        assert workers.socket.poll(None)

    monkeypatch.setattr(workers, "answer_of", another)
    another()
    assert workers.receive() == []


def test_refusing_a_worker_that_has_gone_is_no_error(workers):
    workers.answer_of(b"nobody is there", encode(join(1, "0.0.1")))
    assert workers.joined == {}


@pytest.mark.parametrize("frame", [b"", b"\xc1", DEEP, b"\x81\xa4type\xa2\xff\xfe", b"\xdf\xff\xff\xff\xff"])
def test_unreadable_frames_are_dropped(workers, frame):
    assert workers.answer_of(identity_of(1), frame) is None


def test_forged_worker_answers_are_ignored(workers, connect):
    workers.joined[1] = join(1)
    forged = encode(Answer(number=1, failure=Failure(message="forged")))
    for identity in (b"1", b"rank 01", b"rank rank 1", b"rank 1 ", b"someone"):
        connect(identity).send(forged)
        assert heard_by(workers) == []
    connect(identity_of(1)).send(encode(Answer(number=1, value=msgspec.Raw(b"\xc0"))))
    ((rank, answer),) = heard_by(workers)
    assert (rank, answer.number) == (1, 1)
    del workers.joined[1]


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("tcp://192.0.2.1:5", "is open to others"),
        ("tcp://0.0.0.0:5", "is open to others"),
        ("tcp://engine.example:5", "is open to others"),
        ("tcp://localhost.example:5", "is open to others"),
        ("tcp://127.0.0.1", "is no address"),
        ("ipc:///tmp/workers.sock", "is no address"),
    ],
)
def test_an_address_beyond_loopback_needs_keys(address, problem):
    with pytest.raises(CaesuraError, match=problem):
        WorkerSocket(EngineConfig(model_path="", tp=2, tp_joined=1, tp_address=address), print)


@pytest.mark.parametrize("host", ["127.1.2.3", "localhost"])
def test_loopback_needs_none(host):
    config = EngineConfig(model_path="", tp=2, tp_joined=1, tp_address=f"tcp://{host}:{free_port()}")
    WorkerSocket(config, print).close()


def test_an_address_in_use_is_refused(workers, address):
    with pytest.raises(CaesuraError) as caught:
        WorkerSocket(EngineConfig(model_path="", tp=2, tp_joined=1, tp_address=address), print)
    assert caught.value.code == "endpoint_in_use"
