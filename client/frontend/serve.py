"""``caesura serve``: a scheduler and its HTTP server in one command.

Invariants:
- The server listens only when the engine is ready, and says where once it has answered.
- Keys come from files or the environment, never from the command line, and the scheduler does not inherit them.
- An address beyond loopback needs an API key, or the explicit word that everybody who can reach it may use it.
- How it ends, and what becomes of it without its engine: ``watch.py``.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...io_struct import private_directory
from ...io_struct.text import LOG_PREFIX, LOG_TIME
from ..exceptions import EngineError
from ..process.launch import LaunchedScheduler, engine_command
from ..process.notify import notify
from ..process.stderr import Repeats, queued_stderr
from ..process.supervise import restart_options, status_of, stop_timeout_s, supervised
from ..process.supervisor import RestartPolicy, Supervisor
from ..wire.async_client import AsyncSchedulerClient
from ..wire.curve import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE
from .printable import PrintableFormatter
from .tls import tls_context
from .watch import Watch, interrupted_by_signals, unless_stopped

if TYPE_CHECKING:
    from .context import FrontEnd, ServeOptions
    from .server import Server

API_KEY, ADMIN_KEY = "CAESURA_API_KEY", "CAESURA_ADMIN_KEY"
OPEN_TO_ALL = (
    "generate, abort the generations of others, pause, replace the weights, have the scheduler connect to any address and have "
    "files under --weights-root read"
)
"""What whoever reaches a server without keys can do; for the help and the warning at start."""
MAX_DESCRIPTORS = 1 << 20
"""Of the limit of open descriptors, which is raised no further."""
_NEEDS_EXTRA = 'the HTTP server needs additional packages: pip install "caesura[serve]"'


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--model", type=click.Path(), help="Hugging Face model folder. Required unless --endpoint is given."
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
    if given["endpoint"] is not None and context.args:
        raise click.UsageError(f"scheduler options cannot be used with --endpoint: {' '.join(context.args)}")
    keys = _Keys.take(given.pop("api_key_file"), given.pop("admin_key_file"))
    _check_host(given["host"], keys, insecure=given["insecure_bind"])
    names = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file", "ssl_ca_certs")
    tls = tls_context(*(given.pop(name) for name in names))
    _warn(given["host"], keys, tls)
    with contextlib.closing(_bound(given["host"], given["port"])) as listener:
        given["port"] = listener.getsockname()[1]
        context.exit(
            run(Settings(keys=keys, tls=tls, scheduler_arguments=context.args, **given), listener, Server)
        )


@dataclass(frozen=True, slots=True, repr=False)
class _Keys:
    api: str | None
    admin: str | None

    @classmethod
    def take(cls, api_file: str | None, admin_file: str | None) -> "_Keys":
        """From files, else from the environment, which then has them no longer.

        Raises:
            click.UsageError: a file cannot be read, or a key is empty.
        """
        return cls(_key(API_KEY, api_file), _key(ADMIN_KEY, admin_file))


def _key(variable: str, file: str | None) -> str | None:
    key = os.environ.pop(variable, None)
    if file is not None:
        try:
            key = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (
                error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            )  # never what is in it
            raise click.UsageError(f"cannot read the key file {file}: {reason}") from None
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise click.UsageError(f"the key in {file or variable} is empty")
    return key


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _check_host(host: str, keys: _Keys, *, insecure: bool) -> None:
    if not _is_loopback(host) and keys.api is None and not insecure:
        raise click.UsageError(
            f"--host {host} can be reached from other machines: it needs --api-key-file (or {API_KEY}) and preferably an admin "
            "key, or --insecure-bind, which gives full access to anyone who can reach it"
        )


def _warn(host: str, keys: _Keys, tls: ssl.SSLContext | None) -> None:
    if _is_loopback(host):
        return
    if keys.api is None:
        what = f"no API key: anyone who can reach it can {OPEN_TO_ALL}"
    elif tls is None:
        what = "no TLS: keys, prompts and outputs are sent unencrypted"
    else:
        return
    click.echo(f"warning: insecure: {host} can be reached from other machines, and there is {what}", err=True)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = "; give another --port (0: any free one)" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}{other}") from error
    listener.set_inheritable(False)
    return listener


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """What the command line said."""

    keys: _Keys
    tls: ssl.SSLContext | None
    insecure_bind: bool
    max_connections: int
    scheduler_arguments: list[str]
    model: str | None
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


def _raise_descriptor_limit() -> None:
    """As far as allowed: each connection is one, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(settings: Settings, listener: socket.socket, server_class: "type[Server]") -> int:
    """Everything until the end; the exit status."""
    _raise_descriptor_limit()
    with queued_stderr():
        _configure_log()
        return _run(settings, listener, server_class)


