"""A worker's process: its end of the line to rank 0, and the loop that executes what comes over it.

Invariants:
- Calls are executed in the order in which they come. What takes long is a generator that the loop advances, so that rank 0 can
  break it off; only calls that such an operation does not touch are executed meanwhile.
- The worker ends when rank 0 does, within a second, whatever it does at that moment: a thread watches the connection, and for a
  worker that rank 0 has started the lifeline, whose other end rank 0 holds.
- Stop signals that reach a worker which rank 0 has started do nothing: rank 0 gets them, too, and decides.
"""

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from ... import __version__
from ...io_struct import CaesuraError
from ...process import log
from ...process.curve import KeyPair
from ..memory.device_memory import is_out_of_memory
from ..runtime.background import Wakeup
from .listener import DEAD_HOST_MS, HEARTBEAT_MS
from .messages import (
    Agreed,
    Answer,
    Join,
    Offer,
    Open,
    Refused,
    Start,
    Step,
    Stop,
    decode_call,
    encode,
    failure_of,
)
from .rank import Operation, Rank
from .rank_updates import AbandonedError
from .workers import identity_of

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5
"""How long a worker whose rank 0 is gone may take to end in order."""
_WAITING_POLL_MS = 5
"""How often an operation that waits is looked at when nothing else happens."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankZeroGoneError(BaseException):
    """Rank 0 has ended, or does not want this worker."""


class Line:
    """A worker's end of the line."""

    def __init__(
        self, address: str, rank: int, keys: tuple[bytes, KeyPair] | None, lifeline_fd: int | None
    ) -> None:
        """Connect; :meth:`join` says who is there.

        Args:
            keys: rank 0's public key and this worker's own pair. None: neither side has any.
            lifeline_fd: becomes readable when rank 0 ends. None: only the connection tells.
        """
        self.rank = rank
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
        self.events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def join(self) -> None:
        """Say who is there."""
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        host = f"{socket.gethostname()}/{boot}"
        self.socket.send(encode(Join(rank=self.rank, pid=os.getpid(), host=host, version=__version__)))

    def say(self, said: Answer | Offer) -> None:
        """To rank 0."""
        self.socket.send(encode(said))

    def hear(self) -> tuple[object, list[memoryview]]:
        """The next call and its frames, waited for.

        Raises:
            RankZeroGoneError: this worker is not wanted.
        """
        header, *frames = self.socket.recv_multipart(copy=False)
        call = decode_call(header.buffer)
        if isinstance(call, Refused):
            raise RankZeroGoneError(f"rank 0 has refused this worker: {call.message}")
        return call, [frame.buffer for frame in frames]

    def all_reduce_min(self, value: int) -> int:
        """The smallest ``value`` of all ranks: this rank offers its own, rank 0 tells all."""
        self.say(Offer(value=value))
        agreed, _ = self.hear()
        if not isinstance(agreed, Agreed):
            raise RankZeroGoneError("rank 0 has stopped in its start")
        return agreed.value


def run(line: Line, device: str | None) -> int:
    """Be a rank until rank 0 ends; returns the exit status. ``device``: instead of the one that rank 0 names."""
    faulthandler.enable()
    log.configure("INFO", line.rank)
    if line.lifeline_fd is not None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    watch = _Watch(line)
    line.join()
    rank: Rank | None = None
    try:
        start, _ = line.hear()
        if not isinstance(start, Start):
            return 0
        config = start.config
        log.configure(config.log_level, line.rank, log_format=config.log_format, name=config.log_name)
        wakeup = Wakeup()
        try:
            rank = Rank(start, line.rank, device, line, wakeup.set)
        except (CaesuraError, MemoryError, RuntimeError, OSError, ValueError) as error:
            logger.error("rank %d cannot start: %s", line.rank, error)
            failure = failure_of(error, out_of_memory=is_out_of_memory(error))
            line.say(Answer(number=start.number, failure=failure))
            line.hear()  # rank 0 ends this worker when it has read that
            return 1
        watch.on_gone = rank.parallel.abort
        gc.freeze()
        logger.info("rank %d is built (%d threads)", line.rank, torch.get_num_threads())
        line.say(Answer(number=start.number, memory=rank.memory()))
        _Loop(line, rank, wakeup).run()
    except RankZeroGoneError as gone:
        logger.warning("%s", gone)
        return 1
    finally:
        if rank is not None:
            rank.parallel.abort()
    return 0


