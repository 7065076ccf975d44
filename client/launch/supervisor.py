"""Restart a scheduler that died or hangs: same command, same endpoint, bounded number of restarts.

Invariants:
- A scheduler that ends with status 0 was shut down and is not restarted, nor is one whose configuration is
  refused.
- One that cannot write its state file is started again until it can; these starts do not count as restarts.
- The delay between restarts grows. After ``max_restarts`` within ``window_s`` seconds the supervisor gives
  up, with the last reason. Each restart is logged in one line, with its reason, before it begins.
- A scheduler that has not answered a status request for ``hang_timeout_s`` is killed. So is one that was told
  to end, and neither ends nor answers, after STOP_SILENCE_S.
- The child outlives neither this process (the lifeline of ``launcher.py``) nor :meth:`Supervisor.close`.

States: *starting* → *serving* → *down* (waiting to start again) → *starting* …, and *ended* for good from any
of them. One thread starts and watches the process; the methods only signal this thread.
"""

import logging
import queue
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...io_struct import CaesuraError, ErrorCode
from ...process import private_directory
from ..connection.blocking import ControlClient
from ..connection.curve import ClientKeys, KeyOrFile
from ..exceptions import EngineDied, EngineError, InternalError, TimedOut
from .launcher import USAGE_STATUS, Child, how_it_ended

