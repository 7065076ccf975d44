"""Restart a scheduler that died or hangs, at the same endpoint.

Invariants:
- A scheduler that ends with status 0 was shut down and is not restarted, nor is one whose configuration is
  refused. One that cannot write its state file is started until it can, which counts as no restart.
- Delays grow; after ``max_restarts`` within ``restart_window_s`` it gives up, with the last reason.
- A scheduler that has not answered a status request for ``hang_timeout_s`` is killed; so is one that was told
  to end, and neither ends nor answers, after ``stop_silence_s``.
- The child outlives neither this process (the lifeline of ``launcher.py``) nor :meth:`Supervisor.close`.

One thread starts and watches the process; the methods only signal it.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from ...io_struct import ErrorCode
from ...process import private_directory
from ..connection.client_options import ConnectionOptions
from ..exceptions import EngineDied, EngineError, InternalError, TimedOut
from .launcher import USAGE_STATUS, Child, check_keys, engine_command, how_it_ended, option_value
from .restart_policy import RestartPolicy, Restarts, answers_until_it_ends, is_silent, require_keys

logger = logging.getLogger(__name__)
_NEVER_AGAIN = (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED, ErrorCode.UNSUPPORTED_MODEL)
"""Refused starts that need another configuration. Other reasons may pass, a lack of memory for example."""
_LAST_LINE = 300
"""Maximum characters of a scheduler's last line in the log."""


@dataclass(frozen=True, slots=True)
class Serving:
    """State: a scheduler is ready, after ``restarts`` restarts since the beginning."""

    endpoint: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Down:
    """State: no scheduler runs; the next start is in ``delay_s`` seconds."""

    reason: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """State: the supervisor has ended; ``error`` is None if it was told to."""

    error: EngineError | None


State = Serving | Down | Ended
Listener = Callable[[State], None]


class _Failure(NamedTuple):
    """The end of a scheduler that should not have ended."""

    reason: str
    final: EngineError | None = None
    """Error with which every other scheduler would end, too, or None."""
    waits: bool = False
    """True if the start is repeated until something outside is mended."""


