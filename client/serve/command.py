"""``caesura serve``: a scheduler and its HTTP server, which listens once the engine is ready."""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...process import private_directory
from ...process.log import server_log
from ..exceptions import EngineError, InvalidRequest
from ..launch.launcher import LaunchedScheduler, engine_command
from ..launch.restart_policy import RestartPolicy
from ..launch.supervise import log_format_option, restart_options, status_of
from ..launch.supervisor import Supervisor
from .options import (
    ADMIN_KEY,
    API_KEY,
    CommandLine,
    ServeOptions,
    check_host,
    command_line_options,
    listener,
    take_key,
    tls_context,
    warn,
)

if TYPE_CHECKING:
    from ..group.processes import ReplicaProcesses

StartedT = TypeVar("StartedT", Supervisor, "ReplicaProcesses")

MAX_DESCRIPTORS = 1 << 20
_NEEDS_EXTRA = 'the HTTP server needs additional packages: pip install "caesura[serve]"'


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@command_line_options
@restart_options
@log_format_option
@click.pass_context
def serve(context: click.Context, /, **given: Any) -> None:
    """Start a scheduler and an HTTP server with SGLang's and OpenAI's APIs.

    All other options are passed on to the scheduler: see `caesura scheduler --help`.
    """
    try:
        from . import app  # noqa: F401  (before an engine is started)
    except ImportError as error:
        raise click.ClickException(f"{_NEEDS_EXTRA} ({error})") from error
    _check_parsers(given)
    model, endpoint = given["model"], given["endpoint"] or given["worker_urls"]
    if [model, given["endpoint"], given["worker_urls"]].count(None) != 2:
        raise click.UsageError(
            "give either --model or --endpoint: a model folder to serve, or the address of a running "
            "scheduler; or --worker-urls, the addresses of several"
        )
    if model is not None and os.path.exists(model):  # else the scheduler's refusal quotes what was typed
        given["model"] = os.path.abspath(model)
    if given["restart"] and model is None:
        reason = "--restart needs --model: a scheduler given by --endpoint was not started by this command"
        raise click.UsageError(reason)
    if given["replicas"] > 1 and model is None:
        raise click.UsageError("--replicas needs --model: a scheduler given by --endpoint is one")
    if endpoint is not None and context.args:
        option = "--endpoint" if given["worker_urls"] is None else "--worker-urls"
        raise click.UsageError(f"scheduler options cannot be used with {option}: {' '.join(context.args)}")
    api_key = take_key(API_KEY, given["api_key_file"])
    admin_key = take_key(ADMIN_KEY, given["admin_key_file"])
    check_host(given["host"], api_key, insecure=given["insecure_bind"])
    tls = tls_context(CommandLine(**given))
    warn(given["host"], api_key, tls)
    with contextlib.closing(listener(given["host"], given["port"])) as bound:
        given["port"] = bound.getsockname()[1]
        options = ServeOptions(**given, api_key=api_key, admin_key=admin_key)
        _raise_descriptor_limit()
        with server_log("serve", options.log_format, "%(name)s"):
            context.exit(_run(options, context.args, bound, tls))


def _check_parsers(given: dict[str, Any]) -> None:
    from ..text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS

    for name, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        if given[name] not in (names := ("auto", "none", *known)):
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} {given[name]} is not known: {', '.join(names)}")


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run(
    options: ServeOptions, scheduler_arguments: list[str], bound: socket.socket, tls: ssl.SSLContext | None
) -> int:
    from . import app

    run: Any = asyncio.run
    with contextlib.suppress(ImportError):  # not on this platform
        import uvloop

        run = uvloop.run
    with app.interrupted_by_signals():  # until the event loop has handlers of its own
        launched = None if options.model is None else _launch(options, scheduler_arguments)
        try:
            status: int = run(app.serve(options, launched, bound, tls))
            return status
        finally:
            if launched is not None:
                launched.close()


def _launch(
    options: ServeOptions, scheduler_arguments: list[str]
) -> "LaunchedScheduler | Supervisor | ReplicaProcesses":
    arguments = ["--model", str(options.model), *scheduler_arguments, "--log-format", options.log_format]
    keys: dict[str, Any] = {
        "curve_server_key": options.curve_server_key,
        "curve_client_key_file": options.curve_client_key_file,
    }
    if options.replicas == 1 and not options.restart:
        directory = private_directory.make()
        endpoint = f"ipc://{directory}/{private_directory.SOCKET}"
        return LaunchedScheduler(
            [*engine_command(*arguments), "--endpoint", endpoint],
            directory=directory,
            startup_timeout=options.startup_timeout,
            **keys,
        )
    policy = RestartPolicy(
        max_restarts=options.max_restarts,
        restart_window_s=options.restart_window_s,
        hang_timeout_s=options.hang_timeout_s,
        startup_timeout_s=options.startup_timeout,
    )
    if options.replicas == 1:
        return _started(Supervisor(arguments, policy=policy, **keys))
    from ..group.processes import ReplicaProcesses  # with the whole group, which no other command needs

    try:
        replicas = ReplicaProcesses(arguments, options.replicas, policy, **keys)
    except InvalidRequest as error:
        raise click.UsageError(error.message) from error
    return _started(replicas)


def _started(engines: StartedT) -> StartedT:
    try:
        engines.start()
    except EngineError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        click.echo(f"error: {error}{notes}", err=True)
        sys.exit(status_of(error))
    except BaseException:
        engines.close()
        raise
    return engines
