"""Proxies between a client and the scheduler that fail when told to, until the end of their block.

Invariants:
- Faults are switched on and off from the campaign's thread; proxies run in threads of their own.
- :class:`ByteProxy` knows nothing of ZeroMQ. :class:`FrameProxy` knows whole messages and the identities of
  their senders, so the engine sees the clients under their own.
"""

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

import zmq

Direction = Literal["to_engine", "to_client"]
Damage = Literal["drop", "duplicate", "delay", "truncate"]
TICK_S = 0.02
LATE_S = 0.3
CHUNK_BYTES = 1 << 16


def _path(endpoint: str) -> str:
    return endpoint.removeprefix("ipc://")


class ByteProxy:
    """Copies bytes between Unix sockets; can stall, slow down or cut all connections."""

    def __init__(self, endpoint: str, target: str) -> None:
        self.endpoint = endpoint
        self.delay_s = 0.0
        """Seconds of delay before each chunk."""
        self._target = _path(target)
        self._flowing = threading.Event()
        self._ends: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_path(endpoint))
        self._listener.listen()
        self.resume()
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        for end in list(self._ends):
            _shut(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        _shut(self._listener)
        self.cut()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):  # shut down
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._ends |= {near, far}
                with suppress(OSError):  # nobody listens there: both copies end at once
                    far.connect(self._target)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                time.sleep(self.delay_s)
                self._flowing.wait()
                target.sendall(data)
        self._ends.discard(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@dataclass
class Harmful:
    """Damage to do to the next messages of one direction."""

    damage: Damage
    direction: Direction
    rng: random.Random
    left: int
    """Number of messages left to damage."""


class FrameProxy:
    """A ROUTER for clients and a DEALER to the engine for each of them, under its own identity."""

    def __init__(self, endpoint: str, target: str) -> None:
        self.endpoint = endpoint
        self.harmful: Harmful | None = None
        self._target = target
        self._closed = threading.Event()
        self._ready = threading.Event()
        self._late: list[tuple[float, Callable[[], object]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        front = context.socket(zmq.ROUTER)
        front.sndhwm = front.rcvhwm = 0
        front.bind(self.endpoint)
        self._ready.set()
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll(round(TICK_S * 1000)))
            if front in ready:
                identity, *frames = front.recv_multipart()
                if identity not in backs:
                    backs[identity] = self._back(context, identity)
                    poller.register(backs[identity], zmq.POLLIN)
                self._pass("to_engine", frames, backs[identity].send_multipart)
            for identity, back in backs.items():
                if back in ready:
                    self._pass("to_client", back.recv_multipart(), _to(front, identity))
            now = time.monotonic()
            due = [deliver for at, deliver in self._late if at <= now]
            self._late = [late for late in self._late if late[0] > now]
            for deliver in due:
                deliver()
        context.destroy(linger=0)

    def _back(self, context: "zmq.Context[zmq.Socket[bytes]]", identity: bytes) -> "zmq.Socket[bytes]":
        back = context.socket(zmq.DEALER)
        back.sndhwm = back.rcvhwm = 0
        # An identity that a client's library has drawn begins with a zero byte, which libzmq keeps for
        # itself.
        back.setsockopt(zmq.ROUTING_ID, identity if identity[0] else b"P" + identity)
        back.connect(self._target)
        return back

    def _pass(
        self, direction: Direction, frames: list[bytes], deliver: Callable[[list[bytes]], object]
    ) -> None:
        harmful = self.harmful
        if harmful is None or harmful.direction != direction or not harmful.left:
            deliver(frames)
            return
        harmful.left -= 1
        if harmful.damage == "duplicate":
            deliver(frames)
            deliver(frames)
        elif harmful.damage == "delay":
            self._late.append((time.monotonic() + LATE_S, lambda: deliver(frames)))
        elif harmful.damage == "truncate":
            which = harmful.rng.randrange(len(frames))
            cut = harmful.rng.randrange(max(1, len(frames[which])))
            deliver([*frames[:which], frames[which][:cut], *frames[which + 1 :]])


def _to(front: "zmq.Socket[bytes]", identity: bytes) -> Callable[[list[bytes]], object]:
    return lambda frames: front.send_multipart([identity, *frames])
