"""The Litestar application and its server, until a signal or the engine ends them.

Invariants: a route without an access class needs the admin key, so a forgotten one opens nothing. The server
listens only when the engine is ready, and says where once it has answered. A signal ends the engine first, so
that requests in flight are answered, then the server; a second one ends the drain. An engine that ends by
itself ends the server with status 1, after every waiting client's error. With ``--restart`` the server
outlives the engine and refuses requests meanwhile; with ``--replicas`` it ends with the last one.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import click
from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler

from ..connection.async_client import AsyncSchedulerClient
from ..exceptions import EngineRestarting
from ..group.members import EngineAddress
from ..group.processes import ReplicaProcesses
from ..group.replicas import ReplicaFleet
from ..launch.launcher import LaunchedScheduler
from ..launch.notify import notify
from ..launch.supervise import status_of
from ..launch.supervisor import Down, Serving, Supervisor
from ..launch.supervisor import State as EngineState
from ..text.tokenizer import TextTokenizer, TokenizerMissing
from ..text.tokenizer_manager import TokenizerManager
from . import drift_routes, lora_routes, session_routes, worker_routes
from .anthropic import messages
from .context import OWNER, Front, FrontEnd
from .error_responses import EXCEPTION_HANDLERS
from .middleware import AuthMiddleware, BodyLimit, RequestId, RoutingKey, name_request
from .openai import chat, completions, images, models, responses
from .openai.common import EXCEPTION_HANDLERS as OPENAI_HANDLERS
from .options import ServeOptions
from .pages import dashboard, metrics, openapi
from .server import Server
from .sglang import control, external_corpora, generate, info, parse, rollout, tokenize, weights
from .tinker import asample, samplers, training
from .vllm import control as vllm_control
from .vllm import render, tokens
from .vllm import weights as vllm_weights

__all__ = ["ROUTES", "Front", "FrontEnd", "ServeOptions", "create_app", "routes_of"]

Launched = LaunchedScheduler | Supervisor | ReplicaProcesses
T = TypeVar("T")
EXIT_GRACE_S = 0.3
"""Seconds between the engine's unexpected end and the server's, in which errors are sent."""
TOLD_S, LOOK_S = 5.0, 0.02
"""Seconds for calls to notice the lost connection, and between two looks."""
DRAIN_S = 5.0
"""Seconds for generations on an engine that was not started here, after a signal."""


def routes_of(*modules: ModuleType) -> list[HTTPRouteHandler]:
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, HTTPRouteHandler)]


ROUTES = [
    *routes_of(generate, rollout, control, weights, info, tokenize, completions, chat, images, models),
    *routes_of(responses, messages, render, parse, session_routes, external_corpora),
    *routes_of(worker_routes),
    *routes_of(tokens, vllm_control, vllm_weights, lora_routes, drift_routes, asample, samplers, training),
    *routes_of(metrics, dashboard, openapi),
]
for _handler in routes_of(tokens, vllm_control, vllm_weights, asample, samplers, training):
    _handler.exception_handlers = OPENAI_HANDLERS


def create_app(front: FrontEnd, routes: Sequence[HTTPRouteHandler] = ROUTES) -> Litestar:
    async def provide() -> FrontEnd:
        return front

    replicas = [] if front.fleet is None else [RoutingKey()]
    return Litestar(
        route_handlers=routes,
        dependencies={"front": Provide(provide)},
        middleware=[RequestId(), AuthMiddleware(front.options), BodyLimit(front.options), *replicas],
        before_send=[name_request],
        exception_handlers=EXCEPTION_HANDLERS,
        state=State({"front": front}, deep_copy=False),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,  # BodyLimit does it, by route
    )


@contextlib.asynccontextmanager
async def _connected(
    options: ServeOptions, launched: Launched | None
) -> AsyncIterator[tuple[AsyncSchedulerClient, str, ReplicaFleet | None]]:
    """Connect; yield the client, the engines' place for people, and the fleet, or None with one engine."""
    if isinstance(launched, ReplicaProcesses):
        async with ReplicaFleet(launched, owner=OWNER) as fleet:
            yield fleet.client, f"{fleet.size} replicas", fleet
        return
    if options.worker_urls is not None:
        keys = options.curve_server_key, options.curve_client_key_file
        workers = [EngineAddress(url.strip(), *keys) for url in options.worker_urls.split(",")]
        async with ReplicaFleet(workers, owner=OWNER) as fleet:
            yield fleet.client, f"{fleet.size} workers", fleet
        return
    endpoint = launched.endpoint if launched is not None else str(options.endpoint)
    async with AsyncSchedulerClient(
        endpoint,
        owner=OWNER,
        curve_server_key=options.curve_server_key,
        curve_client_key_file=options.curve_client_key_file,
    ) as client:
        yield client, f"engine {endpoint}", None


async def serve(
    options: ServeOptions, launched: Launched | None, bound: socket.socket, tls: ssl.SSLContext | None
) -> int:
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> tuple[Server, Watch, FrontEnd]:
            client, engines, fleet = await stack.enter_async_context(_connected(options, launched))
            front = await front_end(options, client, fleet)
            scheme = "http" if tls is None else "https"
            server = Server(
                create_app(front),
                lambda: _announce(front.options, engines, scheme),
                connections=front.metrics.connections,
                tls=tls,
            )
            # No await since the last one: no signal is lost in between.
            return server, Watch(server, front, launched), front

        server, watch, front = await unless_stopped(start())
        gc.freeze()  # imports and routes live as long as the process: full collections need not visit them
        sampling = asyncio.ensure_future(front.metrics.engine.sample(front.client))
        telling = asyncio.ensure_future(session_routes.tell_ended(front))
        try:
            await server.serve(sockets=[bound])
        finally:
            sampling.cancel()
            telling.cancel()
            watch.end()
        return watch.status


