"""The ``caesura`` command: control of an engine from a terminal.

Every verb prints one table, or with ``--json`` the reply as it came over the wire. A typed error is one line
on stderr and exit status 1; a wrong command line is exit status 2. Text that others chose (owners, labels,
paths) can neither move the cursor nor style anything.
"""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import localtime, strftime, time
from typing import Any, NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..io_struct import MAX_TRACE_STEPS, CaesuraError, Message
from ..io_struct.control import MAX_DURATION_S
from ..io_struct.field_errors import printable
from .connection.blocking import SchedulerClient
from .connection.curve import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE
from .exceptions import TimedOut
from .keygen import keygen
from .launch.launcher import engine_command, worker_command
from .launch.supervisor import supervise
from .serve.command import serve
from .status_rows import MIB, status_rows

ENDPOINT_VARIABLE = "CAESURA_ENDPOINT"
Command = Callable[..., None]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caesura", message="%(prog)s %(version)s")
def cli() -> None:
    """Caesura: a rollout engine for reinforcement learning that can be paused at any step."""


def _key_option(name: str, variable: str, text: str) -> Callable[[Command], Command]:
    """Return an option that every verb hands to its client unread."""

    def keep(context: click.Context, option: click.Parameter, value: str | None) -> None:
        context.ensure_object(dict)[option.name] = value

    return click.option(
        name, envvar=variable, expose_value=False, callback=keep, help=f"{text}  [env: {variable}]"
    )


def _endpoint(_: click.Context, __: click.Parameter, value: str | None) -> str:
    """Require an endpoint."""
    if value is None:
        raise click.UsageError(
            f"which scheduler? Give --endpoint, or set {ENDPOINT_VARIABLE}, to its address: "
            "ipc://PATH or tcp://HOST:PORT, as "
            "given to `caesura scheduler --endpoint`"
        )
    return value


def _client(endpoint: str) -> SchedulerClient:
    return SchedulerClient(endpoint, **click.get_current_context().ensure_object(dict))


def _talks(default_timeout: float | None) -> Callable[[Command], Command]:
    """Add the options of every verb that speaks to a running engine."""

    def decorate(command: Command) -> Command:
        options = (
            click.option(
                "--endpoint",
                envvar=ENDPOINT_VARIABLE,
                callback=_endpoint,
                help=f"Address of the scheduler: ipc://PATH or tcp://HOST:PORT.  [env: {ENDPOINT_VARIABLE}]",
            ),
            _key_option(
                "--curve-server-key",
                SERVER_KEY_VARIABLE,
                "The engine's CURVE public key, or a file that contains it.",
            ),
            _key_option(
                "--curve-client-key-file",
                CLIENT_KEY_VARIABLE,
                "File with this client's CURVE key pair; needed for an engine with keys.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print the reply as one line of JSON."),
            click.option(
                "--timeout",
                type=float,
                default=default_timeout,
                help="Maximum seconds to wait for the reply.",
                show_default=default_timeout is not None,
            ),
        )
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True}


@cli.command(add_help_option=False, context_settings=_FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Run a scheduler in the foreground. `caesura scheduler --help` lists the options."""
    os.execv(sys.executable, engine_command(*arguments))  # noqa: S606 (its own interpreter; replaces this process)


@cli.command(add_help_option=False, context_settings=_FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run one rank of an engine that has several. `caesura worker --help` lists the options."""
    os.execv(sys.executable, worker_command(*arguments))  # noqa: S606 (as above)


cli.add_command(serve)
cli.add_command(keygen)
cli.add_command(supervise)


@cli.command()
@_talks(10.0)
def status(endpoint: str, as_json: bool, timeout: float | None) -> None:
    """Show the state of the engine."""
    with _client(endpoint) as client:
        reply = client.status(timeout=timeout)
    _show(reply, as_json, status_rows(reply))


@cli.command()
@_talks(60.0)
@click.option(
    "--mode",
    type=click.Choice(["abort", "retract", "in_place"]),
    default="abort",
    show_default=True,
    help="abort: end all requests; retract: free their KV cache and requeue them; "
    "in_place: freeze them with their KV cache.",
)
@click.option("--owner", help="Owner of the pause; continue then needs the same --owner, or --force.")
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(0.0, MAX_DURATION_S, min_open=True),
    help="Seconds after which the pause ends unless another command with the same --owner comes. "
    "Without it the pause lasts until "
    "`caesura continue`.",
)
@click.option(
    "--on-lease-expiry",
    type=click.Choice(["continue", "abort", "stay"]),
    default="continue",
    show_default=True,
    help="What then happens: generation continues; all requests are aborted and the pause stays; "
    "or it stays, without an owner.",
)
def pause(
    endpoint: str,
    as_json: bool,
    timeout: float | None,
    mode: Any,
    owner: str | None,
    lease_s: float | None,
    on_lease_expiry: Any,
) -> None:
    """Pause generation; returns when no step is in flight."""
    if lease_s is not None and owner is None:
        raise click.UsageError("--lease needs --owner: commands of that owner renew the lease")
    with _client(endpoint) as client:
        reply = client.pause(
            mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry, timeout=timeout
        )
        # a pause that is somebody else's already takes no lease, so what holds is asked for
        lease = None if lease_s is None else client.renew_pause_lease(owner, timeout=timeout)
    rows = list(_rows(msgspec.to_builtins(reply)))
    if lease is not None:
        rows.append(("lease", _lease(lease.lease_left_s, on_lease_expiry)))
    _show(reply, as_json, rows)


