"""``caesura supervise``: the command around a :class:`Supervisor`, and what other commands share with it.

Exit status: 0 when it was told to end, 1 when a start was refused, 2 for a wrong command line, 3 when it gave
up. Signals and states of the supervisor meet in one queue, which the main thread reads.
"""

import logging
import os
import queue
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ...io_struct import CaesuraError
from ...process.log import server_log
from ...process.placement import Placement, place_of
from ..connection.endpoints import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE
from ..exceptions import EngineDied, EngineError
from .launcher import USAGE_STATUS, engine_command, option_value
from .notify import notify, watchdog_interval_s
from .restart_policy import RestartPolicy
from .supervisor import Down, Ended, Serving, State, Supervisor

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
GAVE_UP_STATUS = 3
_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 1.0
"""Maximum seconds until a signal is seen that came just before the main thread went to sleep."""


def status_of(error: EngineError | None) -> int:
    if error is None:
        return 0
    if isinstance(error, EngineDied) and "restarts" in error.detail:
        return GAVE_UP_STATUS
    return USAGE_STATUS if error.detail.get("returncode") == USAGE_STATUS else 1


log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of log lines, also the scheduler's. json: one object per line with time, level and replica.",
)


def _option(flag: str, field: str, text: str) -> Callable[[CommandT], CommandT]:
    """Return the option for a ``field`` of the policy, whose default it takes."""
    default = getattr(RestartPolicy, field)
    kind = click.IntRange(0) if isinstance(default, int) else click.FloatRange(0)
    return click.option(flag, field, type=kind, default=default, show_default=True, help=text)


def restart_options(command: CommandT) -> CommandT:
    """Add the options of a command that restarts a scheduler."""
    hang = "Seconds without an answer after which a scheduler is killed and restarted. 0: never."
    window = "Window for --max-restarts, in seconds."
    most = "Maximum number of restarts within --restart-window."
    command = _option("--hang-timeout", "hang_timeout_s", hang)(command)
    command = _option("--restart-window", "restart_window_s", window)(command)
    return _option("--max-restarts", "max_restarts", most)(command)


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--endpoint",
    help="Address for the scheduler to listen on.  [default: an ipc:// socket in a private directory]",
)
@click.option(
    "--curve-server-key",
    envvar=SERVER_KEY_VARIABLE,
    help="CURVE public key of the scheduler, or a file with it, for health checks of a scheduler with keys.",
)
@click.option(
    "--curve-client-key-file",
    envvar=CLIENT_KEY_VARIABLE,
    help="File with this command's CURVE key pair; needed for a scheduler with keys.",
)
@restart_options
@_option("--startup-timeout", "startup_timeout_s", "Maximum seconds for the scheduler to become ready.")
@_option(
    "--stop-timeout",
    "stop_timeout_s",
    "Seconds between SIGTERM and SIGKILL when this command ends.  "
    "[default: 60, plus --drain-timeout-s with --shutdown-mode drain]",
)
@log_format_option
@click.pass_context
def supervise(
    context: click.Context,
    /,
    endpoint: str | None,
    log_format: str,
    curve_server_key: str | None,
    curve_client_key_file: str | None,
    **policy: Any,
) -> None:
    """Run a scheduler and restart it when it dies or hangs.

    All other options are passed on to the scheduler: see `caesura scheduler --help`. A restarted scheduler
    loads the weights that were committed last if they came from disk; after any other update it serves
    nothing until the next complete one. The record of this is deleted when this command ends, unless
    --state-file is given. On the other nodes of an engine (--nnodes) the command runs their ranks.
    """
    arguments = [*context.args, "--log-format", log_format]
    if (place := _place(arguments)) is not None:
        if place.node_rank:  # restarts its ranks itself
            os.execv(sys.executable, engine_command(*arguments))  # noqa: S606  (our own interpreter)
        arguments += ["--nnodes", str(place.nnodes), "--node-rank", "0", "--master-addr", place.master_addr]
    supervisor = Supervisor(
        arguments,
        endpoint,
        RestartPolicy(**policy),
        curve_server_key=curve_server_key,
        curve_client_key_file=curve_client_key_file,
    )
    with server_log("supervise", log_format, "supervise"):
        logging.getLogger(__package__).setLevel(logging.INFO)
        error = _until_ended(supervisor)
    context.exit(status_of(error))


def _place(arguments: Sequence[str]) -> Placement | None:
    """Return the place of a scheduler with these arguments, which itself reads no environment."""
    options: dict[str, Any] = {
        "master_addr": option_value(arguments, "--master-addr")
        or option_value(arguments, "--dist-init-addr"),
        "tp_address": option_value(arguments, "--tp-address"),
    }
    try:
        for name, default in (("tp", 1), ("tp_joined", 0), ("nnodes", None), ("node_rank", None)):
            value = option_value(arguments, f"--{name.replace('_', '-')}")
            options[name] = default if value is None else int(value)
        return place_of(options, os.environ)
    except ValueError:  # the scheduler refuses it
        return None
    except CaesuraError as error:
        raise click.UsageError(str(error)) from error


def _until_ended(supervisor: Supervisor) -> EngineError | None:
    events: queue.SimpleQueue[State | int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, _: events.put(number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *_FORWARDED_SIGNALS)
    }
    interval: float | None = None  # nothing is told before a scheduler has served
    ending = False
    try:
        supervisor.subscribe(events.put)
        supervisor.begin()
        while True:
            try:
                event = events.get(timeout=min(_LOOK_S, interval or _LOOK_S))
            except queue.Empty:
                if interval is not None:
                    notify("WATCHDOG=1")
                continue
            if isinstance(event, Ended):
                break
            if isinstance(event, Serving):
                notify("READY=1", f"STATUS=serving on {event.endpoint}, {event.restarts} restarts")
                if event.restarts == 0:
                    click.echo(f"supervising a scheduler on {event.endpoint} (pid {event.pid})")
                    sys.stdout.flush()
                interval = watchdog_interval_s()
            elif isinstance(event, Down):
                notify(f"STATUS=down: the scheduler {event.reason}")
            elif event in _FORWARDED_SIGNALS:
                supervisor.signal(event)
            elif ending:
                supervisor.hurry()
            else:
                ending = True
                notify("STOPPING=1")
                supervisor.stop()
    finally:
        supervisor.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if event.error is not None:
        click.echo(f"error: {event.error}", err=True)
    return event.error
