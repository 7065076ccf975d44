"""When a scheduler is restarted and how long its end may take, with the options of a command line for it."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ...process.engine_options import EngineOptions
from .launcher import option_value

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


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


def policy_option(flag: str, field: str, text: str) -> Callable[[CommandT], CommandT]:
    """Return the option for a ``field`` of the policy, whose default it takes."""
    default = getattr(RestartPolicy, field)
    kind = click.IntRange(0) if isinstance(default, int) else click.FloatRange(0)
    return click.option(flag, field, type=kind, default=default, show_default=True, help=text)


def restart_options(command: CommandT) -> CommandT:
    """Add the options of a command that restarts a scheduler."""
    hang = "Seconds without an answer after which a scheduler is killed and restarted. 0: never."
    window = "Window for --max-restarts, in seconds."
    most = "Maximum number of restarts within --restart-window."
    command = policy_option("--hang-timeout", "hang_timeout_s", hang)(command)
    command = policy_option("--restart-window", "restart_window_s", window)(command)
    return policy_option("--max-restarts", "max_restarts", most)(command)
