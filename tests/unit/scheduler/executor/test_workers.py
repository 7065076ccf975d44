"""What rank 0 takes from its socket: words of workers, and nothing from anybody else."""

from collections.abc import Iterator

import msgspec
import pytest
import zmq
from support.plain_trainer import free_port

from caesura import __version__
from caesura.scheduler.executor.rpc import Answer, Failure, Join, decode_call, encode
from caesura.scheduler.executor.workers import Workers, identity_of
from caesura.scheduler.runtime.config import EngineConfig

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


def test_a_worker_that_is_refused_may_have_gone(workers):
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
