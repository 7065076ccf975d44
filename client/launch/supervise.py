"""``caesura supervise``, and options that other commands share.

Exit status: 0 when it was told to end, 1 when a start was refused, 2 for a wrong command line, 3 when it gave
up.
"""

import contextlib
import logging
import queue
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import click

from ...process import private_directory
from ...process.log import server_log
from ..connection.curve import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE, ClientKeys, KeyOrFile
from ..exceptions import EngineDied, EngineError
from .launcher import USAGE_STATUS, engine_command
from .notify import notify, watchdog_interval_s
from .supervisor import DEFAULT_NAME, Ended, RestartPolicy, Serving, State, Supervisor

GAVE_UP_STATUS = 3
STOP_TIMEOUT_S = 60.0
"""Seconds between SIGTERM and SIGKILL, beside those that the scheduler may drain."""
_DRAIN_TIMEOUT_S = 30.0
"""The scheduler's own default."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 1.0
"""Maximum seconds until a signal is seen that came just before the main thread went to sleep."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def restart_options(command: CommandT) -> CommandT:
    """Add the options of a command that restarts a scheduler."""
    options = (
        click.option(
            "--max-restarts",
            type=click.IntRange(0),
            default=5,
            show_default=True,
            help="Maximum number of restarts within --restart-window.",
        ),
        click.option(
            "--restart-window",
            type=click.FloatRange(0),
            default=600.0,
            show_default=True,
            help="Window for --max-restarts, in seconds.",
        ),
        click.option(
            "--hang-timeout",
            type=click.FloatRange(0),
            default=120.0,
            show_default=True,
            help="Seconds without an answer after which a scheduler is killed and restarted. 0: never.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of log lines, also the scheduler's. json: one object per line with time, level and replica.",
)


def supervised(
    arguments: Sequence[str],
    endpoint: str | None,
    policy: RestartPolicy,
    *,
    curve_server_key: KeyOrFile | None = None,
    curve_client_key_file: KeyOrFile | None = None,
    name: str = DEFAULT_NAME,
    environment: Mapping[str, str] | None = None,
) -> Supervisor:
    """Return a supervisor of ``caesura scheduler ARGUMENTS``, not started.

    Without ``endpoint``, or ``--state-file`` among the arguments, these are in a private directory.

    Raises:
        click.UsageError: the scheduler has keys, but none are given for status requests.
    """
    ClientKeys.read(curve_server_key, curve_client_key_file)  # before a directory is made
    if (
        curve_server_key is None
        and policy.hang_timeout_s > 0
        and has_option(arguments, "--curve-secret-key-file")
    ):
        raise click.UsageError(
            "a scheduler with keys accepts only clients with keys: "
            "--curve-server-key and --curve-client-key-file are required, or --hang-timeout 0"
        )
    command = engine_command(*arguments)
    has_state_file = has_option(arguments, "--state-file")
    directory = None
    if endpoint is None or not has_state_file:
        directory = private_directory.make()
    if not has_state_file:
        command += ["--state-file", f"{directory}/{private_directory.STATE_FILE}"]
    return Supervisor(
        command,
        endpoint or f"ipc://{directory}/{private_directory.SOCKET}",
        policy=policy,
        directory=directory,
        curve_server_key=curve_server_key,
        curve_client_key_file=curve_client_key_file,
        name=name,
        environment=environment,
    )


def stop_timeout_s(arguments: Sequence[str]) -> float:
    """Return the seconds from SIGTERM to SIGKILL of such a scheduler: more than it may drain."""
    drain_s = 0.0
    if option_value(arguments, "--shutdown-mode") == "drain":
        with contextlib.suppress(ValueError):  # the scheduler refuses it
            drain_s = float(option_value(arguments, "--drain-timeout-s") or _DRAIN_TIMEOUT_S)
    return STOP_TIMEOUT_S + drain_s


def has_option(arguments: Sequence[str], option: str) -> bool:
    return option_value(arguments, option) is not None


def option_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of ``option``, as click reads it, or None without the option."""
    value = None
    for each, following in zip_longest(arguments, arguments[1:]):
        name, equals, given = each.partition("=")
        if name == option:
            value = given if equals else following
    return value


def status_of(error: EngineError | None) -> int:
    if error is None:
        return 0
    if isinstance(error, EngineDied) and "restarts" in error.detail:
        return GAVE_UP_STATUS
    return USAGE_STATUS if error.detail.get("returncode") == USAGE_STATUS else 1


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
@click.option(
    "--startup-timeout",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="Maximum seconds for the scheduler to become ready.",
)
@click.option(
    "--stop-timeout",
    type=click.FloatRange(0),
    help="Seconds between SIGTERM and SIGKILL when this command ends.  "
    "[default: 60, plus --drain-timeout-s with --shutdown-mode drain]",
)
@log_format_option
@click.pass_context
def supervise(
    context: click.Context,
    /,
    endpoint: str | None,
    curve_server_key: str | None,
    curve_client_key_file: str | None,
    max_restarts: int,
    restart_window: float,
    hang_timeout: float,
    startup_timeout: float,
    stop_timeout: float | None,
    log_format: str,
) -> None:
    """Run a scheduler and restart it when it dies or hangs.

    All other options are passed on to the scheduler: see `caesura scheduler --help`. A restarted scheduler
    loads the weights that were committed last if they came from disk; after any other update it serves
    nothing until the next complete one. The record of this is deleted when this command ends, unless
    --state-file is given.
    """
    policy = RestartPolicy(
        max_restarts=max_restarts,
        window_s=restart_window,
        hang_timeout_s=hang_timeout,
        startup_timeout_s=startup_timeout,
        stop_timeout_s=stop_timeout_s(context.args) if stop_timeout is None else stop_timeout,
    )
    supervisor = supervised(
        [*context.args, "--log-format", log_format],
        endpoint,
        policy,
        curve_server_key=curve_server_key,
        curve_client_key_file=curve_client_key_file,
    )
    with server_log("supervise", log_format, "supervise"):
        logging.getLogger(__package__).setLevel(logging.INFO)
        status = _run(supervisor)
    context.exit(status)


def _run(supervisor: Supervisor) -> int:
    events: queue.SimpleQueue[State | int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, _: events.put(number))
        for number in (*_END_SIGNALS, *_FORWARDED_SIGNALS)
    }
    try:
        supervisor.begin(events.put)
        error = _until_ended(supervisor, events)
    finally:
        supervisor.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if error is not None:
        click.echo(f"error: {error}", err=True)
    return status_of(error)


def _until_ended(supervisor: Supervisor, events: "queue.SimpleQueue[State | int]") -> EngineError | None:
    interval, ending, has_served = watchdog_interval_s(), False, False
    while True:
        try:
            event = events.get(timeout=min(_LOOK_S, interval or _LOOK_S))
        except queue.Empty:
            if has_served and interval is not None:
                notify("WATCHDOG=1")
            continue
        if isinstance(event, Ended):
            return event.error
        if isinstance(event, Serving):
            notify("READY=1", f"STATUS=serving on {event.endpoint}, {event.restarts} restarts")
            if event.restarts == 0:
                click.echo(f"supervising a scheduler on {event.endpoint} (pid {event.pid})")
                sys.stdout.flush()
            has_served = True
        elif not isinstance(event, int):
            notify(f"STATUS=down: the scheduler {event.reason}")
        elif event in _FORWARDED_SIGNALS:
            supervisor.signal(event)
        elif ending:
            supervisor.hurry()
        else:
            ending = True
            notify("STOPPING=1")
            supervisor.stop()
