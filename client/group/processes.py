"""Processes of the replicas: one supervisor each, which restarts its engine at the same endpoint.

Invariants:
- Either all replicas have become ready, or all have ended and the first reason is raised.
- Later each replica ends or is restarted by itself; listeners hear once, when the last has ended.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..connection.curve import KeyOrFile
from ..exceptions import EngineDied, EngineError
from ..launch.supervise import supervised
from ..launch.supervisor import Ended, Listener, RestartPolicy, Serving, State, Supervisor
from .placement import placed, ranks_of

ReplicaListener = Callable[[str, State], None]
"""Called with a replica's name and its state."""


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    supervisor: Supervisor


class ReplicaProcesses:
    """Engines on one model, as processes of this host."""

    def __init__(
        self,
        arguments: Sequence[str],
        replicas: int,
        policy: RestartPolicy,
        *,
        curve_server_key: KeyOrFile | None = None,
        curve_client_key_file: KeyOrFile | None = None,
    ) -> None:
        """``arguments`` are those of each ``caesura scheduler``, ``--model`` included."""
        self.keys = curve_server_key, curve_client_key_file
        self.ranks = ranks_of(arguments)
        self._lock = threading.Lock()
        self._ended: dict[str, EngineError | None] = {}
        self._listeners: list[Listener] = []
        self.replicas = [
            Replica(
                f"replica-{index}",
                supervised(
                    [*place.arguments, "--log-name", f"replica-{index}"],
                    None,
                    policy,
                    curve_server_key=curve_server_key,
                    curve_client_key_file=curve_client_key_file,
                    name=f"replica-{index}",
                    environment=place.environment,
                ),
            )
            for index, place in enumerate(placed(arguments, replicas))
        ]

    def start(self) -> None:
        """Start all of them, and return when all are ready; raise the first reason after the end of all."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        for replica in self.replicas:
            replica.supervisor.subscribe(_named(replica.name, self._hear))

    def follow(self, listener: ReplicaListener) -> None:
        """Call ``listener`` with the present state of every replica, and with every later one."""
        for replica in self.replicas:
            replica.supervisor.subscribe(_named(replica.name, listener))

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` when the last replica has ended for good, at once if it has already."""
        with self._lock:
            self._listeners.append(listener)
            over = len(self._ended) == len(self.replicas)
        if over:
            listener(Ended(self._reason()))

    def hurry(self) -> None:
        """End the requests that engines still finish while :meth:`close` waits in another thread."""
        for replica in self.replicas:
            replica.supervisor.hurry()

    def close(self) -> None:
        """End all of them, and wait for it. Idempotent."""
        for replica in self.replicas:
            replica.supervisor.stop()
        with ExitStack() as stack:  # all of them, whatever one says
            for replica in self.replicas:
                stack.callback(replica.supervisor.close)

    def _start(self) -> None:
        states: queue.SimpleQueue[tuple[str, State]] = queue.SimpleQueue()
        waiting = {replica.name for replica in self.replicas}
        with ExitStack() as heard:
            for replica in self.replicas:
                listener = _named(replica.name, lambda name, state: states.put((name, state)))
                replica.supervisor.begin(listener)
                heard.callback(replica.supervisor.unsubscribe, listener)
            while waiting:
                name, state = states.get()
                if isinstance(state, Serving):
                    waiting.discard(name)
                elif isinstance(state, Ended):
                    error = state.error or EngineDied("it was stopped before it was ready")
                    error.add_note(f"{name} of {len(self.replicas)}")
                    raise error

    def _hear(self, name: str, state: State) -> None:
        if not isinstance(state, Ended):
            return
        with self._lock:
            self._ended[name] = state.error
            over, listeners = len(self._ended) == len(self.replicas), list(self._listeners)
        if over:
            for listener in listeners:
                listener(Ended(self._reason()))

    def _reason(self) -> EngineError | None:
        """Return the first error of any, or None if all were told to end."""
        return next((error for error in self._ended.values() if error is not None), None)


def _named(name: str, listener: ReplicaListener) -> Listener:
    return lambda state: listener(name, state)