@cli.command("continue")
@_talks(60.0)
@click.option(
    "--torch-empty-cache/--no-torch-empty-cache",
    default=True,
    help="Empty the device allocator's cache before generation continues.",
)
@click.option("--owner", help="Owner that was given to pause.")
@click.option("--force", is_flag=True, help="Continue even if the pause has another owner.")
def continue_(
    endpoint: str,
    as_json: bool,
    timeout: float | None,
    torch_empty_cache: bool,
    owner: str | None,
    force: bool,
) -> None:
    """Continue generation after a pause."""
    with _client(endpoint) as client:
        reply = client.continue_generation(
            torch_empty_cache=torch_empty_cache, owner=owner, force=force, timeout=timeout
        )
    _show(reply, as_json)


@cli.command()
@_talks(60.0)
@click.option(
    "--torch-empty-cache/--no-torch-empty-cache",
    default=True,
    help="Also empty the device allocator's cache.",
)
@click.option(
    "--wait",
    "timeout_s",
    type=float,
    default=0.0,
    help="Maximum seconds to wait for the engine to become idle.",
)
def flush(
    endpoint: str, as_json: bool, timeout: float | None, torch_empty_cache: bool, timeout_s: float
) -> None:
    """Flush the prefix cache. The engine must be idle."""
    with _client(endpoint) as client:
        reply = client.flush_cache(torch_empty_cache=torch_empty_cache, timeout_s=timeout_s, timeout=timeout)
    _show(reply, as_json)


@cli.command()
@_talks(None)
@click.argument("model_path", type=click.Path())
@click.option("--weight-version", help="Version label of the new weights.")
@click.option(
    "--flush-cache/--no-flush-cache",
    default=True,
    help="Flush the prefix cache; if running, requests are recomputed with the new weights. "
    "With --no-flush-cache they keep their KV cache.",
)
@click.option("--torch-empty-cache", is_flag=True, help="Empty the device allocator's cache afterwards.")
@click.option("--abort-all-requests", is_flag=True, help="Abort all requests first.")
def update(
    endpoint: str,
    as_json: bool,
    timeout: float | None,
    model_path: str,
    weight_version: str | None,
    flush_cache: bool,
    torch_empty_cache: bool,
    abort_all_requests: bool,
) -> None:
    """Update the weights from the checkpoint folder MODEL_PATH."""
    with _client(endpoint) as client:
        reply = client.update_weights_from_disk(
            os.path.abspath(model_path),  # the engine has its own working directory
            weight_version=weight_version,
            flush_cache=flush_cache,
            torch_empty_cache=torch_empty_cache,
            abort_all_requests=abort_all_requests,
            timeout=timeout,
        )
    _show(reply, as_json)


@cli.command()
@_talks(10.0)
@click.argument("rid", required=False)
@click.option("--all", "abort_all", is_flag=True, help="Abort all requests.")
def abort(endpoint: str, as_json: bool, timeout: float | None, rid: str | None, abort_all: bool) -> None:
    """Abort the request RID, or all requests with --all."""
    if (rid is None) != abort_all:
        raise click.UsageError("give either a RID or --all")
    with _client(endpoint) as client:
        _show(client.abort(rid, abort_all=abort_all, timeout=timeout), as_json)


