"""Ends the server: after signals, and when the engine has ended for good.

Invariants: a signal ends the engine first, so that every request in flight is answered, then the server; a
second one ends the engine's drain. An engine that ends by itself ends the server with status 1, after every
waiting client has got its error. With ``--restart`` the server outlives the engine and refuses requests
meanwhile; with ``--replicas`` it ends with the last of them.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..exceptions import EngineRestarting
from ..group.processes import ReplicaProcesses
from ..launch.launcher import LaunchedScheduler
from ..launch.notify import notify
from ..launch.supervisor import Down, Serving, State, Supervisor, status_of

if TYPE_CHECKING:
    from .context import FrontEnd
    from .server import Server

T = TypeVar("T")

EXIT_GRACE_S = 0.3
"""Seconds between the engine's unexpected end and the server's, in which errors are sent."""
TOLD_S, LOOK_S = 5.0, 0.02
"""Seconds for calls to notice the lost connection, and between two looks."""
DRAIN_S = 5.0
"""Seconds for generations on an engine that was not started here, after a signal."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end the command; SIGHUP not if it was ignored at start, as under ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Cancel the block at a stop signal: exit with 128 and the signal's number.

    A second signal does not interrupt the cleanup; a third one has its default action.
    """
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
    """Return the result of ``starting``; a stop signal cancels it and is raised as KeyboardInterrupt(number).

    The loop keeps its signal handlers.
    """
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
    def __init__(
        self,
        server: "Server",
        front: "FrontEnd",
        launched: LaunchedScheduler | Supervisor | ReplicaProcesses | None,
    ) -> None:
        self.status = 0
        self._server = server
        self._front = front
        self._launched = launched
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._process = -1  # descriptor of the engine's process
        self._signals: list[signal.Signals] = []

    def begin(self) -> None:
        loop = self._loop
        self._signals = stop_signals()
        for number in self._signals:
            loop.add_signal_handler(number, self._on_signal)
        if isinstance(self._launched, Supervisor | ReplicaProcesses):
            self._launched.subscribe(self._hear)
        elif self._launched is not None:
            self._process = os.pidfd_open(self._launched.pid)
            loop.add_reader(self._process, self._on_exit)

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
            self._front.fleet.end()
        if self._launched is not None:
            self._forget_process()
            await asyncio.to_thread(self._launched.close)
        else:  # the engine stays: abort what does not end by itself, so that it is answered with what it has
            self._loop.call_later(DRAIN_S, self._front.manager.abort_all)
        self._server.should_exit = True

    def _hear(self, state: State) -> None:
        """Take a state of a supervised engine, in the supervisor's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended before the engine
            self._loop.call_soon_threadsafe(self._on_state, state)

    def _on_state(self, state: State) -> None:
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
