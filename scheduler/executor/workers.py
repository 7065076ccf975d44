"""Rank 0's end of the line: the processes of the other ranks, the socket to them, and what they have answered.

Invariants:
- One socket sends, so every worker gets the same calls in the same order.
- A worker that ends is noticed by a thread within milliseconds, whatever the engine does at that moment: collectives that wait
  for it are broken off, the loop is woken, and :class:`~..guard.EngineEndsError` is raised wherever rank 0 waits or looks.
- Workers that were started here end with this process: they hold the read end of a pipe whose write end only it has. Nothing of
  the line has a name after the last worker has come.
- Nothing waits for ever: for workers to come :data:`JOIN_S`, for an answer :data:`ANSWER_S`.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import msgspec
import zmq

from ... import __version__
from ...io_struct import CaesuraError, ErrorCode
from ..runtime.background import Wakeup
from ..runtime.config import EngineConfig
from ..runtime.guard import EngineEndsError
from .launch import LaunchedWorker
from .listener import Listener
from .messages import Agreed, Answer, Call, Join, Memory, Offer, Refused, Start, Stop, decode_said, encode

logger = logging.getLogger(__name__)

JOIN_S = 600.0
"""How long rank 0 waits until every worker has come, and until each has built what it is made of."""
ANSWER_S = 600.0
"""How long rank 0 waits for an answer that holds up its loop. Its watchdog is earlier by default."""
_CLOSE_S = 2.0
_SAYS_MORE_S = 0.3


class Workers:
    """All ranks but this one."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the workers of this host; :meth:`await_all` waits for them.

        Raises:
            CaesuraError: ``invalid_request`` or ``endpoint_in_use``, where others are to join.
        """
        self.size = config.tp
        self.joined: dict[int, Join] = {}
        self.memory: dict[int, Memory] = {}
        """The last reading of each."""
        self.lost: str | None = None
        """Why the group is no more. None: all are there."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called in any thread when a worker is lost: breaks off what waits for it."""
        self._numbers = 0
        self._answers: dict[int, dict[int, Answer]] = {}
        self._asked: set[int] = set()
        """Calls whose answers somebody will ask for."""
        self._unread: dict[int, int] = {}
        """Of calls whose answers nobody asks for: how many are to come."""
        self._offers: dict[int, list[int]] = {}
        self._closing = False
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._alarm = Wakeup()
        self._launched: list[LaunchedWorker] = []
        self._listener = Listener(config, self._connection_lost)
        self._socket = self._listener.socket
        self._poller = zmq.Poller()
        for each in (self._socket, self._alarm.fd):
            self._poller.register(each, zmq.POLLIN)
        try:
            for rank in range(1, config.tp - config.tp_joined):
                self._launched.append(LaunchedWorker(rank, self._listener.command(), self._lose))
        except BaseException:
            self.close()
            raise

    @property
    def heard(self) -> dict[Any, Callable[[], None]]:
        """What wakes the engine's loop, and what it does then."""
        return {self._socket: self.receive, self._alarm.fd: self.require_all}

    def require_all(self) -> None:
        """Raise if a worker is lost.

        Raises:
            EngineEndsError: one is.
        """
        if self.lost is not None:
            raise EngineEndsError(CaesuraError(ErrorCode.ENGINE_DIED, f"the engine ends: {self.lost}"))

    def await_all(self) -> None:
        """Return when every worker has come; the line is closed to others then.

        Raises:
            CaesuraError: ``deadline_exceeded``; a worker was refused.
        """
        deadline = monotonic() + JOIN_S
        while len(self.joined) < self.size - 1:
            self._wait(deadline, "join")
        self._listener.shut(self.size - 1)

    def send(self, call: Call | Stop | Agreed, frames: Sequence[bytes | memoryview] = ()) -> None:
        """To every worker."""
        self.require_all()
        header = encode(call)
        for rank in range(1, self.size):
            self._send_to(rank, [header, *frames])

    def start(self, call: Callable[[int, int], Start]) -> int:
        """Send each rank its own start, ``call(number, rank)``; returns the number."""
        number = self.next_number()
        for rank in range(1, self.size):
            self._send_to(rank, [encode(call(number, rank))])
        return number

    def next_number(self) -> int:
        """Of the next call."""
        self._numbers += 1
        self._asked.add(self._numbers)
        return self._numbers

    def answers(self, number: int) -> list[Answer] | None:
        """What all workers have answered to a call, in the order of ranks, once; None: not all have."""
        self.receive()
        found = self._answers.get(number)
        if found is None or len(found) < self.size - 1:
            return None
        del self._answers[number]
        self._asked.discard(number)
        return [found[rank] for rank in sorted(found)]

    def failed(self, number: int) -> bool:
        """Whether some worker has answered a call with a failure."""
        self.receive()
        return any(answer.failure is not None for answer in self._answers.get(number, {}).values())

    def drop(self, number: int) -> None:
        """Nobody asks for the answers to a call any more; those that still come go unread."""
        missing = self.size - 1 - len(self._answers.pop(number, {}))
        if missing and number in self._asked:
            self._unread[number] = missing
        self._asked.discard(number)

    def wait(self, number: int) -> list[Answer]:
        """:meth:`answers`, waited for."""
        deadline = monotonic() + ANSWER_S
        while (answers := self.answers(number)) is None:
            self._wait(deadline, "answer")
        return answers

    def offers(self, start: int) -> list[int]:
        """The next number that each worker offers.

        Raises:
            CaesuraError: one has failed to start, by call number ``start``.
        """
        deadline = monotonic() + JOIN_S
        while not all(self._offers.get(rank) for rank in range(1, self.size)):
            if self.failed(start):
                raise_failures(self._answers[start])
            self._wait(deadline, "build its part of the model")
        return [self._offers[rank].pop(0) for rank in range(1, self.size)]

    def receive(self) -> None:
        """Take in what has come.

        Raises:
            EngineEndsError: a worker is lost.
        """
        self.require_all()
        while True:
            try:
                identity, header, *_ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(identity, header)

    def close(self) -> None:
        """End the workers, by force where they do not end by themselves. Idempotent."""
        if self._closing:
            return
        with self._lock:
            self._closing = True
        with contextlib.suppress(zmq.ZMQError, EngineEndsError):
            self.send(Stop())
        self._listener.close()
        deadline = monotonic() + _CLOSE_S
        for worker in self._launched:
            worker.close(deadline)
        self._alarm.close()

    def _wait(self, deadline: float, what: str) -> None:
        """For something to come."""
        left = deadline - monotonic()
        if left <= 0:
            missing = sorted(set(range(1, self.size)) - self.joined.keys()) or "some"
            raise EngineEndsError(
                CaesuraError(
                    ErrorCode.DEADLINE_EXCEEDED, f"the engine ends: ranks {missing} did not {what} in time"
                )
            )
        for each, _ in self._poller.poll(round(1000 * min(left, 1.0))):
            if each == self._alarm.fd:
                self.require_all()
        self._listener.answer_handshakes()
        self.receive()

    def _take(self, identity: bytes, header: bytes) -> None:
        rank = rank_of(identity)
        try:
            said = decode_said(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            logger.warning("something that is no worker has sent %d bytes", len(header))
            return
        if isinstance(said, Join):
            self._join(identity, said)
            return
        if rank not in self.joined:
            return
        if isinstance(said, Offer):
            self._offers.setdefault(rank, []).append(said.value)
            return
        if said.memory is not None:
            self.memory[rank] = said.memory
        if (missing := self._unread.pop(said.number, 0)) > 1:
            self._unread[said.number] = missing - 1
        elif not missing:
            self._answers.setdefault(said.number, {})[rank] = said

    def _join(self, identity: bytes, join: Join) -> None:
        problem = None
        if join.version != __version__:
            problem = f"it is caesura {join.version}, and rank 0 is {__version__}"
        elif not 0 < join.rank < self.size or identity != identity_of(join.rank):
            problem = f"there are ranks 1 to {self.size - 1} beside rank 0"
        elif join.rank in self.joined:
            problem = "that rank has joined"
        if problem is not None:
            logger.warning("refused a worker that wants to be rank %d: %s", join.rank, problem)
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                self._socket.send_multipart([identity, encode(Refused(message=problem))])
            return
        self.joined[join.rank] = join
        logger.info("rank %d has joined: pid %d on %s", join.rank, join.pid, join.host.partition("/")[0])

    def _send_to(self, rank: int, frames: list[bytes | memoryview]) -> None:
        try:
            self._socket.send_multipart([identity_of(rank), *frames])
        except zmq.ZMQError as error:  # nobody is there: its thread says why in a moment
            self._connection_lost(f"rank {rank} cannot be reached: {error}")
            self.require_all()

    def _connection_lost(self, reason: str) -> None:
        """In a thread. Of a worker that was launched here its own thread says more, in a moment."""
        self._is_lost.wait(_SAYS_MORE_S)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        """In any thread."""
        with self._lock:
            if self._closing or self.lost is not None:
                return
            self.lost = reason
        self._is_lost.set()
        self.on_lost()
        self._alarm.set()


def identity_of(rank: int) -> bytes:
    """A worker's name on the socket."""
    return b"rank %d" % rank


def rank_of(identity: bytes) -> int:
    """Whose name it is; 0: no worker's."""
    number = identity.removeprefix(b"rank ")
    rank = int(number) if number.isdigit() else 0
    return rank if identity == identity_of(rank) else 0


def raise_failures(answers: dict[int, Answer], own: CaesuraError | None = None) -> None:
    """Raise what some ranks have failed with, each with its reason.

    Args:
        own: of rank 0. None: it has not failed.

    Raises:
        CaesuraError: the code and detail of the first rank that failed by itself, and in ``ranks`` the reason of each that did.
    """
    failures = {
        rank: answer.failure for rank, answer in sorted(answers.items()) if answer.failure is not None
    }
    if not failures:
        if own is not None:
            raise own
        return
    failures = {rank: failure for rank, failure in failures.items() if not failure.follows} or failures
    reasons = {str(rank): failure.message for rank, failure in failures.items()}
    if own is not None:
        reasons = {"0": own.message, **reasons}
        code, detail = own.code, own.detail
    else:
        first = next(iter(failures.values()))
        code, detail = first.code, first.detail
    said = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
    raise CaesuraError(code, said, **{**detail, "ranks": reasons})