@cli.command()
@_talks(600.0)
@click.option(
    "--num-steps",
    type=click.IntRange(1, MAX_TRACE_STEPS),
    default=20,
    show_default=True,
    help="Number of steps to record. Ctrl-C ends the trace earlier.",
)
@click.option("--output-dir", help="Folder for the file, under the engine's --profile-dir.")
@click.option(
    "--with-stack", is_flag=True, help="Also record the Python stack of each operation, which is slow."
)
@click.option("--record-shapes", is_flag=True, help="Also record the shapes of the operations' inputs.")
def profile(
    endpoint: str,
    as_json: bool,
    timeout: float | None,
    num_steps: int,
    output_dir: str | None,
    with_stack: bool,
    record_shapes: bool,
) -> None:
    """Record a trace of the engine's next steps with torch's profiler; prints its file, for chrome://tracing
    or Perfetto.

    The file is written by the engine, on its machine. An idle engine makes no steps: send it requests.
    """
    with _client(endpoint) as client:
        client.start_profile(
            output_dir, num_steps=num_steps, with_stack=with_stack, record_shapes=record_shapes, timeout=10.0
        )
        try:
            reply = client.stop_profile(wait=True, timeout=timeout)
        except (KeyboardInterrupt, TimedOut):
            reply = client.stop_profile(timeout=timeout)
        _show(reply, as_json)


@cli.command()
@_talks(10.0)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    help="Write the history to this file, as a self-contained HTML page.",
)
@click.option("--live", is_flag=True, help="Refresh the display until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.05),
    default=1.0,
    show_default=True,
    help="Seconds between refreshes, with --live.",
)
@click.option(
    "--for", "seconds", type=click.FloatRange(0.0), help="Stop after this many seconds, with --live."
)
@click.option(
    "--last", type=click.IntRange(1), default=30, show_default=True, help="Maximum number of events to print."
)
def memory(
    endpoint: str,
    as_json: bool,
    timeout: float | None,
    page: Path | None,
    live: bool,
    interval: float,
    seconds: float | None,
    last: int,
) -> None:
    """Show the engine's memory history: device memory over time, with pauses and updates."""
    from .memory_view import fetch, watch
    from .memory_view.live import events
    from .serve.pages.document import write_page

    with _client(endpoint) as client:
        record = fetch(client, timeout=timeout)
        if page is not None:
            write_page(record, page)
            click.echo(f"wrote {page}: {len(record.events)} events", err=as_json)
        if as_json:
            for event in record.events:
                click.echo(msgspec.json.encode(event))
        elif live:
            watch(client, Console(), interval_s=interval, seconds=seconds, timeout=timeout)
        elif page is None:
            terminal = Console()
            (terminal if terminal.is_terminal else Console(width=140)).print(events(record, last))


def _show(reply: Message, as_json: bool, rows: Iterable[tuple[str, str]] | None = None) -> None:
    if as_json:
        click.echo(msgspec.json.encode(reply))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # a path that is cut off is of no use
    for name, value in rows if rows is not None else _rows(msgspec.to_builtins(reply)):
        table.add_row(name, Text(printable(value)))
    Console().print(table)


def _rows(fields: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in fields.items():
        if name in ("type", "id") or value is None or (name == "ranks" and not value):
            continue
        if isinstance(value, dict):
            yield name, "  ".join(f"{key} {_text(key, each)}" for key, each in value.items())
        else:
            yield name, _text(name, value)


def _text(name: str, value: Any) -> str:
    if name in ("reserved_before", "reserved_after", "freed", "written_bytes"):
        return f"{value / MIB:.1f} MiB"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def _lease(left_s: float | None, then: str) -> str:
    """Return until when a pause holds, by this machine's clock."""
    if left_s is None:
        return "none: the pause is another owner's"
    until = strftime("%Y-%m-%d %H:%M:%S", localtime(time() + left_s))
    return f"until {until} (for {left_s:.1f} s), then {then}; a command with the same --owner renews it"


def main() -> NoReturn:
    try:
        status = cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except CaesuraError as error:
        click.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(1)
    except OSError as error:
        said = error if error.filename is None else f"{error.filename}: {error.strerror}"
        click.echo(f"error: {printable(str(said))}", err=True)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