async def front_end(
    options: ServeOptions, client: AsyncSchedulerClient, fleet: ReplicaFleet | None = None
) -> FrontEnd:
    status = await client.status(owner="", timeout=options.startup_timeout)
    model = options.model or status.model_path
    folder = options.tokenizer or model
    tokenizer = None
    # A pipeline has its own tokenizers.
    if folder != "none" and (status.images is None or options.tokenizer is not None):
        try:
            tokenizer = await asyncio.to_thread(TextTokenizer.from_folder, folder)
        except TokenizerMissing:
            if options.tokenizer is not None:
                raise
            click.echo(f"{folder} has no tokenizer: only token ids are served", err=True)
    options = replace(
        options,
        model_path=model,
        tokenizer_path=folder if tokenizer is not None else "",
        context_length=status.context_len,
        makes_images=status.images is not None,
        latent_bytes_per_pixel=status.latent_bytes_per_pixel or 0.0,
        vocab_size=status.vocab_size,
        max_loras=status.max_loras,
    )
    manager = TokenizerManager(client, tokenizer, context_length=status.context_len)
    counters = metrics.Metrics(options.max_connections, fleet)
    front = FrontEnd(manager=manager, options=options, metrics=counters, fleet=fleet)
    await front.metrics.engine.look(client)  # so that there is always a last status
    return front


def _announce(options: ServeOptions, engines: str, scheme: str) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    keys = " with keys" if options.api_key or options.admin_key else ""
    click.echo(f"serving {options.model_name} on {scheme}://{host}:{options.port}{keys} ({engines})")
    sys.stdout.flush()
    notify("READY=1", f"STATUS=serving on {scheme}://{host}:{options.port}")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end the command; SIGHUP not if it was ignored at start, as under ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Cancel the block at a stop signal with status 128 + number; only a third signal acts by default."""
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    except KeyboardInterrupt as interrupted:
        number = signal.Signals(interrupted.args[0] if interrupted.args else signal.SIGINT)
        click.echo(f"the server ends: {number.name} at start", err=True)
        raise click.exceptions.Exit(128 + number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def unless_stopped(starting: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``starting``; a stop signal cancels it and raises KeyboardInterrupt(number)."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(starting)
    received: list[int] = []

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        for number in numbers:
            loop.remove_signal_handler(number)
        if received:
            raise KeyboardInterrupt(received[0]) from None
        raise


class Watch:
    """Watch over a server, its signals and its engine, from now on."""

    def __init__(self, server: Server, front: FrontEnd, launched: Launched | None) -> None:
        self.status = 0
        self._server = server
        self._front = front
        self._launched = launched
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._process = -1  # descriptor of the engine's process
        self._signals = stop_signals()
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal)
        if isinstance(launched, Supervisor | ReplicaProcesses):
            launched.subscribe(self._hear)
        elif launched is not None:
            self._process = os.pidfd_open(launched.pid)
            self._loop.add_reader(self._process, self._on_exit)

    def end(self) -> None:
        for number in self._signals:
            self._loop.remove_signal_handler(number)
        self._forget_process()

    def _forget_process(self) -> None:
        if self._process >= 0:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = -1

    def _on_signal(self) -> None:
        if self._stopping is not None:
            self._server.force_exit = True  # the second one
            if self._launched is not None:
                self._launched.hurry()
            return
        self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        """End the engine, which answers every request with what it has, then the server."""
        notify("STOPPING=1")
        self._server.stop_accepting()
        if self._front.fleet is not None:
            await self._front.fleet.end()
        if self._launched is not None:
            self._forget_process()
            await asyncio.to_thread(self._launched.close)
        else:  # the engine stays: abort what does not end by itself, so that it is answered with what it has
            self._loop.call_later(DRAIN_S, self._front.manager.abort_all)
        self._server.should_exit = True

    def _hear(self, state: EngineState) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended before the engine
            self._loop.call_soon_threadsafe(self._on_state, state)

    def _on_state(self, state: EngineState) -> None:
        if self._stopping is not None:
            return
        if isinstance(state, Down):
            message = f"the scheduler {state.reason}; another one is being started"
            self._front.client.channel.refuse(EngineRestarting(message, reason=state.reason))
            notify(f"STATUS={message}")
        elif isinstance(state, Serving):
            self._front.client.channel.refuse(None)
            notify(f"STATUS=serving, {state.restarts} restarts")
        else:
            self.status = status_of(state.error)
            reason = "the scheduler was told to end" if state.error is None else f"error: {state.error}"
            click.echo(f"{reason}; the server ends as well", err=True)
            self._leave_once_told(self._loop.time() + TOLD_S)

    def _on_exit(self) -> None:
        self._forget_process()
        self.status = 1
        click.echo("error: the scheduler process has ended; the server ends as well", err=True)
        self._leave_once_told(self._loop.time() + TOLD_S)

    def _leave_once_told(self, deadline: float) -> None:
        """Leave when every call has its own error, and time to send it."""
        if self._front.client.channel.pending and self._loop.time() < deadline:
            self._loop.call_later(LOOK_S, self._leave_once_told, deadline)
        else:
            self._loop.call_later(EXIT_GRACE_S, self._leave)

    def _leave(self) -> None:
        self._server.should_exit = True
        self._stopping = asyncio.ensure_future(self._front.client.close())  # what still waits gets its error