class Supervisor:
    """Runs ``caesura scheduler`` with ``arguments`` again and again.

    Socket and state file default to a private directory, which it makes and removes.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        endpoint: str | None = None,
        policy: RestartPolicy | None = None,
        *,
        replica: str = "",
        environment: Mapping[str, str] | None = None,
        **keys: Unpack[ConnectionOptions],
    ) -> None:
        check_keys(keys)
        self._policy = policy = policy or RestartPolicy()
        if policy.hang_timeout_s > 0:
            require_keys(arguments, keys)
        self._command = engine_command(*arguments)
        self._cleanup = contextlib.ExitStack()
        has_state_file = option_value(arguments, "--state-file") is not None
        if endpoint is None or not has_state_file:
            directory = private_directory.make()
            self._cleanup.callback(private_directory.remove, directory)
            endpoint = endpoint or f"ipc://{directory}/{private_directory.SOCKET}"
            if not has_state_file:
                self._command += ["--state-file", f"{directory}/{private_directory.STATE_FILE}"]
        self.endpoint = endpoint
        """The address of all schedulers; a port 0 is replaced by the real one once a scheduler has served."""
        self.started: Future[Serving] = Future()
        """The first scheduler that serves, or the reason why none does."""
        self.name = replica or "the scheduler"
        self._logger = logging.LoggerAdapter(logger, {"replica": replica})
        self._environment = environment
        self._stop_timeout_s = policy.stop_s(arguments)
        self._keys = keys
        self._lock = threading.Lock()
        self._state: State | None = None
        self._listeners: list[Listener] = []
        self._child: Child | None = None
        self._stopping = threading.Event()
        self._restarts = Restarts(policy)
        self._thread = threading.Thread(target=self._run, name="caesura-supervisor", daemon=True)

    def start(self) -> Serving:
        """Begin, and return when a scheduler serves; raise the reason why none does."""
        self.begin()
        return self.started.result()

    def begin(self) -> None:
        """Start the first scheduler and return at once."""
        self._thread.start()

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with the present state now, with later ones in the supervisor's thread."""
        with self._lock:
            self._listeners.append(listener)
            if self._state is not None:
                listener(self._state)

    def signal(self, number: int) -> None:
        if (child := self._child) is not None:
            child.process.send_signal(number)

    def hurry(self) -> None:
        """End a drain that :meth:`close` waits for in another thread."""
        self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """Tell the scheduler to end, and return at once; :class:`Ended` follows. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.hurry()
        self.signal(signal.SIGCONT)  # a stopped process can end in order, too
        if (child := self._child) is not None:
            threading.Thread(target=self._limit_end, args=(child,), name="caesura-stop", daemon=True).start()

    def close(self) -> None:
        """:meth:`stop`, and wait for the end. Idempotent."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._cleanup.close()

    def _limit_end(self, child: Child) -> None:
        """Kill a scheduler that was told to end, if it is silent or takes longer than its time."""
        deadline, silence_s = time.monotonic() + self._stop_timeout_s, self._policy.stop_silence_s
        asks = self._policy.hang_timeout_s > 0 and self._stop_timeout_s >= silence_s
        if asks and is_silent(self.endpoint, self._keys, silence_s):
            deadline = 0.0
            if not child.wait(0.0):
                text = "%s has neither ended nor answered for %g s after SIGTERM, and is killed"
                self._logger.warning(text, self.name, silence_s)
        if not child.wait(max(0.0, deadline - time.monotonic())):
            child.process.kill()

    def _run(self) -> None:
        """Run schedulers until one ends as told, or as every other one would."""
        error: EngineError | None = None
        try:
            while error is None and not self._stopping.is_set():
                if (failure := self._run_once()) is None:
                    break
                if self._stopping.is_set():
                    self._logger.warning("%s, which was to end, %s", self.name, failure.reason)
                else:
                    error = failure.final or self._wait_to_restart(failure)
        except Exception as defect:  # noqa: BLE001  the end of a thread: its listeners must hear of it
            error = InternalError(f"the supervisor has failed: {type(defect).__name__}: {defect}")
        finally:
            self._cleanup.close()
            self._tell(Ended(None if self._stopping.is_set() else error))

    def _wait_to_restart(self, failure: _Failure) -> EngineError | None:
        """Wait for the time of the next start; return an error instead after too many."""
        plan = self._restarts.plan(waits=failure.waits)
        if plan is None:
            most, window_s = self._policy.max_restarts, self._policy.restart_window_s
            told = f"it was restarted {most} times within {window_s:g} s: giving up"
            return EngineDied(f"{self.name} {failure.reason}; {told}", restarts=len(self._restarts))
        delay, name = plan
        self._logger.warning("%s %s; %s in %.1f s", self.name, failure.reason, name, delay)
        self._tell(Down(failure.reason, delay))
        self._stopping.wait(delay)
        return None

    def _run_once(self) -> _Failure | None:
        try:
            child = Child([*self._command, "--endpoint", self.endpoint], environment=self._environment)
        except OSError as error:
            return _Failure(f"could not be started: {error}")
        self._child = child
        try:
            return None if self._stopping.is_set() else self._watch(child)
        finally:
            self._child = None
            child.end()

    def _watch(self, child: Child) -> _Failure | None:
        policy = self._policy
        try:
            self.endpoint = child.wait_ready(policy.startup_timeout_s)
        except EngineDied as error:
            wrong = error if child.process.returncode == USAGE_STATUS else None
            return _Failure(f"{child.ending(_LAST_LINE)} before it was ready", wrong)
        except TimedOut:
            child.process.kill()
            return _Failure(f"was not ready within {policy.startup_timeout_s:g} s and was killed")
        except EngineError as error:
            final = error if not self.started.done() or error.code in _NEVER_AGAIN else None
            return _Failure(f"refused to start: {error}", final, error.code == ErrorCode.STATE_FILE_ERROR)
        self._restarts.has_started()
        self._tell(Serving(self.endpoint, child.process.pid, len(self._restarts)))
        if not answers_until_it_ends(child, self.endpoint, self._keys, policy.hang_timeout_s):
            child.process.kill()
            child.wait(self._stop_timeout_s)
            return _Failure(f"did not answer its status for {policy.hang_timeout_s:g} s and was killed")
        if child.process.returncode != 0:
            return _Failure(child.ending(_LAST_LINE))
        self._logger.info("%s %s", self.name, how_it_ended(0))
        return None

    def _tell(self, state: State) -> None:
        with self._lock:
            self._state = state
            for listener in self._listeners:
                listener(state)
        if self.started.done():
            return
        if isinstance(state, Serving):
            self.started.set_result(state)
        elif isinstance(state, Ended):
            stopped = EngineDied("the scheduler was stopped before it was ready")
            self.started.set_exception(state.error or stopped)
