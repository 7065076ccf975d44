"""The ``caesura`` command: control of an engine from a terminal.

Every verb prints one table, or with ``--json`` the reply as it came over the wire. A typed error is one line
on stderr and exit status 1; a wrong command line is exit status 2. Text that others chose (owners, labels,
paths) can neither move the cursor nor style anything.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from time import localtime, sleep, strftime, time
from typing import Any, NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..io_struct import (
    MAX_TRACE_STEPS,
    PAUSE_MODES,
    CaesuraError,
    CheckDriftReqOutput,
    DriftFigures,
    GetStatusReqOutput,
    Message,
)
from ..io_struct.control import MAX_DURATION_S
from ..io_struct.field_errors import printable
from .connection.blocking import SchedulerClient
from .connection.endpoints import CLIENT_KEY_VARIABLE, FORMS, SERVER_KEY_VARIABLE
from .drift_reference import DEFAULT_TIMEOUT_S, VERSION, check_reference
from .exceptions import EngineError, TimedOut
from .keygen import keygen
from .launch.launcher import engine_command, worker_command
from .launch.supervise import supervise
from .serve.command import serve
from .verify import verify_command

MIB = 1 << 20
ENDPOINT_VARIABLE = "CAESURA_ENDPOINT"
Command = Callable[..., None]
Rows = Iterable[tuple[str, str]]
Verb = Callable[..., Message | tuple[Message, Rows] | None]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caesura", message="%(prog)s %(version)s")
def cli() -> None:
    """Caesura: a rollout engine for reinforcement learning that can be paused at any step."""


def _endpoint(_: click.Context, __: click.Parameter, value: str | None) -> str:
    if value is None:
        raise click.UsageError(
            f"which scheduler? Give --endpoint, or set {ENDPOINT_VARIABLE}, to its address: "
            f"{FORMS}, as given to `caesura scheduler --endpoint`"
        )
    return value


def _verb(default_timeout: float | None, name: str | None = None) -> Callable[[Verb], Command]:
    """Register a verb, which gets a client, ``timeout`` and its options, and returns reply or rows."""

    def register(verb: Verb) -> Command:
        @wraps(verb)
        def command(
            endpoint: str,
            as_json: bool,
            curve_server_key: str | None,
            curve_client_key_file: str | None,
            **options: Any,
        ) -> None:
            with SchedulerClient(
                endpoint, curve_server_key=curve_server_key, curve_client_key_file=curve_client_key_file
            ) as client:
                answer = verb(client, **options)
            if isinstance(answer, tuple):
                _show(answer[0], as_json, answer[1])
            elif answer is not None:
                _show(answer, as_json)

        for option in reversed(
            (
                click.option(
                    "--endpoint",
                    envvar=ENDPOINT_VARIABLE,
                    callback=_endpoint,
                    help=f"Address of the scheduler: {FORMS}.  [env: {ENDPOINT_VARIABLE}]",
                ),
                click.option(
                    "--curve-server-key",
                    envvar=SERVER_KEY_VARIABLE,
                    help="The engine's CURVE public key, or a file that contains it."
                    f"  [env: {SERVER_KEY_VARIABLE}]",
                ),
                click.option(
                    "--curve-client-key-file",
                    envvar=CLIENT_KEY_VARIABLE,
                    help="File with this client's CURVE key pair; needed for an engine with keys."
                    f"  [env: {CLIENT_KEY_VARIABLE}]",
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
        ):
            command = option(command)
        return cli.command(name)(command)

    return register


_FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True}


@cli.command(add_help_option=False, context_settings=_FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Run a scheduler in the foreground. `caesura scheduler --help` lists the options."""
    # Its own interpreter, with its own command, replaces this process.
    os.execv(sys.executable, engine_command(*arguments))  # noqa: S606


