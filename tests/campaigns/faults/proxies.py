"""Proxies between a client and the scheduler that fail when told to.

Invariants:
- Each proxy runs in one thread of its own until :meth:`close`; faults are switched on and off from the
  campaign's thread.
- :class:`ByteProxy` knows nothing of ZeroMQ. :class:`FrameProxy` knows whole messages and the identities of
  their senders, so the engine sees the clients under their own.
- What reaches a client through a :class:`FrameProxy` is counted before it is damaged: the engine is judged by
  what it sent.
"""

import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import zmq

Direction = Literal["to_engine", "to_client"]
Damage = Literal["drop", "duplicate", "delay", "truncate"]
TICK_S = 0.02
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
        self._stalled = threading.Event()
        self._cut = threading.Event()
        self._closed = threading.Event()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_path(endpoint))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="byte-proxy", daemon=True)
        self._thread.start()

    def stall(self) -> None:
        self._stalled.set()

    def resume(self) -> None:
        self._stalled.clear()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                if self._stalled.is_set():
                    time.sleep(TICK_S)
                else:
                    self._step(selector)
                if self._cut.is_set():
                    self._cut.clear()
                    for end in list(self._peers):
                        self._drop(selector, end)
            for end in list(self._peers):
                self._drop(selector, end)
        self._listener.close()

    def _step(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TICK_S):
            if self._stalled.is_set():
                return
            if key.fileobj is self._listener:
                self._accept(selector)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                self._copy(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._target)
        except OSError:
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _copy(self, selector: selectors.BaseSelector, source: socket.socket) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        try:
            data = source.recv(CHUNK_BYTES)
            if data:
                self._peers[source].sendall(data)
                return
        except OSError:
            pass
        self._drop(selector, source)

    def _drop(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        other = self._peers.pop(end, None)
        if other is None:
            return
        self._peers.pop(other, None)
        for one in (end, other):
            with suppress(KeyError, ValueError):
                selector.unregister(one)
            one.close()


@dataclass
class Harmful:
    """Damage to do to the next messages of one direction."""

    damage: Damage
    direction: Direction
    rng: random.Random
    left: int = 1
    """Number of messages left to damage."""
    delay_s: float = 0.3
    done: int = field(default=0, init=False)


class FrameProxy:
    """A ROUTER for clients and a DEALER to the engine for each of them, under its own identity."""

    def __init__(self, endpoint: str, target: str, sent: Callable[[list[bytes]], None] | None = None) -> None:
        self.endpoint = endpoint
        self._target, self._sent = target, sent
        self._harmful: Harmful | None = None
        self._closed = threading.Event()
        self._ready = threading.Event()
        self._late: list[tuple[float, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._run, name="frame-proxy", daemon=True)
        self._thread.start()
        self._ready.wait()

    def harm(self, harmful: Harmful | None) -> None:
        self._harmful = harmful

    def close(self) -> None:
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
                back = backs.get(identity)
                if back is None:
                    back = backs[identity] = self._back(context, identity)
                    poller.register(back, zmq.POLLIN)
                self._pass("to_engine", frames, back.send_multipart)
            for identity, back in backs.items():
                if back in ready:
                    frames = back.recv_multipart()
                    if self._sent is not None:
                        self._sent(frames)
                    self._pass("to_client", frames, _to(front, identity))
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
        harmful = self._harmful
        if harmful is None or harmful.direction != direction or not harmful.left:
            deliver(frames)
            return
        harmful.left -= 1
        harmful.done += 1
        if harmful.damage == "duplicate":
            deliver(frames)
            deliver(frames)
        elif harmful.damage == "delay":
            self._late.append((time.monotonic() + harmful.delay_s, lambda: _ignore(deliver(frames))))
        elif harmful.damage == "truncate":
            which = harmful.rng.randrange(len(frames))
            cut = harmful.rng.randrange(max(1, len(frames[which])))
            deliver([*frames[:which], frames[which][:cut], *frames[which + 1 :]])


def _to(front: "zmq.Socket[bytes]", identity: bytes) -> Callable[[list[bytes]], object]:
    return lambda frames: front.send_multipart([identity, *frames])


def _ignore(_: object) -> None:
    return None
