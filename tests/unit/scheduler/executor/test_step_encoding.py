"""A step is the same on both ends of the line, and only workers that fit join it."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.plain_trainer import free_port

from caesura import __version__
from caesura.io_struct import CaesuraError
from caesura.scheduler.execution.forward import (
    ForwardBatch,
    InputTokens,
    SamplingBatch,
    SpecialRows,
    StateSegment,
    StateStep,
)
from caesura.scheduler.executor.rpc import (
    Answer,
    Failure,
    Join,
    decode_batch,
    decode_call,
    encode,
    encode_batch,
)
from caesura.scheduler.executor.worker_socket import WorkerSocket
from caesura.scheduler.executor.workers import Workers, identity_of
from caesura.scheduler.runtime.engine_config import EngineConfig


def assert_same(one: object, other: object) -> None:
    if is_dataclass(one):
        assert type(one) is type(other)
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    elif isinstance(one, tuple | list):
        assert isinstance(other, tuple | list)
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    else:
        assert one == other


class Values:
    """Random tensors and arrays of a step, of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def longs(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.random.integers(0, 1 << 40, shape))

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.random.random(shape, np.float32))


def special_rows(draw, values: Values) -> SpecialRows:
    longs, floats = values.longs, values.floats
    edited, penalised, wants = (draw(st.integers(0, 3)) for _ in range(3))
    wanted, restricts = longs(wants), draw(st.booleans())
    return SpecialRows(
        rows=longs(edited),
        repetition=floats(penalised),
        frequency=floats(penalised),
        presence=floats(penalised),
        counters=longs(penalised),
        restarted=longs(draw(st.integers(0, 2))),
        prompt_at=longs(draw(st.integers(0, 5))),
        output_at=longs(draw(st.integers(0, 5))),
        bias_ids=longs(edited, 2),
        bias=floats(edited, 2),
        allowed_ids=longs(edited, 2) if restricts else None,
        restricted=longs(edited) > 1 << 39 if restricts else None,
        wants=wanted,
        wants_host=wanted.numpy(),
        top=draw(st.integers(0, 5)),
        masked=longs(wants) > 1 << 39,
        num_masked=draw(st.integers(0, 3)),
        token_ids=longs(wants, 3),
        num_counters=draw(st.integers(0, 9)),
    )


def sampling(draw, values: Values, samples: int) -> SamplingBatch:
    longs, floats, random = values.longs, values.floats, values.random
    return SamplingBatch(
        temperature=floats(samples),
        greedy=torch.from_numpy(random.random(samples) < 0.5),
        top_k=longs(samples),
        top_p=floats(samples),
        uniforms=torch.from_numpy(random.random(samples)),
        any_sampled=draw(st.booleans()),
        any_filtered=draw(st.booleans()),
        want_raw=draw(st.booleans()),
        want_sampled=draw(st.booleans()),
        min_p=floats(samples) if draw(st.booleans()) else None,
        largest_top_k=draw(st.none() | st.integers(1, 99)),
        special=special_rows(draw, values) if draw(st.booleans()) else None,
    )


def input_tokens(draw, values: Values) -> InputTokens:
    wanted = draw(st.integers(0, 4))
    return InputTokens(
        tokens=values.longs(wanted),
        targets=values.longs(wanted),
        top=draw(st.integers(0, 5)),
        token_ids=values.longs(wanted, draw(st.integers(0, 3))),
    )


def state_step(draw, values: Values, decode: int, prefill: int) -> StateStep:
    rows_of_states = st.none() | st.integers(1, 99)
    segments = [
        StateSegment(start, start + 3, draw(rows_of_states), 7, draw(rows_of_states))
        for start in range(prefill)
    ]
    return StateStep(
        rows=values.longs(decode + prefill),
        sources=values.longs(decode) if draw(st.booleans()) else None,
        segments=segments,
        kept=(values.longs(2), values.longs(2)) if draw(st.booleans()) else None,
    )


@st.composite
def batches(draw) -> ForwardBatch:
    values = Values(draw(st.integers(0, 1 << 30)))
    longs, random = values.longs, values.random
    decode, prefill = draw(st.integers(0, 4)), draw(st.lists(st.integers(1, 9), max_size=3))
    q_lens = [1] * decode + prefill
    rows, tokens = len(q_lens), sum(q_lens)
    samples = draw(st.integers(0, rows))
    kv_lens = random.integers(1, 200, rows).astype(np.int32)
    table = random.integers(0, 99, (draw(st.integers(1, 5)), rows)).astype(np.int32)
    windows = draw(st.booleans())
    return ForwardBatch(
        num_decode=decode,
        input_ids=longs(tokens),
        positions=longs(tokens),
        kv_slots=longs(tokens),
        page_table=torch.from_numpy(table.T),  # as numpy may leave it: not in the order of rows
        kv_lens=torch.from_numpy(kv_lens),
        q_lens_host=q_lens,
        kv_lens_host=kv_lens.tolist(),
        slots=longs(rows),
        sample_tokens=longs(samples),
        sample_slots=longs(samples),
        sampling=sampling(draw, values, samples),
        inputs=input_tokens(draw, values) if draw(st.booleans()) else None,
        window_slots=longs(tokens) if windows else None,
        window_table=torch.from_numpy(table.T[:, ::-1].copy()) if windows else None,
        states=state_step(draw, values, decode, len(prefill)) if draw(st.booleans()) else None,
    )


@given(batches())
def test_a_batch_comes_back_as_it_was_in_memory_that_can_be_written(batch):
    arrived = decode_batch(*encode_batch(batch))
    assert_same(batch, arrived)
    arrived.input_ids.fill_(7)
    assert arrived.input_ids.tolist() == [7] * len(batch.input_ids)


DEEP = b"\x82\xa4type\xa6Answer\xa5value" + b"\x91" * 100_000
"""An answer whose value is lists within lists."""


@pytest.fixture(scope="module")
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
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
