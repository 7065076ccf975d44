"""``caesura serve``: a scheduler and the HTTP server over it, as one command.

Invariants:
- The server listens only when the engine is ready, and says where once it has answered.
- Keys come from files or the environment, never from the command line, and the scheduler does not inherit them.
- An address beyond loopback needs an API key.
- A signal ends the engine first, so that every request in flight is answered, then the server; status 0. An engine that ends by
  itself ends the server with status 1, after every waiting client has got its error.
- With ``--restart`` the server outlives the engine: while there is none, requests are refused at once.
"""

import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..async_client import AsyncSchedulerClient
from ..exceptions import EngineError, EngineRestarting
from ..launch import LaunchedScheduler, private_directory
from ..notify import notify
from ..supervise import restart_options, status_of, supervised
from ..supervisor import Down, RestartPolicy, Serving, State, Supervisor

if TYPE_CHECKING:
    from .context import FrontEnd, ServeOptions
    from .server import Server

API_KEY, ADMIN_KEY = "CAESURA_API_KEY", "CAESURA_ADMIN_KEY"
EXIT_GRACE_S = 0.3
"""Between the engine's unexpected end and the server's: the answers that this causes are written meanwhile."""
_NEEDS_EXTRA = 'the HTTP server needs more packages: pip install "caesura[serve]"'


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--model", type=click.Path(), help="Hugging Face folder. Needed unless --endpoint is given.")
@click.option("--endpoint", help="Serve a scheduler that runs already, instead of starting one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback an API key is needed.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=30000, show_default=True, help="0: any free one."
)
@click.option("--api-key-file", type=click.Path(), help=f"Key of clients; or the environment's {API_KEY}.")
@click.option("--admin-key-file", type=click.Path(), help=f"Key of what changes the engine; or {ADMIN_KEY}.")
@click.option(
    "--weights-root",
    type=click.Path(),
    help="Updates load from under it.  [default: the model's parent, unless that is /]",
)
@click.option(
    "--allow-pickled-tensors", is_flag=True, help="Parse SGLang's pickled tensors; nothing is unpickled."
)
@click.option("--incremental-streaming", is_flag=True, help="Native streams carry only what is new.")
@click.option(
    "--served-model-name", default="", help="What OpenAI clients call the model.  [default: its path]"
)
@click.option("--tokenizer", type=click.Path(), help='Folder; "none": token ids only.  [default: the model]')
@click.option("--max-body-bytes", type=click.IntRange(1), default=32 << 20, show_default=True)
@click.option(
    "--max-update-bytes",
    type=click.IntRange(1),
    default=2 << 30,
    show_default=True,
    help="Weights in a body.",
)
@click.option(
    "--max-batch", type=click.IntRange(1), default=4096, show_default=True, help="Samples of one request."
)
@click.option("--startup-timeout", type=float, default=600.0, show_default=True, help="Seconds.")
@click.option("--restart", is_flag=True, help="Bring the scheduler back when it dies or hangs.")
@restart_options
@click.pass_context
def serve(context: click.Context, /, **given: Any) -> None:
    """Start a scheduler and an HTTP server that speaks SGLang's and OpenAI's endpoints.

    What is no option here goes to the scheduler: see `caesura scheduler --help`.
    """
    try:
        from .server import Server
    except ImportError as error:
        raise click.ClickException(f"{_NEEDS_EXTRA} ({error})") from error
    if (given["model"] is None) == (given["endpoint"] is None):
        raise click.UsageError("give either --model or --endpoint")
    if given["model"] is not None:
        given["model"] = os.path.abspath(given["model"])
    if given["restart"] and given["model"] is None:
        raise click.UsageError("--restart needs --model: a scheduler that runs already is not this command's")
    if given["endpoint"] is not None and context.args:
        raise click.UsageError(f"a running scheduler takes no options: {' '.join(context.args)}")
    keys = _Keys.take(given.pop("api_key_file"), given.pop("admin_key_file"))
    _check_host(given["host"], keys)
    with contextlib.closing(_bound(given["host"], given["port"])) as listener:
        given["port"] = listener.getsockname()[1]
        context.exit(run(Settings(keys=keys, scheduler_arguments=context.args, **given), listener, Server))


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
            raise click.UsageError(f"the key in {file} cannot be read: {type(error).__name__}") from None
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise click.UsageError(f"the key of {file or variable} is empty")
    return key


def _check_host(host: str, keys: _Keys) -> None:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and keys.api is None:
        raise click.UsageError(
            f"--host {host} can be reached by others: give --api-key-file (or {API_KEY}), and better an admin key too"
        )


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.set_inheritable(False)
    return listener


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """What the command line said."""

    keys: _Keys
    scheduler_arguments: list[str]
    model: str | None
    endpoint: str | None
    host: str
    port: int
    weights_root: str | None
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