def end(status: int) -> None:
    """End the process; its threads inside torch and libzmq are not unwound."""
    log.flush()
    os._exit(status)


class _Watch:
    """A thread that ends the process when rank 0 has ended."""

    def __init__(self, line: Line) -> None:
        self.on_gone: Callable[[], None] = lambda: None
        """Breaks off what waits for other ranks."""
        self._line = line
        threading.Thread(target=self._run, name="caesura-rank-zero", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._line.events, zmq.POLLIN)
        if self._line.lifeline_fd is not None:
            poller.register(self._line.lifeline_fd, zmq.POLLIN)
        for source, _ in poller.poll():
            if source == self._line.events:
                parse_monitor_message(self._line.events.recv_multipart())
        logger.warning("rank 0 has ended, and so does this worker")
        self.on_gone()
        select.select([], [], [], _LAST_WORDS_S)
        end(1)


class _Loop:
    """Executes calls."""

    def __init__(self, line: Line, rank: Rank, wakeup: Wakeup) -> None:
        self._line = line
        self._rank = rank
        self._wakeup = wakeup
        self._queue: deque[tuple[int, Operation]] = deque()
        """Operations by the number of their call; the first one is under way."""
        self._beside: dict[int, Operation] = {}
        self._working = False
        """The operation under way waits for nothing."""
        self._poller = zmq.Poller()
        for each in (line.socket, wakeup.fd):
            self._poller.register(each, zmq.POLLIN)

    def run(self) -> None:
        """Until rank 0 says stop."""
        steps = self._rank.steps
        while True:
            if self._line.socket in self._events():
                call, frames = self._line.hear()
                if isinstance(call, Stop):
                    return
                self._take(call, frames)
            elif steps.launched:
                self._line.say(steps.finish())
            for number, operation in list(self._beside.items()):
                if self._advance(number, operation) is None:
                    del self._beside[number]
            self._working = False
            if self._queue:
                waits = self._advance(*self._queue[0])
                if waits is None:
                    self._queue.popleft()
                self._working = not waits and bool(self._queue)

    def _events(self) -> dict[object, int]:
        """What can be read; waits for it where there is nothing else to do."""
        timeout: int | None = None
        if self._rank.steps.launched or self._working:
            timeout = 0
        elif self._queue or self._beside:
            timeout = _WAITING_POLL_MS
        events = dict(self._poller.poll(timeout))
        if self._wakeup.fd in events:
            self._wakeup.clear()
        return events

    def _take(self, call: Any, frames: list[memoryview]) -> None:
        steps = self._rank.steps
        if isinstance(call, Step):
            for answer in steps.launch(call, frames[0]):
                self._line.say(answer)
            return
        while steps.launched:
            self._line.say(steps.finish())
        try:
            done = self._rank.at_once(call)
            if done is not None:
                self._answer(call.number, done[0])
            elif (operation := self._rank.beside(call)) is not None:
                self._beside[call.number] = operation
            else:
                opens = isinstance(call, Open)
                operation = self._rank.open(call, frames) if opens else self._rank.operation(call)
                self._queue.append((call.number, operation))
        except Exception as error:  # noqa: BLE001  whatever fails is rank 0's to judge
            self._failed(call.number, error)

    def _advance(self, number: int, operation: Operation) -> bool | None:
        """Whether it waits; None: it has ended and was answered."""
        try:
            return next(operation)
        except StopIteration as stop:
            self._answer(number, stop.value)
        except Exception as error:  # noqa: BLE001  as above
            self._failed(number, error)
        return None

    def _answer(self, number: int, value: object) -> None:
        self._line.say(Answer(number=number, value=msgspec.Raw(encode(value)), memory=self._rank.memory()))

    def _failed(self, number: int, error: Exception) -> None:
        if not isinstance(error, CaesuraError):
            logger.error("a call of rank 0 failed", exc_info=error)
        failure = failure_of(
            error, out_of_memory=is_out_of_memory(error), follows=isinstance(error, AbandonedError)
        )
        self._line.say(Answer(number=number, failure=failure))
