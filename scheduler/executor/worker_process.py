"""A worker's process: its connection to rank 0, and the loop that executes calls.

Invariants:
- Calls are executed in order. What takes long is a generator that the loop advances, so that rank 0 can break
  it off; only calls that it does not touch are executed meanwhile.
- At most one step is under way while the next one is launched. A rank whose step fails aborts the group, so
  none of the others waits for it.
- The worker ends within a second after rank 0, whatever it does at that moment: a thread watches the
  connection, and for a worker that rank 0 has started the lifeline, whose other end rank 0 holds.
- Stop signals that reach a worker which rank 0 has started do nothing: rank 0 gets them, too, and decides.
"""

import faulthandler
import gc
import logging
import math
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from ... import __version__
from ...io_struct import CaesuraError
from ...process import log
from ...process.curve import KeyPair
from ..runtime.background import Wakeup
from .rpc import Answer, Call, Join, Start, decode_call, encode, failure_of, methods_of
from .worker import Worker
from .worker_rendezvous import device_at
from .worker_socket import DEAD_HOST_MS, HEARTBEAT_MS
from .worker_updates import Operation
from .workers import Waits, here, identity_of

if TYPE_CHECKING:
    from ..execution.forward import ForwardOutput

logger = logging.getLogger(__name__)

LOST_STATUS = os.EX_TEMPFAIL
"""Exit status of a worker whose engine has failed: another one may come."""
REFUSED_STATUS = os.EX_UNAVAILABLE
"""Exit status of a worker that rank 0 has refused, or that cannot start."""
_LAST_WORDS_S = 0.5
_WAITING_POLL_MS = 5
"""Interval at which a waiting operation is looked at."""
_READ_S = 1.0
_FORGOTTEN_S = DEAD_HOST_MS / 1000
"""Seconds of silence after which rank 0, which tells a worker each second to wait, knows it no more."""
_CONCURRENT = {"join_group", "leave_group"}
"""Methods that wait for others than rank 0, and hold nothing up."""


class RankZeroGoneError(BaseException):
    """Rank 0 has ended, or does not want this worker."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


class Connection:
    def __init__(
        self,
        address: str,
        rank: int,
        keys: tuple[bytes, KeyPair] | None,
        lifeline_fd: int | None,
        timeout_s: float,
    ) -> None:
        """``keys``: rank 0's public and this worker's pair; ``lifeline_fd`` is readable when rank 0 ends."""
        self.rank = rank
        self.is_there = False
        """True once a rank 0 listens at the address, and accepts the keys."""
        self._address = address
        self._timeout_s = timeout_s
        self.lifeline_fd = lifeline_fd
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, identity_of(rank))
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        if address.startswith("tcp://"):
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_HOST_MS)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys[0])
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[1].public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1].secret)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def join(self) -> None:
        self.socket.send(encode(Join(rank=self.rank, pid=os.getpid(), host=here(), version=__version__)))

    def answer(self, answer: Answer) -> None:
        self.socket.send(encode(answer))

    def await_start(self) -> Call:
        """Wait for the call that starts this worker, or that ends it. Raises RankZeroGoneError."""
        waits = Waits(self._timeout_s)
        deadline = monotonic() + self._timeout_s
        by_hand = self._address.startswith("tcp://")  # else rank 0 has just started it
        forgotten_at = math.inf
        while (left := deadline - monotonic()) > 0:
            problem = "it waits for others" if self.is_there else "nobody has answered there"
            if by_hand:
                waits.say(f"rank {self.rank} waits for rank 0 at {self._address} to start it; {problem}")
            if self.socket.poll(round(1000 * min(left, waits.interval_s, _FORGOTTEN_S))):
                call, _ = self.next_call()
                if call.method != "wait":
                    return call
                forgotten_at = monotonic() + _FORGOTTEN_S
            elif by_hand and monotonic() >= forgotten_at:  # ZeroMQ leaves its connection open
                reason = f"rank 0 knows this worker no more: another one has joined as rank {self.rank}"
                raise RankZeroGoneError(reason)
        raise RankZeroGoneError(f"no rank 0 has started this worker within {self._timeout_s:g} s")

    def next_call(self) -> tuple[Call, list[memoryview]]:
        """Wait for a call and its frames. Raises RankZeroGoneError if this worker is not wanted."""
        header, *frames = self.socket.recv_multipart(copy=False)
        call = decode_call(header.buffer)
        if call.method == "refuse":
            (reason,) = msgspec.msgpack.decode(call.arguments, type=tuple[str])
            raise RankZeroGoneError(f"rank 0 has refused this worker: {reason}", REFUSED_STATUS)
        return call, [frame.buffer for frame in frames]

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks, which rank 0 asks for while this one is built."""
        offer = self._expect("offer")
        self.answer(Answer(number=offer.number, value=msgspec.Raw(encode(value))))
        (smallest,) = msgspec.msgpack.decode(self._expect("agree").arguments, type=tuple[int])
        return smallest

    def _expect(self, method: str) -> Call:
        call, _ = self.next_call()
        if call.method != method:
            raise RankZeroGoneError("rank 0 has stopped in its start")
        return call


