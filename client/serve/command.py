"""``caesura serve``: a scheduler and its HTTP server in one command.

Invariants:
- The server listens only when the engine is ready, and says where once it has answered.
- Keys and addresses: ``listening.py``. Several engines behind one port: ``client/group/``.
- How it ends, and what becomes of it without its engine: ``watch.py``.
"""

import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...process import private_directory
from ...process.log import server_log
from ..connection.async_client import AsyncSchedulerClient
from ..connection.curve import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE
from ..exceptions import EngineError, InvalidRequest
from ..group.processes import ReplicaProcesses
from ..launch.launcher import LaunchedScheduler, engine_command
from ..launch.notify import notify
from ..launch.supervise import log_format_option, restart_options, status_of, stop_timeout_s, supervised
from ..launch.supervisor import RestartPolicy, Supervisor
from .listening import ADMIN_KEY, API_KEY, OPEN_TO_ALL, Keys, bound, check_host, warn
from .tls import tls_context
from .watch import Watch, interrupted_by_signals, unless_stopped

if TYPE_CHECKING:
    from ..group.replicas import ReplicaFleet
    from .context import FrontEnd, ServeOptions
    from .server import Server

Launched = LaunchedScheduler | Supervisor | ReplicaProcesses
"""What runs the engine or engines."""
StartedT = TypeVar("StartedT", Supervisor, ReplicaProcesses)