logger = logging.getLogger(__name__)
_NEVER_AGAIN = (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED, ErrorCode.UNSUPPORTED_MODEL)
"""Refused starts that need another configuration. Other reasons may pass, a lack of memory for example."""
_LAST_LINE = 300
"""Maximum characters of a scheduler's last line in the log."""
_PROBES_PER_HANG = 4
_LONGEST_PROBE_INTERVAL_S = 5.0
STOP_SILENCE_S = 5.0
"""Seconds that a scheduler told to end may take to end or to answer; one that answers has ``stop_timeout_s``.
"""
DEFAULT_NAME = "the scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    max_restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    """Seconds before the first restart of a window; the delay doubles with each further one."""
    longest_delay_s: float = 30.0
    hang_timeout_s: float = 120.0
    """Maximum seconds without an answer to a status request; 0 disables the check, also at the end."""
    startup_timeout_s: float = 600.0
    stop_timeout_s: float = 60.0
    """Seconds between SIGTERM and SIGKILL at the end."""

    def delay(self, restarts: int) -> float:
        return float(min(self.longest_delay_s, self.first_delay_s * 2 ** min(restarts, 30)))


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


class _Failure(Exception):  # noqa: N818  (a failure of the scheduler, not of this module)
    """A scheduler ended that should not have; ``final``: another would fail alike, with this error."""

    def __init__(self, reason: str, final: EngineError | None = None, *, waits: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        self.waits = waits


class Supervisor:
    """Runs ``command`` with ``--endpoint``, ``--ready-fd`` and ``--lifeline-fd`` appended, again and again.

    ``directory`` is removed at the end, if given. ``name`` names the scheduler in the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        endpoint: str,
        *,
        policy: RestartPolicy | None = None,
        directory: Path | None = None,
        curve_server_key: KeyOrFile | None = None,
        curve_client_key_file: KeyOrFile | None = None,
        name: str = DEFAULT_NAME,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ClientKeys.read(curve_server_key, curve_client_key_file)  # refused before anything is started
        self.endpoint = endpoint
        """The address of all schedulers; a port 0 is replaced by the real one once a scheduler has served."""
        self._name = name
        self._logger = logging.LoggerAdapter(logger, {"replica": "" if name == DEFAULT_NAME else name})
        self._environment = environment
        self._command = list(command)
        self._policy = policy or RestartPolicy()
        self._directory = directory
        self._keys = curve_server_key, curve_client_key_file
        self._lock = threading.Lock()
        self._state: State | None = None
        self._listeners: list[Listener] = []
        self._child: Child | None = None
        self._stopping = threading.Event()
        self._restarts: deque[float] = deque()
        self._num_restarts = self._num_waits = 0
        self._has_served = False
        self._thread = threading.Thread(target=self._run, name="caesura-supervisor", daemon=True)

    def start(self) -> Serving:
        """Begin, and return when a scheduler serves; raise the reason why none does."""
        states: queue.SimpleQueue[State] = queue.SimpleQueue()
        listener = states.put
        self.begin(listener)
        try:
            while True:
                state = states.get()
                if isinstance(state, Serving):
                    return state
                if isinstance(state, Ended):
                    raise state.error or EngineDied("the scheduler was stopped before it was ready")
        finally:
            self.unsubscribe(listener)

    def begin(self, listener: Listener) -> None:
        """Start the first scheduler and return at once; ``listener`` is subscribed."""
        self.subscribe(listener)
        self._thread.start()

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)
            if self._state is not None:
                listener(self._state)

    def unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def signal(self, number: int) -> None:
        """Send a signal to the scheduler, if there is one."""
        child = self._child
        if child is not None:
            with suppress(ProcessLookupError):
                child.process.send_signal(number)

    def hurry(self) -> None:
        """End a drain that :meth:`close` waits for in another thread."""
        self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """Tell the scheduler to end, and return at once; :class:`Ended` follows. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process can end in order, too
        child = self._child
        if child is not None:
            threading.Thread(target=self._limit_end, args=(child,), name="caesura-stop", daemon=True).start()

    def close(self) -> None:
        """:meth:`stop`, and wait for the end. Idempotent."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        elif self._directory is not None:
            private_directory.remove(self._directory)

    def _limit_end(self, child: Child) -> None:
        """Kill a scheduler that was told to end, if it is silent or takes longer than ``stop_timeout_s``."""
        policy, deadline = self._policy, time.monotonic() + self._policy.stop_timeout_s
        try:
            if policy.hang_timeout_s > 0 and policy.stop_timeout_s >= STOP_SILENCE_S:
                with self._probing_client(STOP_SILENCE_S) as client:
                    client.status(timeout=STOP_SILENCE_S)
        except TimedOut:
            if not child.wait(0.0):
                self._logger.warning(
                    "%s has neither ended nor answered for %g s after SIGTERM, and is killed",
                    self._name, STOP_SILENCE_S,
                )  # fmt: skip
                child.process.kill()
        except CaesuraError:  # a refusal is an answer, and so is the end
            pass
        if not child.wait(max(0.0, deadline - time.monotonic())):
            child.process.kill()

    def _run(self) -> None:
        error: EngineError | None = None
        try:
            error = self._supervise()
        except Exception as defect:  # noqa: BLE001  the end of a thread: its listeners must hear of it
            error = InternalError(f"the supervisor has failed: {type(defect).__name__}: {defect}")
        finally:
            if self._directory is not None:
                private_directory.remove(self._directory)
            self._tell(Ended(None if self._stopping.is_set() else error))

    def _supervise(self) -> EngineError | None:
        """Run schedulers until the last one; return the error to end with, if any."""
        while not self._stopping.is_set():
            try:
                self._run_once()
            except _Failure as failure:
                if self._stopping.is_set():
                    self._logger.warning("%s, which was to end, %s", self._name, failure)
                    return None
                if failure.final is not None:
                    return failure.final
                delay = self._delay_after(failure)
                if delay is None:
                    text = (
                        f"{self._name} {failure}; it was restarted {len(self._restarts)} times "
                        f"within {self._policy.window_s:g} s: giving up"
                    )
                    return EngineDied(text, restarts=self._num_restarts)
                self._tell(Down(str(failure), delay))
                self._stopping.wait(delay)
            else:
                break
        return None

    def _delay_after(self, failure: _Failure) -> float | None:
        """Count and log a restart; return its delay in seconds, or None after too many."""
        policy, now = self._policy, time.monotonic()
        if failure.waits:
            delay = policy.delay(self._num_waits)
            self._num_waits += 1
            self._logger.warning("%s %s; next try in %.1f s", self._name, failure, delay)
            return delay
        while self._restarts and now - self._restarts[0] > policy.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= policy.max_restarts:
            return None
        delay = policy.delay(len(self._restarts))
        self._restarts.append(now)
        self._num_restarts += 1
        self._logger.warning(
            "%s %s; restart %d of %d within %g s, in %.1f s",
            self._name, failure, len(self._restarts), policy.max_restarts, policy.window_s, delay,
        )  # fmt: skip
        return delay

    def _run_once(self) -> None:
        """Run one scheduler until it ends in order, or raise _Failure."""
        policy = self._policy
        try:
            child = Child([*self._command, "--endpoint", self.endpoint], environment=self._environment)
        except OSError as error:
            raise _Failure(f"could not be started: {error}") from error
        self._child = child
        try:
            if self._stopping.is_set():
                return
            self.endpoint = self._wait_ready(child)
            self._has_served, self._num_waits = True, 0
            self._tell(Serving(self.endpoint, child.process.pid, self._num_restarts))
            if policy.hang_timeout_s <= 0:
                while not child.wait(3600.0):
                    pass
            elif not self._answers_until_it_ends(child, policy.hang_timeout_s):
                child.process.kill()
                child.wait(policy.stop_timeout_s)
                raise _Failure(f"did not answer its status for {policy.hang_timeout_s:g} s and was killed")
            if child.process.returncode != 0:
                raise _Failure(_exit_of(child))
            self._logger.info("%s %s", self._name, how_it_ended(0))
        finally:
            self._child = None
            child.end()

    def _wait_ready(self, child: Child) -> str:
        try:
            return child.wait_ready(self._policy.startup_timeout_s)
        except EngineDied as error:
            wrong = error if child.process.returncode == USAGE_STATUS else None
            raise _Failure(f"{_exit_of(child)} before it was ready", wrong) from error
        except TimedOut as error:
            child.process.kill()
            reason = f"was not ready within {self._policy.startup_timeout_s:g} s and was killed"
            raise _Failure(reason) from error
        except EngineError as error:
            final = error if not self._has_served or error.code in _NEVER_AGAIN else None
            waits = error.code == ErrorCode.STATE_FILE_ERROR
            raise _Failure(f"refused to start: {error}", final, waits=waits) from error

    def _answers_until_it_ends(self, child: Child, patience: float) -> bool:
        """Return True when it has ended, or False once it has been silent for ``patience`` seconds.

        Two probes in a row must fail: where this process was stopped together with the scheduler, the first
        one fails at once when both go on.
        """
        each = patience / _PROBES_PER_HANG
        with self._probing_client(each) as client:
            client.expect_exit()
            child.report_exit_to(weakref.WeakMethod(client.engine_exited))
            answered, missed = time.monotonic(), 0
            while not child.wait(min(each, _LONGEST_PROBE_INTERVAL_S)):
                try:
                    client.status(timeout=each)
                except (TimedOut, EngineDied):
                    missed += 1
                    if missed > 1 and time.monotonic() - answered >= patience and not child.wait(0.0):
                        return False
                    continue
                except CaesuraError:  # a refusal is an answer
                    pass
                answered, missed = time.monotonic(), 0
        return True

    def _probing_client(self, connect_timeout: float) -> ControlClient:
        server_key, own_keys = self._keys
        return ControlClient(
            self.endpoint,
            connect_timeout=connect_timeout,
            curve_server_key=server_key,
            curve_client_key_file=own_keys,
        )

    def _tell(self, state: State) -> None:
        with self._lock:
            self._state = state
            for listener in self._listeners:
                listener(state)


def _exit_of(child: Child) -> str:
    """Return how a process ended, with the last line of its log."""
    how = how_it_ended(child.process.returncode)
    last = child.last_line()[:_LAST_LINE]
    return f"{how}, last line: {last}" if last else how