@cli.command(add_help_option=False, context_settings=_FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run one rank of an engine that has several. `caesura worker --help` lists the options."""
    os.execv(sys.executable, worker_command(*arguments))  # noqa: S606 (as above)


cli.add_command(serve)
cli.add_command(keygen)
cli.add_command(supervise)
cli.add_command(verify_command)


@_verb(10.0)
def status(client: SchedulerClient, timeout: float | None) -> tuple[Message, Rows]:
    """Show the state of the engine."""
    reply = client.status(timeout=timeout)
    return reply, status_rows(reply)


@_verb(60.0)
@click.option(
    "--mode",
    type=click.Choice(list(PAUSE_MODES)),
    default="abort",
    show_default=True,
    help=f"{'; '.join(f'{mode}: {text}' for mode, text in PAUSE_MODES.items())}.",
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
    client: SchedulerClient,
    timeout: float | None,
    mode: Any,
    owner: str | None,
    lease_s: float | None,
    on_lease_expiry: Any,
) -> tuple[Message, Rows]:
    """Pause generation; returns when no step is in flight."""
    if lease_s is not None and owner is None:
        raise click.UsageError("--lease needs --owner: commands of that owner renew the lease")
    reply = client.pause(mode, owner=owner, lease_s=lease_s, on_lease_expiry=on_lease_expiry, timeout=timeout)
    rows = list(_rows(msgspec.to_builtins(reply)))
    if lease_s is not None:
        # a pause that is somebody else's already takes no lease, so what holds is asked for
        left_s = client.renew_pause_lease(owner, timeout=timeout).lease_left_s
        rows.append(("lease", _lease(left_s, on_lease_expiry)))
    return reply, rows


@_verb(60.0, "continue")
@click.option(
    "--torch-empty-cache/--no-torch-empty-cache",
    default=True,
    help="Empty the device allocator's cache before generation continues.",
)
@click.option("--owner", help="Owner that was given to pause.")
@click.option("--force", is_flag=True, help="Continue even if the pause has another owner.")
def continue_(client: SchedulerClient, **options: Any) -> Message:
    """Continue generation after a pause."""
    return client.continue_generation(**options)


@_verb(60.0)
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
def flush(client: SchedulerClient, **options: Any) -> Message:
    """Flush the prefix cache. The engine must be idle."""
    return client.flush_cache(**options)


@_verb(None)
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
def update(client: SchedulerClient, model_path: str, **options: Any) -> Message:
    """Update the weights from the checkpoint folder MODEL_PATH."""
    return client.update_weights_from_disk(
        os.path.abspath(model_path),  # the engine has its own working directory
        **options,
    )


@_verb(None)
@click.option(
    "--reference",
    "folder",
    required=True,
    help=f"Checkpoint folder of the engine's weights; {VERSION} in it stands for their version.",
)
@click.option(
    "--samples", type=click.IntRange(1), default=16, show_default=True, help="Most samples to score."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--memory", type=click.IntRange(1), help="Most MiB for the reference; all that is left without it."
)
@click.option(
    "--reference-timeout",
    type=float,
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="Seconds for the reference.",
)
@click.option("--watch", is_flag=True, help="Check again after each update, until Ctrl-C.")
def drift(
    client: SchedulerClient,
    timeout: float | None,
    folder: str,
    memory: int | None,
    reference_timeout: float,
    watch: bool,
    **options: Any,
) -> None:
    """Compare samples of the engine's self-check with transformers, which loads the same weights.

    The engine needs --enable-drift-check. Exit status 1 above its --drift-limit.
    """
    checked, as_json = None, click.get_current_context().params["as_json"]
    options |= {
        "memory_bytes": memory and memory * MIB,
        "timeout": reference_timeout,
        "reply_timeout": timeout,
    }
    while True:
        epoch = client.status(owner="", timeout=timeout).weights_epoch
        if epoch != checked:
            try:
                report, checked = check_reference(client, folder, **options), epoch
                figures = msgspec.to_builtins(report)
                rows = [(name, f"{figures[name]:.3g}") for name in DriftFigures.__struct_fields__]
                named = [("weights", report.weight_version), ("state", report.state)]
                _show(CheckDriftReqOutput(id="", report=report), as_json, [*named, *rows])
                if not watch:
                    sys.exit(report.state == "limit")
            except EngineError as error:
                if not watch:
                    raise
                if not error.retryable:
                    checked = epoch
                    click.echo(f"error: {printable(str(error))}", err=True)
        sleep(1.0)


@_verb(10.0)
@click.argument("rid", required=False)
@click.option("--all", "abort_all", is_flag=True, help="Abort all requests.")
def abort(client: SchedulerClient, timeout: float | None, rid: str | None, abort_all: bool) -> Message:
    """Abort the request RID, or all requests with --all."""
    if (rid is None) != abort_all:
        raise click.UsageError("give either a RID or --all")
    return client.abort(rid, abort_all=abort_all, timeout=timeout)


@_verb(600.0)
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
    client: SchedulerClient, timeout: float | None, output_dir: str | None, **options: Any
) -> Message:
    """Record a trace of the engine's next steps with torch's profiler; prints its file, for chrome://tracing
    or Perfetto.

    The file is written by the engine, on its machine. An idle engine makes no steps: send it requests.
    """
    client.start_profile(output_dir, timeout=10.0, **options)
    try:
        return client.stop_profile(wait=True, timeout=timeout)
    except (KeyboardInterrupt, TimedOut):
        return client.stop_profile(timeout=timeout)


@_verb(10.0)
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
    client: SchedulerClient,
    timeout: float | None,
    page: Path | None,
    live: bool,
    interval: float,
    seconds: float | None,
    last: int,
) -> None:
    """Show the engine's memory history: device memory over time, with pauses and updates."""
    from .memory_view.live import events, watch
    from .memory_view.record import fetch
    from .serve.pages.document import write_page

    as_json = click.get_current_context().params["as_json"]
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


def _show(reply: Message, as_json: bool, rows: Rows | None = None) -> None:
    if as_json:
        click.echo(msgspec.json.encode(reply))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # a path that is cut off is of no use
    for name, value in rows if rows is not None else _rows(msgspec.to_builtins(reply)):
        table.add_row(name, Text(printable(value)))
    Console().print(table)


def _rows(fields: dict[str, Any]) -> Rows:
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


def status_rows(status: GetStatusReqOutput) -> Rows:
    """Yield the rows of a status; those of an engine that makes images are others."""
    pause = "" if status.pause_mode is None else f" ({_pause(status)})"
    weights = f"{status.weights}, version {status.weight_version}, epoch {status.weights_epoch}"
    if status.weights_detail is not None:
        weights += f": {status.weights_detail}"
    yield "generation", status.generation + pause
    yield "weights", weights
    if status.session is not None:
        yield (
            "session",
            f"{status.session.kind}, {status.session.age_s:.1f} s, {status.session.written_tensors} tensors",
        )
    if status.update is not None:
        done = f"{status.update.written_bytes / MIB:.0f} of {status.update.total_bytes / MIB:.0f} MiB"
        yield "update", f"{status.update.source}, {done}, {status.update.age_s:.1f} s"
    tags = ", ".join(status.released_tags)
    released = f" ({tags}): nothing is generated before resume_memory" if tags else ""
    yield "memory", status.memory + released
    yield "requests", _requests(status)
    age = "none yet" if status.last_step_age_s is None else f"last {status.last_step_age_s:.1f} s ago"
    unit = "tokens" if status.images is None else "denoise steps"
    yield "throughput", f"{status.gen_throughput:.1f} {unit}/s in the last seconds"
    yield (
        "steps",
        f"{status.step} ({age}), {status.generated_tokens} {unit}, {status.num_retractions} retractions",
    )
    failures = status.step_failures
    if failures.failed:
        of = "tokens" if status.images is None else "samples"
        limit = "" if failures.token_limit is None else f", at most {failures.token_limit} {of} for now"
        yield (
            "failures",
            f"{failures.failed} steps, {failures.retried} computed again, {failures.splits} splits{limit}",
        )
    kv = status.kv
    if status.images is None:
        yield "KV tokens", f"{kv.free} free + {kv.cached} cached + {kv.held} held = {kv.total}"
    memory = status.device_memory
    available = "unknown" if memory.available is None else f"{memory.available / MIB:.1f}"
    yield (
        "device",
        (
            f"{status.device}: {memory.reserved / MIB:.1f} MiB reserved, "
            f"{memory.allocated / MIB:.1f} allocated, "
            f"{available} available; weights {memory.weights / MIB:.1f}"
            + ("" if status.images is not None else f", KV {memory.kv_cache / MIB:.1f}")
        ),
    )
    for part in status.components:
        there, size = part.device_bytes / MIB, part.nbytes / MIB
        yield part.name, f"{part.residency}, {there:.1f} of {size:.1f} MiB on the device"
    yield "kernels", _kernels(status)
    limits = f", context {status.context_len}, vocabulary {status.vocab_size}"
    yield "model", f"{status.model_path} ({status.dtype}{limits if status.images is None else ''})"
    yield "process", f"pid {status.pid}, up {status.uptime_s:.0f} s, version {status.version}"


def _requests(status: GetStatusReqOutput) -> str:
    load = status.images
    if load is None:
        running = f"{status.running_requests} running, {status.prefilling_requests} prefilling"
    else:
        running = f"{load.encoding} encoding, {load.denoising} denoising, {load.decoding} decoding"
    return f"{running}, {status.waiting_requests} waiting (limit {status.max_running_requests})"


def _pause(status: GetStatusReqOutput) -> str:
    age = status.pause_age_s or 0.0
    since = strftime("%Y-%m-%d %H:%M:%S", localtime(time() - age))
    owner = "no owner" if status.pause_owner is None else f"owner {status.pause_owner}"
    lease = "no lease" if status.lease_left_s is None else f"lease ends in {status.lease_left_s:.1f} s"
    return f"{status.pause_mode}, for {age:.1f} s, since {since}, {owner}, {lease}"


def _kernels(status: GetStatusReqOutput) -> str:
    operations: dict[str, list[str]] = {}
    for operation, name in status.kernels.items():
        operations.setdefault(name, []).append(operation)
    text = "; ".join(f"{name}: {', '.join(served)}" for name, served in operations.items()) or "unknown"
    return text if status.kernels_reason is None else f"{text} ({status.kernels_reason})"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    try:
        status = cli(arguments, standalone_mode=False)
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