def _configure_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"{LOG_PREFIX} %(name)s: %(message)s", LOG_TIME))
    handler.addFilter(Repeats())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _run(settings: Settings, listener: socket.socket, server_class: "type[Server]") -> int:
    with interrupted_by_signals():  # until the event loop has handlers of its own
        launched = None if settings.model is None else _launch(settings)
        try:
            endpoint = launched.endpoint if launched is not None else str(settings.endpoint)
            return _event_loop()(_serve(settings, endpoint, launched, listener, server_class))
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


def _launch(settings: Settings) -> LaunchedScheduler | Supervisor:
    if settings.restart:
        return _supervise(settings)
    directory = private_directory.make()
    command = engine_command("--model", str(settings.model))
    command += ["--endpoint", f"ipc://{directory}/{private_directory.SOCKET}", *settings.scheduler_arguments]
    return LaunchedScheduler(
        command,
        directory=directory,
        startup_timeout=settings.startup_timeout,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    )


def _supervise(settings: Settings) -> Supervisor:
    arguments = ["--model", str(settings.model), *settings.scheduler_arguments]
    policy = RestartPolicy(
        max_restarts=settings.max_restarts,
        window_s=settings.restart_window,
        hang_timeout_s=settings.hang_timeout,
        startup_timeout_s=settings.startup_timeout,
        stop_timeout_s=stop_timeout_s(arguments),
    )
    supervisor = supervised(
        arguments,
        None,
        policy,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    )
    try:
        supervisor.start()
    except EngineError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(status_of(error))
    except BaseException:
        supervisor.close()
        raise
    return supervisor


async def _serve(
    settings: Settings,
    endpoint: str,
    launched: LaunchedScheduler | Supervisor | None,
    listener: socket.socket,
    server_class: "type[Server]",
) -> int:
    from .context import OWNER

    client = AsyncSchedulerClient(
        endpoint,
        owner=OWNER,
        curve_server_key=settings.curve_server_key,
        curve_client_key_file=settings.curve_client_key_file,
    )

    async def start() -> tuple["Server", Watch]:
        from .app import create_app

        front = await front_end(settings, client)
        server = server_class(
            create_app(front),
            lambda: _announce(front.options, endpoint, "http" if settings.tls is None else "https"),
            connections=front.metrics.connections,
            tls=settings.tls,
        )
        watch = Watch(server, front, launched)
        watch.begin()  # without a pause since the last await: no signal is lost in between
        return server, watch

    try:
        server, watch = await unless_stopped(start())
        gc.freeze()  # imports and routes live as long as the process: a full collection need not go through them
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.end()
        return watch.status
    finally:
        await client.close()


async def front_end(settings: Settings, client: AsyncSchedulerClient) -> "FrontEnd":
    """What the handlers need, from the engine's first answer."""
    from ..text.tokenizer import TextTokenizer, TokenizerMissing
    from ..text.tokenizer_manager import TokenizerManager
    from .context import FrontEnd, ServeOptions
    from .pages.metrics import Metrics

    status = await client.status(owner="", timeout=settings.startup_timeout)
    model = settings.model or status.model_path
    folder = settings.tokenizer or model
    tokenizer = None
    if folder != "none":
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
    front = FrontEnd(manager=manager, options=options, metrics=Metrics(settings.max_connections))
    await front.metrics.engine.look(client)  # so that there is always a last one
    return front


def _announce(options: "ServeOptions", endpoint: str, scheme: str) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    keys = " with keys" if options.api_key or options.admin_key else ""
    click.echo(f"serving {options.model_name} on {scheme}://{host}:{options.port}{keys} (engine {endpoint})")
    sys.stdout.flush()
    notify("READY=1", f"STATUS=serving on {scheme}://{host}:{options.port}")
