"""When a scheduler is restarted: after how long a silence, how often, and how soon.

A scheduler is asked for its status to learn that it hangs; a refusal is an answer.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from ...io_struct import CaesuraError
from ...process.compilers import compiler_below
from ...process.engine_options import EngineOptions
from ..connection.blocking import ControlClient
from ..connection.client_options import ConnectionOptions
from ..exceptions import EngineDied, TimedOut
from .launcher import Child, option_value

_PROBES_PER_HANG, _LONGEST_PROBE_INTERVAL_S = 4, 5.0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a scheduler is restarted. The defaults are those of the command line."""

    max_restarts: int = 5
    restart_window_s: float = 600.0
    first_delay_s: float = 0.5
    """Seconds before the first restart of a window; the delay doubles with each further one."""
    longest_delay_s: float = 30.0
    hang_timeout_s: float = 120.0
    """Maximum seconds without an answer to a status request; 0 disables the check, also at the end."""
    startup_timeout_s: float = 600.0
    stop_timeout_s: float | None = None
    """Seconds between SIGTERM and SIGKILL at the end. None: 60, beside those that it may drain."""
    stop_silence_s: float = 5.0
    """Seconds that a scheduler told to end may take to end or to answer."""

    def delay(self, restarts: int) -> float:
        """Return the seconds before the next restart, after ``restarts`` in the window."""
        return float(min(self.longest_delay_s, self.first_delay_s * 2 ** min(restarts, 30)))

    def stop_s(self, arguments: Sequence[str]) -> float:
        """Return the seconds from SIGTERM to SIGKILL of a scheduler with these arguments."""
        if self.stop_timeout_s is not None:
            return self.stop_timeout_s
        drain_s = 0.0
        if option_value(arguments, "--shutdown-mode") == "drain":
            with contextlib.suppress(ValueError):  # the scheduler refuses it
                drain_s = float(option_value(arguments, "--drain-timeout-s") or EngineOptions.drain_timeout_s)
        return 60.0 + drain_s


class Restarts:
    """Restarts that a supervisor has made, and the time of the next one."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times: list[float] = []
        self._num_waits = 0

    def __len__(self) -> int:
        return len(self._times)

    def has_started(self) -> None:
        """Forget how often a start was repeated that waits for something outside."""
        self._num_waits = 0

    def plan(self, *, waits: bool) -> tuple[float, str] | None:
        """Return the seconds before the next start and its name for the log, or None after too many.

        A start that ``waits`` until something outside is mended is no restart.
        """
        policy, now = self._policy, time.monotonic()
        if waits:
            self._num_waits += 1
            return policy.delay(self._num_waits - 1), "next try"
        recent = sum(now - at <= policy.restart_window_s for at in self._times)
        if recent >= policy.max_restarts:
            return None
        self._times.append(now)
        name = f"restart {recent + 1} of {policy.max_restarts} within {policy.restart_window_s:g} s,"
        return policy.delay(recent), name


def require_keys(arguments: Sequence[str], keys: ConnectionOptions) -> None:
    """Refuse a scheduler with keys that could not be asked without any."""
    if option_value(arguments, "--curve-secret-key-file") and keys.get("curve_server_key") is None:
        raise click.UsageError(
            "a scheduler with keys accepts only clients with keys: "
            "--curve-server-key and --curve-client-key-file are required, or --hang-timeout 0"
        )


def answers_until_it_ends(child: Child, endpoint: str, keys: ConnectionOptions, patience: float) -> bool:
    """Return True when it has ended, or False once it has been silent for ``patience`` seconds, if not 0.

    Two probes must fail: if both were stopped together, the first fails at once when they go on.
    """
    if patience <= 0:
        return child.wait(math.inf)
    each = patience / _PROBES_PER_HANG
    with _client(endpoint, keys, each) as client:
        child.report_exit_to(client)
        answered, missed = time.monotonic(), 0
        while not child.wait(min(each, _LONGEST_PROBE_INTERVAL_S)):
            try:
                client.status(timeout=each)
            except (TimedOut, EngineDied):
                if compiler_below(child.process.pid) is not None:
                    answered, missed = time.monotonic(), 0
                    continue
                missed += 1
                if missed > 1 and time.monotonic() - answered >= patience and not child.wait(0.0):
                    return False
                continue
            except CaesuraError:
                pass
            answered, missed = time.monotonic(), 0
    return True


def is_silent(endpoint: str, keys: ConnectionOptions, timeout: float) -> bool:
    """Return True if no answer comes within ``timeout`` seconds; the end of the scheduler is an answer."""
    try:
        with _client(endpoint, keys, timeout) as client:
            client.status(timeout=timeout)
    except TimedOut:
        return True
    except CaesuraError:
        pass
    return False


def _client(endpoint: str, keys: ConnectionOptions, connect_timeout: float) -> ControlClient:
    options: ConnectionOptions = {**keys, "connect_timeout": connect_timeout}
    return ControlClient(endpoint, **options)