def run(settings: Settings, listener: socket.socket, server_class: "type[Server]") -> int:
    """Everything until the end; the exit status."""
    with _interrupted_by_sigterm():
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


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM like Ctrl-C, so that a start that is waited for is cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _launch(settings: Settings) -> LaunchedScheduler | Supervisor:
    if settings.restart:
        return _supervise(settings)
    directory = private_directory()
    command = [sys.executable, "-m", "caesura.scheduler", "--model", str(settings.model)]
    command += ["--endpoint", f"ipc://{directory}/scheduler.sock", *settings.scheduler_arguments]
    return LaunchedScheduler(command, directory=directory, startup_timeout=settings.startup_timeout)


def _supervise(settings: Settings) -> Supervisor:
    policy = RestartPolicy(
        max_restarts=settings.max_restarts,
        window_s=settings.restart_window,
        hang_timeout_s=settings.hang_timeout,
        startup_timeout_s=settings.startup_timeout,
    )
    arguments = ["--model", str(settings.model), *settings.scheduler_arguments]
    supervisor = supervised(arguments, None, policy)
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
    from .app import create_app
    from .context import OWNER

    client = AsyncSchedulerClient(endpoint, owner=OWNER)
    try:
        front = await front_end(settings, client)
        server = server_class(create_app(front), lambda: _announce(front.options, endpoint))
        watch = _Watch(server, client, launched)
        watch.begin()
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
    from ..tokenizer_manager import TokenizerManager
    from .context import FrontEnd, ServeOptions
    from .metrics import Metrics

    status = await client.status(timeout=settings.startup_timeout)
    model = settings.model or status.model_path
    folder = settings.tokenizer or model
    tokenizer = None
    if folder != "none":
        try:
            tokenizer = await asyncio.to_thread(TextTokenizer.from_folder, folder)
        except TokenizerMissing:
            if settings.tokenizer is not None:
                raise
            click.echo(f"{folder} has no tokenizer: token ids only", err=True)
    options = ServeOptions(
        api_key=settings.keys.api,
        admin_key=settings.keys.admin,
        model_path=model,
        tokenizer_path=folder if tokenizer is not None else "",
        context_length=status.context_len,
        vocab_size=status.vocab_size,
        host=settings.host,
        port=settings.port,
        weights_root=settings.weights_root,
        allow_pickled_tensors=settings.allow_pickled_tensors,
        incremental_streaming=settings.incremental_streaming,
        served_model_name=settings.served_model_name,
        max_body_bytes=settings.max_body_bytes,
        max_update_bytes=settings.max_update_bytes,
        max_batch=settings.max_batch,
    )
    manager = TokenizerManager(client, tokenizer, context_length=status.context_len)
    front = FrontEnd(manager=manager, options=options, metrics=Metrics())
    await front.metrics.engine.look(client)  # so that there is always a last one
    return front


def _announce(options: "ServeOptions", endpoint: str) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    keys = " with keys" if options.api_key or options.admin_key else ""
    click.echo(f"serving {options.model_name} on http://{host}:{options.port}{keys} (engine {endpoint})")
    sys.stdout.flush()
    notify("READY=1", f"STATUS=serving on http://{host}:{options.port}")


class _Watch:
    """Ends the server on a signal, or when the engine has ended for good."""

    def __init__(
        self,
        server: "Server",
        client: AsyncSchedulerClient,
        launched: LaunchedScheduler | Supervisor | None,
    ) -> None:
        self.status = 0
        self._server = server
        self._client = client
        self._launched = launched
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._process = -1

    def begin(self) -> None:
        """From now on."""
        loop = self._loop
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if isinstance(self._launched, Supervisor):
            self._launched.subscribe(self._hear)
        elif self._launched is not None:
            self._process = os.pidfd_open(self._launched.pid)
            loop.add_reader(self._process, self._on_exit)

    def end(self) -> None:
        """No longer."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        self._forget_process()

    def _forget_process(self) -> None:
        if self._process >= 0:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = -1

    def _on_signal(self) -> None:
        if self._stopping is not None:
            self._server.force_exit = True  # the second one
            return
        self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        """The engine first: it answers every request with what it has."""
        notify("STOPPING=1")
        self._server.stop_accepting()
        if self._launched is not None:
            self._forget_process()
            await asyncio.to_thread(self._launched.close)
        self._server.should_exit = True

    def _hear(self, state: State) -> None:
        """In the supervisor's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended before the engine
            self._loop.call_soon_threadsafe(self._on_state, state)

    def _on_state(self, state: State) -> None:
        """What has become of a supervised engine."""
        if self._stopping is not None:
            return
        if isinstance(state, Down):
            message = f"the scheduler {state.reason}; another one is being started"
            self._client.channel.refuse(EngineRestarting(message, reason=state.reason))
            notify(f"STATUS={message}")
        elif isinstance(state, Serving):
            self._client.channel.refuse(None)
            notify(f"STATUS=serving, {state.restarts} restarts")
        else:
            self.status = status_of(state.error)
            reason = "the scheduler was told to end" if state.error is None else f"error: {state.error}"
            click.echo(f"{reason}; the server ends with it", err=True)
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._leave)

    def _on_exit(self) -> None:
        self._forget_process()
        self.status = 1
        click.echo("error: the scheduler process has ended; the server ends with it", err=True)
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._leave)

    def _leave(self) -> None:
        self._server.should_exit = True
        self._stopping = asyncio.ensure_future(self._client.close())  # whatever still waits gets its error
