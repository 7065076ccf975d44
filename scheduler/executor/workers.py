"""Rank 0's connection to its workers: their processes, the socket to them, and who of them is lost.

Invariants:
- One socket sends, so every worker gets the same messages in the same order.
- Until all have joined, the last process that joins as a rank is that rank, and one that ends can come again.
- A worker that ends is noticed by a thread within milliseconds: collectives that wait for it are broken off,
  the loop is woken, and :class:`~..runtime.guard.EngineEndsError` is raised wherever rank 0 waits or looks.
- Nothing of the connection has a name after the last worker has come. Nothing waits for ever.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import monotonic

import msgspec
import zmq

from ... import __version__
from ...io_struct import CaesuraError, ErrorCode
from ..runtime.background import Wakeup
from ..runtime.engine_config import EngineConfig
from ..runtime.guard import EngineEndsError
from .rpc import Answer, Join, decode_said, encode
from .worker_socket import CONNECTION_LOST, WorkerSocket

logger = logging.getLogger(__name__)

REMINDERS = 20
"""Number of times that a wait for another rank is logged until it ends."""
_CLOSE_S = 2.0
_TURN_AWAY_S = 2.0
_HANDSHAKE_POLL_MS = 50
_MESSAGES_PER_RECEIVE = 256
_SAYS_MORE_S = 0.3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Workers:
    def __init__(self, config: EngineConfig) -> None:
        """Start the workers of this host; :meth:`await_all` waits for them."""
        self._ranks = range(1, config.tp)
        self._by_hand = range(config.tp - config.tp_joined, config.tp)
        self._join_timeout_s = config.join_timeout_s
        self.joined: dict[int, Join] = {}
        self.lost: str | None = None
        """Why a worker is lost, or None while all are there."""
        self.on_lost: Callable[[], None] = lambda: None
        """Breaks off what waits for a worker; called in any thread when one is lost."""
        self.alarm = Wakeup()
        self._closing = False
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._launched: list[LaunchedWorker] = []
        self._listener = WorkerSocket(config, self._connection_lost)
        self.socket = self._listener.socket
        self._poller = zmq.Poller()
        for each in (self.socket, self.alarm.fd):
            self._poller.register(each, zmq.POLLIN)
        try:
            for rank in range(1, config.tp - config.tp_joined):
                self._launched.append(LaunchedWorker(rank, self._listener.command(), self._lose))
        except BaseException:
            self.close()
            raise

    def require_all(self) -> None:
        if self.lost is None:
            return
        if self.lost == CONNECTION_LOST and (
            gone := [rank for rank in self._ranks if not self._reaches(rank)]
        ):
            names = (f"rank {rank} (pid {self.joined[rank].pid} on {self._host_name(rank)})" for rank in gone)
            self.lost = f"the connection to {', '.join(names)} has ended"
        raise EngineEndsError(CaesuraError(ErrorCode.ENGINE_DIED, f"the engine ends: {self.lost}"))

    def await_all(self) -> None:
        """Return when every worker has joined; from then on nobody else can. Raises as :meth:`wait`."""
        deadline = monotonic() + self._join_timeout_s
        waits = Waits(self._join_timeout_s)
        while missing := self._missing():
            if not missing.isdisjoint(self._by_hand):
                waits.say(f"rank 0 waits at {self._listener.address} for ranks {sorted(missing)}")
            self.wait(deadline, "join", missing)
            self.receive()
        self._listener.shut()

    @property
    def sharing(self) -> list[int]:
        """Number of ranks on the host of each rank, once all have joined."""
        hosts = [host_of(each) for each in (here(), *(self.joined[rank].host for rank in self._ranks))]
        return [hosts.count(host) for host in hosts]

    def _missing(self) -> set[int]:
        """Return the ranks that have not joined, or have ended since; the others hear that rank 0 waits."""
        for rank in [rank for rank in self.joined if not self._reaches(rank)]:
            logger.warning(
                "rank %d (pid %d) has ended before all were there", rank, self.joined.pop(rank).pid
            )
        return set(self._ranks) - self.joined.keys()

    def _reaches(self, rank: int) -> bool:
        """Return True if there is a connection to a worker, which is told to wait for a call."""
        try:
            self.socket.send_multipart([identity_of(rank), encode((0, "wait", ()))])
        except zmq.ZMQError:
            return False
        return True

    def _host_name(self, rank: int) -> str:
        return self.joined[rank].host.partition("/")[0]

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        self.require_all()
        for rank in self._ranks:
            self.send_to(rank, frames)

    def receive(self) -> list[tuple[int, Answer]]:
        """Return answers that have come, if not all: who sends without end holds nothing up."""
        self.require_all()
        answers: list[tuple[int, Answer]] = []
        for _ in range(_MESSAGES_PER_RECEIVE):
            try:
                identity, header, *_ = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            rank = rank_of(identity.bytes)
            if (answer := self.answer_of(identity.bytes, header.bytes)) is not None:
                answers.append((rank, answer))
            elif rank in self.joined:
                self._listener.connections[rank] = header.get(zmq.SRCFD)
        return answers

    def wait(self, deadline: float, what: str, missing: Collection[int]) -> None:
        """Block a second at most for :meth:`receive`; EngineEndsError: one is lost, or past ``deadline``."""
        left = deadline - monotonic()
        if left <= 0:
            text = f"the engine ends: ranks {sorted(missing)} did not {what} in time"
            raise EngineEndsError(CaesuraError(ErrorCode.DEADLINE_EXCEEDED, text))
        self._poller.poll(round(1000 * min(left, 1.0)))
        self.require_all()
        self._listener.answer_handshakes()

    def close(self, *, for_good: bool = False) -> None:
        """End the workers, by force where they do not end by themselves. Idempotent.

        Those of other nodes that do not end ``for_good`` are started again there.
        """
        if self._closing:
            return
        with self._lock:
            self._closing = True
        with contextlib.suppress(zmq.ZMQError, EngineEndsError):
            self.send([encode((0, "stop", (for_good,)))])
        self._listener.close()
        deadline = monotonic() + _CLOSE_S
        for worker in self._launched:
            worker.close(deadline)
        self.alarm.close()

    def answer_of(self, identity: bytes, header: bytes) -> Answer | None:
        """Return the answer of a worker; let one join; drop what anybody else sends."""
        try:
            said = decode_said(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            logger.warning("something that is no worker has sent %d bytes", len(header))
            return None
        if isinstance(said, Join):
            self._join(identity, said)
            return None
        return said if rank_of(identity) in self.joined else None

    def _join(self, identity: bytes, join: Join) -> None:
        problem = None
        if join.version != __version__:
            problem = f"it is caesura {join.version}, and rank 0 is {__version__}"
        elif join.rank not in self._ranks or identity != identity_of(join.rank):
            problem = f"there are ranks 1 to {len(self._ranks)} beside rank 0"
        if problem is not None:
            logger.warning("refused a worker that wants to be rank %d: %s", join.rank, problem)
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                self.socket.send_multipart([identity, encode((0, "refuse", (problem,)))])
            return
        if (before := self.joined.get(join.rank)) is not None:
            name = self._host_name(join.rank)
            logger.warning("rank %d joins again, instead of pid %d on %s", join.rank, before.pid, name)
        self.joined[join.rank] = join
        logger.info("rank %d has joined: pid %d on %s", join.rank, join.pid, self._host_name(join.rank))

    def send_to(self, rank: int, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self.socket.send_multipart([identity_of(rank), *frames])
        except zmq.ZMQError as error:  # nobody is there: its thread says why in a moment
            self._connection_lost(f"rank {rank} cannot be reached: {error}")
            self.require_all()

    def _connection_lost(self, reason: str) -> None:
        """Lose a worker, but let the thread of one that was launched here say more first."""
        self._is_lost.wait(_SAYS_MORE_S)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._closing or self.lost is not None:
                return
            self.lost = reason
        self._is_lost.set()
        self.on_lost()
        self.alarm.set()


class Waits:
    """The log lines of a wait for another rank: one at once, and more at equal intervals."""

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / REMINDERS
        self._timeout_s = timeout_s
        self._began = self._next = monotonic()

    def say(self, what: str) -> None:
        """Log what is waited for, and how long it has been, if an interval has passed."""
        if (now := monotonic()) < self._next:
            return
        self._next = now + self.interval_s
        logger.info("%s: %.0f s of %g s", what, now - self._began, self._timeout_s)


def turn_away(config: EngineConfig, reason: str) -> None:
    """Tell the workers that are started by hand why rank 0 cannot start: they wait for it to listen."""
    expected = set(range(config.tp - config.tp_joined, config.tp))
    deadline = monotonic() + _TURN_AWAY_S
    try:
        listener = WorkerSocket(config, lambda _: None)
    except CaesuraError:  # the address is what is refused
        return
    while expected and monotonic() < deadline:
        listener.answer_handshakes()
        if listener.socket.poll(_HANDSHAKE_POLL_MS):
            identity, *_ = listener.socket.recv_multipart()
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                refusal = encode((0, "refuse", (f"it cannot start: {reason}",)))
                listener.socket.send_multipart([identity, refusal])
            expected.discard(rank_of(identity))
    listener.close()


class LaunchedWorker:
    """A worker on rank 0's host; never outlives it, as rank 0 alone can write the pipe that it watches."""

    def __init__(self, rank: int, command: Sequence[str], on_end: Callable[[str], None]) -> None:
        self._rank = rank
        reader, self._writer = os.pipe()
        try:
            self.process = Popen(  # noqa: S603 (our own interpreter and module)
                [*command, "--rank", str(rank), "--lifeline-fd", str(reader)],
                stdin=DEVNULL,
                pass_fds=(reader,),
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
        self._thread = threading.Thread(
            target=self._watch, args=(on_end,), name=f"caesura-rank-{rank}", daemon=True
        )
        self._thread.start()

    def close(self, deadline: float) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    def _watch(self, on_end: Callable[[str], None]) -> None:
        status = self.process.wait()
        how = f"ended with exit status {status}"
        if status < 0:
            try:
                how = f"was killed by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was killed by signal {-status}"
        on_end(f"rank {self._rank} (pid {self.process.pid}) {how}")


def here() -> str:
    """Return the name of this host and what tells it from others of that name."""
    return f"{socket.gethostname()}/{_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"


def host_of(name: str) -> str:
    """Return the machine of a host named by :func:`here`; containers have names of their own."""
    host, _, boot = name.partition("/")
    return boot or host


def identity_of(rank: int) -> bytes:
    return b"rank %d" % rank


def rank_of(identity: bytes) -> int:
    """Return the rank whose name ``identity`` is, or 0 if it is no worker's."""
    number = identity.removeprefix(b"rank ")
    rank = int(number) if number.isdigit() else 0
    return rank if identity == identity_of(rank) else 0