MAX_DESCRIPTORS = 1 << 20
"""Of the limit of open descriptors, which is raised no further."""
_NEEDS_EXTRA = 'the HTTP server needs additional packages: pip install "caesura[serve]"'


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--model", type=click.Path(), help="Hugging Face model folder. Required unless --endpoint is given."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of schedulers to start behind this port. Each has its own CUDA devices where there are some, else a part of the CPU "
    "threads; requests go to the least loaded, commands to all, and one that dies is restarted.",
)
@click.option("--endpoint", help="Address of a running scheduler to serve, instead of starting one.")
@click.option(
    "--curve-server-key",
    envvar=SERVER_KEY_VARIABLE,
    help="The scheduler's CURVE public key, or a file that contains it; needed for a scheduler with keys.",
)
@click.option(
    "--curve-client-key-file",
    envvar=CLIENT_KEY_VARIABLE,
    help="File with this server's CURVE key pair; needed for a scheduler with keys.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Beyond loopback it needs --api-key-file or --insecure-bind.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=30000,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option(
    "--api-key-file",
    type=click.Path(),
    help=f"File with the API key that clients must send.  [env: {API_KEY} (the key itself)]",
)
@click.option(
    "--admin-key-file",
    type=click.Path(),
    help=f"File with the key for routes that change the engine (pause, update, ...).  [env: {ADMIN_KEY} (the key itself)]",
)
@click.option(
    "--insecure-bind",
    is_flag=True,
    help="Allow listening beyond loopback without an API key. Anyone who can reach the port can then "
    f"{OPEN_TO_ALL}. For private networks only.",
)
@click.option("--ssl-certfile", type=click.Path(), help="Certificate for HTTPS, in PEM format.")
@click.option(
    "--ssl-keyfile",
    type=click.Path(),
    help="Private key of the certificate, in PEM format, unless --ssl-certfile contains it.",
)
@click.option(
    "--ssl-keyfile-password-file", type=click.Path(), help="File with the password of the private key."
)
@click.option(
    "--ssl-ca-certs",
    type=click.Path(),
    help="CA certificates in PEM format. Clients must present a certificate signed by one of them.",
)
@click.option(
    "--weights-root",
    type=click.Path(),
    help="Weight updates from disk must be in this folder.  [default: the parent folder of the model, unless that is /]",
)
@click.option(
    "--enable-memory-saver",
    is_flag=True,
    help="Let clients release the engine's memory (weights, KV cache, CUDA graphs) and resume it, as colocated trainers do.",
)
@click.option(
    "--allow-pickled-tensors",
    is_flag=True,
    help="Accept weights in SGLang's pickle format. They are parsed, never unpickled.",
)
@click.option(
    "--incremental-streaming",
    is_flag=True,
    help="Send only new text and tokens in each event of a /generate stream, not the whole output so far.",
)
@click.option(
    "--served-model-name", default="", help="Model name in the OpenAI API.  [default: the model path]"
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    help='Tokenizer folder; "none": token ids only.  [default: the model folder]',
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1),
    default=32 << 20,
    show_default=True,
    help="Maximum size of a request body.",
)
@click.option(
    "--max-update-bytes",
    type=click.IntRange(1),
    default=2 << 30,
    show_default=True,
    help="Maximum size of a request body with weights.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Maximum number of samples in one request.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Maximum number of connections; lower if the limit on open files is.",
)
@click.option(
    "--startup-timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Maximum seconds for the scheduler to become ready.",
)
@click.option("--restart", is_flag=True, help="Restart the scheduler when it dies or hangs.")
@restart_options
@log_format_option
@click.pass_context
def serve(context: click.Context, /, **given: Any) -> None:
    """Start a scheduler and an HTTP server with SGLang's and OpenAI's APIs.

    All other options are passed on to the scheduler: see `caesura scheduler --help`.
    """
    try:
        from .server import Server
    except ImportError as error:
        raise click.ClickException(f"{_NEEDS_EXTRA} ({error})") from error
    if (given["model"] is None) == (given["endpoint"] is None):
        raise click.UsageError(
            "give either --model or --endpoint: a model folder to serve, or the address of a running scheduler"
        )
    if given["model"] is not None and os.path.exists(
        given["model"]
    ):  # else the scheduler's refusal quotes what was typed
        given["model"] = os.path.abspath(given["model"])
    if given["restart"] and given["model"] is None:
        raise click.UsageError(
            "--restart needs --model: a scheduler given by --endpoint was not started by this command"
        )
    if given["replicas"] > 1 and given["model"] is None:
        raise click.UsageError("--replicas needs --model: a scheduler given by --endpoint is one")
    if given["endpoint"] is not None and context.args:
        raise click.UsageError(f"scheduler options cannot be used with --endpoint: {' '.join(context.args)}")
    keys = Keys.take(given.pop("api_key_file"), given.pop("admin_key_file"))
    check_host(given["host"], keys, insecure=given["insecure_bind"])
    names = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file", "ssl_ca_certs")
    tls = tls_context(*(given.pop(name) for name in names))
    warn(given["host"], keys, tls)
    with contextlib.closing(bound(given["host"], given["port"])) as listener:
        given["port"] = listener.getsockname()[1]
        context.exit(
            run(Settings(keys=keys, tls=tls, scheduler_arguments=context.args, **given), listener, Server)
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """What the command line said."""

    keys: Keys
    tls: ssl.SSLContext | None
    insecure_bind: bool
    max_connections: int
    scheduler_arguments: list[str]
    model: str | None
    replicas: int
    endpoint: str | None
    curve_server_key: str | None
    curve_client_key_file: str | None
    host: str
    port: int
    weights_root: str | None
    enable_memory_saver: bool
    allow_pickled_tensors: bool
    incremental_streaming: bool
    served_model_name: str
    tokenizer: str | None
    max_body_bytes: int
    max_update_bytes: int
    max_batch: int
    startup_timeout: float
    restart: bool
    max_restarts: int
    restart_window: float
    hang_timeout: float
    log_format: str

    @property
    def engine_arguments(self) -> list[str]:
        """Options of the scheduler, or of each."""
        model = ["--model", str(self.model)]
        return [*model, *self.scheduler_arguments, "--log-format", self.log_format]


def _raise_descriptor_limit() -> None:
    """As far as allowed: each connection is one, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(settings: Settings, listener: socket.socket, server_class: "type[Server]") -> int:
    """Everything until the end; the exit status."""
    _raise_descriptor_limit()
    with server_log("serve", settings.log_format, "%(module_path)s"):
        return _run(settings, listener, server_class)


def _run(settings: Settings, listener: socket.socket, server_class: "type[Server]") -> int:
    with interrupted_by_signals():  # until the event loop has handlers of its own
        launched = None if settings.model is None else _launch(settings)
        try:
            return _event_loop()(_serve(settings, launched, listener, server_class))
        finally:
            if launched is not None:
                launched.close()


def _event_loop() -> Callable[[Any], int]:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run
    run_with: Callable[[Any], int] = uvloop.run
    return run_with


def _launch(settings: Settings) -> Launched:
    if settings.replicas > 1:
        return _started(settings, _replicas(settings))
    if settings.restart:
        return _started(settings, _supervisor(settings))
    directory = private_directory.make()
    command = engine_command(*settings.engine_arguments)
    command += ["--endpoint", f"ipc://{directory}/{private_directory.SOCKET}"]
    return LaunchedScheduler(
        command,
        directory=directory,
        startup_timeout=settings.startup_timeout,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    )


def _supervisor(settings: Settings) -> Supervisor:
    arguments, policy = _restarts(settings)
    return supervised(
        arguments,
        None,
        policy,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    )


def _replicas(settings: Settings) -> ReplicaProcesses:
    arguments, policy = _restarts(settings)
    try:
        return ReplicaProcesses(
            arguments,
            settings.replicas,
            policy,
            curve_server_key=settings.curve_server_key,
            curve_client_key_file=settings.curve_client_key_file,
        )
    except InvalidRequest as error:
        raise click.UsageError(error.message) from error


def _restarts(settings: Settings) -> tuple[list[str], RestartPolicy]:
    arguments = settings.engine_arguments
    policy = RestartPolicy(
        max_restarts=settings.max_restarts,
        window_s=settings.restart_window,
        hang_timeout_s=settings.hang_timeout,
        startup_timeout_s=settings.startup_timeout,
        stop_timeout_s=stop_timeout_s(arguments),
    )
    return arguments, policy


def _started(settings: Settings, engines: StartedT) -> StartedT:
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


@contextlib.asynccontextmanager
async def _connected(
    settings: Settings, launched: Launched | None
) -> AsyncIterator[tuple[AsyncSchedulerClient, str, "ReplicaFleet | None"]]:
    """The client of the engine or engines, where they are as text, and the fleet where they are several."""
    from .context import OWNER

    if isinstance(launched, ReplicaProcesses):
        from ..group.replicas import ReplicaFleet

        async with ReplicaFleet(launched, owner=OWNER) as fleet:
            yield fleet.client, f"{fleet.size} replicas", fleet
        return
    endpoint = launched.endpoint if launched is not None else str(settings.endpoint)
    async with AsyncSchedulerClient(
        endpoint,
        owner=OWNER,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    ) as client:
        yield client, f"engine {endpoint}", None


async def _serve(
    settings: Settings, launched: Launched | None, listener: socket.socket, server_class: "type[Server]"
) -> int:
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> tuple["Server", Watch, "FrontEnd"]:
            from .app import create_app

            client, where, fleet = await stack.enter_async_context(_connected(settings, launched))
            front = await front_end(settings, client, fleet)
            server = server_class(
                create_app(front),
                lambda: _announce(front.options, where, "http" if settings.tls is None else "https"),
                connections=front.metrics.connections,
                tls=settings.tls,
            )
            watch = Watch(server, front, launched)
            watch.begin()  # without a pause since the last await: no signal is lost in between
            return server, watch, front

        server, watch, front = await unless_stopped(start())
        gc.freeze()  # imports and routes live as long as the process: a full collection need not go through them
        sampling = asyncio.ensure_future(front.metrics.engine.sample(front.client))
        try:
            await server.serve(sockets=[listener])
        finally:
            sampling.cancel()
            watch.end()
        return watch.status


async def front_end(
    settings: Settings, client: AsyncSchedulerClient, fleet: "ReplicaFleet | None" = None
) -> "FrontEnd":
    """What the handlers need, from the engine's first answer."""
    from ..text.tokenizer import TextTokenizer, TokenizerMissing
    from ..text.tokenizer_manager import TokenizerManager
    from .context import FrontEnd, ServeOptions
    from .pages.metrics import Metrics

    status = await client.status(owner="", timeout=settings.startup_timeout)
    model = settings.model or status.model_path
    folder = settings.tokenizer or model
    tokenizer = None
    if folder != "none" and (
        status.images is None or settings.tokenizer is not None
    ):  # a pipeline has its own
        try:
            tokenizer = await asyncio.to_thread(TextTokenizer.from_folder, folder)
        except TokenizerMissing:
            if settings.tokenizer is not None:
                raise
            click.echo(f"{folder} has no tokenizer: only token ids are served", err=True)
    options = ServeOptions(
        api_key=settings.keys.api,
        admin_key=settings.keys.admin,
        model_path=model,
        tokenizer_path=folder if tokenizer is not None else "",
        context_length=status.context_len,
        makes_images=status.images is not None,
        latent_bytes_per_pixel=status.latent_bytes_per_pixel or 0.0,
        vocab_size=status.vocab_size,
        host=settings.host,
        any_host=settings.insecure_bind,
        port=settings.port,
        weights_root=settings.weights_root,
        enable_memory_saver=settings.enable_memory_saver,
        allow_pickled_tensors=settings.allow_pickled_tensors,
        incremental_streaming=settings.incremental_streaming,
        served_model_name=settings.served_model_name,
        max_body_bytes=settings.max_body_bytes,
        max_update_bytes=settings.max_update_bytes,
        max_batch=settings.max_batch,
    )
    manager = TokenizerManager(client, tokenizer, context_length=status.context_len)
    front = FrontEnd(manager=manager, options=options, metrics=Metrics(settings.max_connections), fleet=fleet)
    await front.metrics.engine.look(client)  # so that there is always a last one
    return front


def _announce(options: "ServeOptions", engines: str, scheme: str) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    keys = " with keys" if options.api_key or options.admin_key else ""
    click.echo(f"serving {options.model_name} on {scheme}://{host}:{options.port}{keys} ({engines})")
    sys.stdout.flush()
    notify("READY=1", f"STATUS=serving on {scheme}://{host}:{options.port}")