def run(connection: Connection, device: str | None, local_rank: int | None = None) -> int:
    """Be a worker, on ``device`` or that which rank 0 names, until rank 0 ends; return the exit status.

    ``local_rank``: the device is rank 0's by kind, and counted from its index on.
    """
    faulthandler.enable()
    log.configure("INFO", connection.rank)
    if connection.lifeline_fd is not None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    watch = _Watch(connection)
    connection.join()
    worker: Worker | None = None
    try:
        call = connection.await_start()
        if call.method != "start":
            return 0 if _is_for_good(call) else 1
        (start,) = msgspec.msgpack.decode(call.arguments, type=tuple[Start])
        config = start.config
        log.configure(config.log_level, connection.rank, log_format=config.log_format, name=config.log_name)
        wakeup = Wakeup()
        try:
            if device is None and local_rank is not None:
                device = device_at(config.device, local_rank, config.tp)
            worker = Worker(start, connection.rank, device, connection, wakeup.set)
        except (CaesuraError, MemoryError, RuntimeError, OSError, ValueError) as error:
            logger.error("rank %d cannot start: %s", connection.rank, error)
            watch.status = REFUSED_STATUS
            failure = failure_of(error)
            while call.method != "stop":  # rank 0 may ask for a size before it looks for this failure
                connection.answer(Answer(number=call.number, failure=failure))
                call, _ = connection.next_call()
            return REFUSED_STATUS
        watch.on_gone, watch.status = worker.parallel.abort, LOST_STATUS
        gc.freeze()
        logger.info("rank %d is built (%d threads)", connection.rank, torch.get_num_threads())
        connection.answer(Answer(number=call.number, memory=worker.memory()))
        stop = _Loop(connection, worker, wakeup).run()
        watch.ends_in_order = True
        return 0 if _is_for_good(stop) else LOST_STATUS
    except RankZeroGoneError as gone:
        logger.warning("%s", gone)
        return gone.status
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.error("rank %d has joined something that is no rank 0: %s", connection.rank, error)
        return 1
    finally:
        if worker is not None:
            worker.parallel.abort()


def _is_for_good(stop: Call) -> bool:
    (for_good,) = msgspec.msgpack.decode(stop.arguments, type=tuple[bool])
    return for_good


def end(status: int) -> None:
    """End the process; its threads inside torch and libzmq are not unwound."""
    log.flush()
    os._exit(status)


