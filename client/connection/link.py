"""The connection to one scheduler, without blocking and without a thread of its own.

Invariants:
- A connection belongs to one incarnation of an engine: other messages wait for its hello to be answered. None
  is ever restored, so messages for an engine that has ended cannot reach the next one.
- When a connection is lost, all that :meth:`Link.send` got before has failed, even if noticed later.
- Everything that the engine sent before its end is delivered before the loss is reported.
- The owner pumps the socket (``shared_socket.py``), and calls :meth:`Link.pump` at :attr:`Link.deadline`.
  While nothing is pending there is no deadline.

States: *trying* to connect while something waits → *greeting* (the engine loads) → *ready* → *lost* (back to
trying with a new connection; final if the watched process has exited or speaks another version).
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from ... import __version__
from ...io_struct import (
    WIRE_VERSION,
    ErrorCode,
    ErrorReply,
    HelloReqInput,
    HelloReqOutput,
    decode_reply,
    encode,
    salvage_reply,
)
from ..exceptions import EngineDied, EngineError, VersionMismatch, raise_for
from .client_options import ChannelOptions
from .endpoints import HANDSHAKE_FAILURES, check_endpoint, nobody_at, why_refused
from .shared_socket import SharedSocket

EXIT_GRACE_S = 1.0
"""Seconds that a closed connection and the exit of its process wait for each other."""
RETRY_S = 0.1
RECONNECT_S = 1.0
"""Seconds after a loss in which requests wait for a successor; later ones fail with the first failed try."""
ATTEMPT_S = 1.0
STARTING_S = 300.0
"""Seconds that an engine may load after accepting the connection; only with a keepalive timeout."""
LATE_S = 1.0
"""Whoever looks at the clock this many seconds late may have been sent much meanwhile."""
SECOND_LOOK_S = 5.0
"""Seconds that it then listens before it calls the engine silent: more than two keepalives."""

Frames = Sequence[bytes | memoryview]


class Link:
    """One connection at a time, over a socket that other links may share.

    ``pending`` tells if anything is unanswered, ``receive`` gets messages, ``lost`` the error and True if it
    is final; ``looked`` is called when :attr:`deadline` may have changed.
    """

    def __init__(
        self,
        endpoint: str,
        options: ChannelOptions,
        shared: SharedSocket,
        *,
        pending: Callable[[], bool],
        receive: Callable[[list[bytes]], None],
        lost: Callable[[EngineError, bool], None],
        looked: Callable[[], object] = lambda: None,
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.incarnation: str | None = None
        self._connect_timeout = options.connect_timeout
        self._keepalive_timeout = options.keepalive_timeout
        self._waits_for_engine = options.waits_for_engine
        self._keys = options.keys
        self._pending = pending
        self._receive = receive
        self._lost = lost
        self._looked = looked
        self._shared = shared
        self._name = b""
        """Name of the connection on the socket."""
        self._expects_exit = False
        self._exit_reason: str | None = None
        self._held: list[Frames] = []
        self._grace_until: float | None = None
        """Until when requests wait after a loss or a vain wait; None if connected since."""
        self._is_only_try = False
        self._was_refused = False
        """The last try that ended found nobody; with ``_was_cut_off``, somebody who broke it off."""
        self._was_silent = False
        """The engine was lost by a silence, and has not answered since."""
        self._unheard: str | None = None
        """Why the last handshake failed, if known. It outlives a next try that nobody answers in time."""
        self._patience: float | None = None
        self._retry_at: float | None = None
        self._settle_at: float | None = None
        self._silence: float | None = None
        shared.join()
        try:
            self._open(connect=True)
        except BaseException:
            shared.leave(self)
            raise

    @property
    def deadline(self) -> float | None:
        """Time at which :meth:`pump` must be called; None: only when a socket is readable."""
        if self._ready and self._settle_at is None:
            return self._silence
        times = (self._patience, self._retry_at, self._settle_at, self._silence)
        return min((at for at in times if at is not None), default=None)

    def send(self, frames: Frames) -> None:
        """Hand over one message; never blocks. Buffers must not change before the answer."""
        self._shared.look_soon(self)
        if self._ready:
            self._shared.send(self._name, frames)
            if self._silence is None:
                self._listen_from_now()
            return
        self._held.append(frames)
        if self._patience is None:
            self._begin_to_wait()

    def expect_exit(self) -> None:
        """Expect the exit of a watched process to be reported, which explains a lost connection."""
        self._expects_exit = True

    def engine_exited(self, reason: str) -> None:
        self._exit_reason = reason
        if not self._disconnected:
            self._settle_at = time.monotonic() + EXIT_GRACE_S

    def notice_loss(self) -> None:
        """Report a connection that has gone meanwhile, at little cost."""
        self._shared.notice_losses()

    def pump(self) -> None:
        """Take what has come, for other links as well, and look at the clock."""
        self._shared.look_soon(self)
        self._shared.pump()

    def close(self) -> None:
        """Close without lingering; unsent messages are dropped."""
        self._shared.leave(self)

    def _open(self, *, connect: bool, follows: bool = False) -> None:
        self._follows = follows
        self._connected = self._disconnected = self._ready = False
        self._refusal: EngineError | None = None
        self._try_failed = self._was_cut_off = False
        self._descriptor = -1
        self._tried_at = time.monotonic()
        if connect:
            self._name = self._shared.connect(self, self._keys)
            major, minor = WIRE_VERSION
            client = f"caesura {__version__} for Python"
            hello = HelloReqInput(wire_major=major, wire_minor=minor, client=client)
            self._shared.send(self._name, (encode(hello),))

    def take(self, frames: list[bytes]) -> None:
        """Take one message of the engine."""
        if self._ready:
            self._receive(frames)
        elif self._refusal is None:
            self._take_hello(frames[0])
        self._listen_from_now()

    def _take_hello(self, frame: bytes) -> None:
        try:
            self.incarnation = incarnation_in(frame, self.endpoint)
        except EngineError as error:
            self._refusal = error
            return
        self._connected = self._ready = True
        self._patience = self._grace_until = None
        self._is_only_try = self._was_silent = False
        for frames in self._held:
            self._shared.send(self._name, frames)
        self._held.clear()

    def take_event(self, event: int, value: int) -> None:
        """Take an event of the connection, or a late one of its predecessor at the same endpoint."""
        if self._disconnected or (event == zmq.EVENT_DISCONNECTED and value != self._descriptor):
            return
        if event == zmq.EVENT_CONNECTED:
            self._descriptor = value
            return
        if event == zmq.EVENT_CONNECT_RETRIED and self._follows and not (self._connected or self._try_failed):
            # This try has failed, or its predecessor: another one tells, even if this was the only one.
            self._try_failed = True
            self._retry_at = self._tried_at + RETRY_S if self._held else None
            return
        if event & HANDSHAKE_FAILURES:
            self._unheard = why_refused(event, value, self._keys) or self._unheard
            if self._unheard is not None and event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._patience = time.monotonic() if self._held else None  # others would end the same way
                # At once, as libzmq has ended it and would take a later connection at its address for it.
                self._shared.disconnect(self)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected, self._was_refused = True, False
            self._unheard = None
            self._retry_at = None
            if self._held and not self._was_silent:
                self._patience = self._greeting_limit()
        elif not self._connected:
            self._try_failed = True
            self._was_cut_off |= bool(event & HANDSHAKE_FAILURES)
            self._was_refused = not self._was_cut_off
            if self._was_refused:
                self._unheard = None  # whoever refused the handshake listens there no more
            if self._held and not self._is_only_try:
                self._retry_at = self._tried_at + RETRY_S
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected = True
            self._settle_at = time.monotonic() + (EXIT_GRACE_S if self._expects_exit else 0.0)

    def look_at_the_clock(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self._disconnected:
            if self._exit_reason is not None or _is_due(self._settle_at, now):
                lost = f"the connection to {self.endpoint} was lost"
                self._give_up(EngineDied(self._exit_reason or lost))
        elif self._refusal is not None:
            self._give_up(self._refusal)
        elif self._exit_reason is not None and _is_due(self._settle_at, now):
            self._give_up(EngineDied(self._exit_reason))
        elif self._held and self._is_only_try and self._try_failed and self._retry_at is None:
            self._give_up(EngineDied(self._vain_wait()))
        elif _is_due(self._patience, now):
            self._was_silent = self._connected
            self._give_up(EngineDied(self._exit_reason or self._vain_wait()))
        elif _is_due(self._silence, now):
            self._take_silence(now)
        elif _is_due(self._retry_at, now):
            self._retry_at = None
            self._shared.disconnect(self)
            self._open(connect=True)
        self._looked()

    def _take_silence(self, now: float) -> None:
        assert self._silence is not None
        if not self._pending():
            self._silence = None
        elif now - self._silence > LATE_S:
            self._silence = now + SECOND_LOOK_S
        else:
            self._was_silent = True
            silent = f"has been silent for {self._keepalive_timeout} s: it hangs"
            self._give_up(EngineDied(f"the engine at {self.endpoint} {silent}"))

    def _listen_from_now(self) -> None:
        if self._keepalive_timeout is not None and self._ready:
            self._silence = time.monotonic() + self._keepalive_timeout if self._pending() else None

    def _begin_to_wait(self) -> None:
        now = time.monotonic()
        if self._connected:
            self._patience = self._greeting_limit()
        elif self._connect_timeout is not None:
            if self._grace_until is None:
                self._is_only_try = not self._waits_for_engine
                self._patience = now + self._connect_timeout
            elif now < self._grace_until:
                self._patience = self._grace_until
            else:
                self._is_only_try = True
                self._patience = now + RETRY_S + ATTEMPT_S
        if self._try_failed and self._retry_at is None:
            self._retry_at = self._tried_at + RETRY_S

    def _greeting_limit(self) -> float | None:
        if self._was_silent:
            return time.monotonic() + ATTEMPT_S
        return None if self._keepalive_timeout is None else time.monotonic() + STARTING_S

    def _vain_wait(self) -> str:
        if self._unheard is not None:
            return f"the scheduler at {self.endpoint} cannot be used: {self._unheard}"
        if self._connected:
            return f"the engine at {self.endpoint} accepted the connection and then said nothing"
        if self._was_refused:
            return nobody_at(self.endpoint)
        if self._was_cut_off:
            return (
                f"what listens at {self.endpoint} broke the connection off: "
                "it is no scheduler, one that asks for keys (curve_server_key), or one that ends"
            )
        return (
            f"no scheduler answered at {self.endpoint} within {self._connect_timeout} s; "
            "is what listens there a scheduler?"
        )

    def _give_up(self, error: EngineError) -> None:
        if self._refusal is None:
            self._shared.drain_ended(self)  # libzmq reports the disconnect after the last message, not before
        final = self._exit_reason is not None or isinstance(error, VersionMismatch)
        self._held.clear()
        self._is_only_try = False
        self._grace_until = time.monotonic()
        if self._connected:
            self._grace_until += min(RECONNECT_S, self._connect_timeout or 0.0)
        self._patience = self._retry_at = self._settle_at = self._silence = None
        if self._connected or final:
            refused = self._refusal is not None
            self._shared.disconnect(self)
            self._open(connect=not (final or refused), follows=True)
            self._try_failed = refused  # who refuses a hello would refuse the next one at once
        self._lost(error, final)


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and now >= at


def incarnation_in(frame: bytes, endpoint: str) -> str:
    """Return the incarnation of the engine that has answered, or raise VersionMismatch."""
    try:
        answer = decode_reply(frame)
    except msgspec.DecodeError as error:
        unread = salvage_reply(frame)
        what = f"unknown (its {unread.type or 'first message'} cannot be read: {error})"
        raise _mismatch(endpoint, what) from error
    if isinstance(answer, ErrorReply):
        if answer.code == ErrorCode.VERSION_MISMATCH:
            raise _mismatch(endpoint, str(answer.detail.get("engine") or f"unknown ({answer.message})"))
        if answer.code == ErrorCode.MALFORMED_MESSAGE:
            raise _mismatch(endpoint, "0 (it knows no hello)")
        raise_for(answer)
    if not isinstance(answer, HelloReqOutput):
        raise _mismatch(endpoint, f"unknown (it answers a hello with {type(answer).__name__})")
    if answer.wire_major != WIRE_VERSION[0]:
        raise _mismatch(endpoint, f"{answer.wire_major}.{answer.wire_minor}")
    return answer.incarnation


def _mismatch(endpoint: str, engine: str) -> VersionMismatch:
    ours = ".".join(map(str, WIRE_VERSION))
    return VersionMismatch(
        f"this client (caesura {__version__}) speaks wire {ours}, "
        f"the engine at {endpoint} speaks wire {engine}",
        client=ours,
        engine=engine,
    )