class _Watch:
    def __init__(self, connection: Connection) -> None:
        self.on_gone: Callable[[], None] = lambda: None
        self.ends_in_order = False
        """True once rank 0 has told this worker to stop, however long it takes to."""
        self.status = 1
        """Exit status when rank 0 ends."""
        self._connection = connection
        threading.Thread(target=self._run, name="caesura-rank-zero", daemon=True).start()

    def _run(self) -> None:
        events = self._connection.events
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        if self._connection.lifeline_fd is not None:
            poller.register(self._connection.lifeline_fd, zmq.POLLIN)
        while (events, zmq.POLLIN) in poller.poll():
            if parse_monitor_message(events.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
                break
            self._connection.is_there = True
        if not self.ends_in_order:
            logger.warning("rank 0 has ended, and so does this worker")
            self.on_gone()
        select.select([], [], [], _LAST_WORDS_S)
        if not self.ends_in_order:
            end(self.status)


class _Loop:
    def __init__(self, connection: Connection, worker: Worker, wakeup: Wakeup) -> None:
        self._connection = connection
        self._worker = worker
        self._wakeup = wakeup
        self._methods = methods_of(worker) | methods_of(worker.updates)
        self._steps: deque[tuple[int, ForwardOutput]] = deque()
        self._queue: deque[tuple[int, Operation]] = deque()
        """Operations by the number of their call; the first one is under way."""
        self._concurrent: dict[int, Operation] = {}
        self._working = False
        self._read_at = 0.0
        self._poller = zmq.Poller()
        for each in (connection.socket, wakeup.fd):
            self._poller.register(each, zmq.POLLIN)

    def run(self) -> Call:
        """Execute calls until one tells to stop; return that."""
        while True:
            if self._connection.socket in self._events():
                call, frames = self._connection.next_call()
                if call.method == "stop":
                    return call
                if call.method != "wait":
                    self._take(call, frames)
            elif self._steps:
                self._finish_step()
            for number, operation in list(self._concurrent.items()):
                if self._advance(number, operation) is None:
                    del self._concurrent[number]
            self._working = False
            if self._queue:
                waits = self._advance(*self._queue[0])
                if waits is None:
                    self._queue.popleft()
                self._working = not waits and bool(self._queue)

    def _events(self) -> dict[object, int]:
        timeout: int | None = None
        if self._steps or self._working:
            timeout = 0
        elif self._queue or self._concurrent:
            timeout = _WAITING_POLL_MS
        events = dict(self._poller.poll(timeout))
        if self._wakeup.fd in events:
            self._wakeup.clear()
        return events

    def _take(self, call: Call, frames: list[memoryview]) -> None:
        if call.method == "execute":
            self._launch(call, frames)
            return
        while self._steps:
            self._finish_step()
        try:
            method = self._methods[call.method]
            found = method.call(*method.decode_arguments(call.arguments), *frames)
            if not isinstance(found, Generator):
                self._answer(call.number, found)
            elif call.method in _CONCURRENT:
                self._concurrent[call.number] = found
            else:
                self._queue.append((call.number, found))
        except Exception as error:  # noqa: BLE001  whatever fails is rank 0's to judge
            self._failed(call.number, error)

    def _launch(self, call: Call, frames: list[memoryview]) -> None:
        method = self._methods["execute"]
        try:
            output = method.call(*method.decode_arguments(call.arguments), *frames)
        except Exception as error:  # noqa: BLE001  as above
            while self._steps:
                self._finish_step()
            self._step_failed(call.number, error)
            return
        self._steps.append((call.number, output))
        if self._worker.steps_end_at_once or len(self._steps) > 1:
            self._finish_step()

    def _finish_step(self) -> None:
        number, output = self._steps.popleft()
        try:
            output.fetch()
        except Exception as error:  # noqa: BLE001  as above: device errors surface here
            self._step_failed(number, error)
            return
        memory = None
        if (now := monotonic()) - self._read_at > _READ_S:
            memory, self._read_at = self._worker.memory(), now
        self._connection.answer(Answer(number=number, memory=memory))

    def _step_failed(self, number: int, error: Exception) -> None:
        self._worker.parallel.abort()
        self._connection.answer(Answer(number=number, failure=failure_of(error)))

    def _advance(self, number: int, operation: Operation) -> bool | None:
        """Return True if the operation waits for something, None if it has ended and was answered."""
        try:
            return next(operation)
        except StopIteration as stop:
            self._answer(number, stop.value)
        except Exception as error:  # noqa: BLE001  as above
            self._failed(number, error)
        return None

    def _answer(self, number: int, value: object) -> None:
        answer = Answer(number=number, value=msgspec.Raw(encode(value)), memory=self._worker.memory())
        self._connection.answer(answer)

    def _failed(self, number: int, error: Exception) -> None:
        if not isinstance(error, CaesuraError):
            logger.error("a call of rank 0 failed", exc_info=error)
        self._connection.answer(Answer(number=number, failure=failure_of(error)))
