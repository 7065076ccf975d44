"""Many engines in one thread that answer a fleet as real ones do, without a model and without torch.

They speak the real wire and keep what a fleet depends on: pauses, sessions in two phases, labels and epochs,
requests that wait out a pause, and an incarnation for each start. A token is its own position.
:class:`EnginesProcess` has them in a process of their own.
"""

import contextlib
import itertools
import json
import os
import random
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, Self

import msgspec
import zmq

from caesura import io_struct as wire

from .fake_scheduler import finished, results, rid_of, status_reply, update_reply, welcome

KEEPALIVE_S = 2.0
INITIAL = "initial"
"""Label of an engine that has just started."""
PORTS = list(range(10_000, 32_768))
"""Below those that Linux gives to outgoing connections, which could have an engine's when it starts again."""
Died = Callable[[int, wire.Request], bool]


class LightEngine:
    """One engine: its socket, and the state behind its answers."""

    def __init__(
        self, number: int, context: "zmq.Context[Any]", endpoint: str, folder: str, secret_key: bytes = b""
    ) -> None:
        self.number, self.folder = number, folder
        self.incarnation = secrets.token_hex(8)
        self.label, self.epoch, self.weights = INITIAL, 0, "valid"
        self.paused: str | None = None
        self.owners: dict[str, str | None] = {}
        """Owner of the pause, and of the session."""
        self.lease_s: float | None = None
        """Seconds of the lease of the last pause."""
        self.session: str | None = None
        self.loaded: str | None = None
        """Label of the last load."""
        self.written = 0
        self.renewals = 0
        self.served = 0
        """Number of finished samples."""
        self.held: dict[str, tuple[bytes, wire.GenerateReqInput]] = {}
        """Requests that wait for the end of a pause, by rid."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        if secret_key:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.socket.close(linger=0)
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def turn(self, dies: Died) -> bool:
        """Answer everything that has come; return False if the engine died of it."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            client, header, *_ = self.socket.recv_multipart()
            try:
                request = wire.decode_request(header)
            except wire.CaesuraError as error:
                self.send(client, [error.to_reply(str(error.detail.pop("id", "")))])
                continue
            if dies(self.number, request):
                return False
            try:
                replies = list(self.answer(client, request))
            except wire.CaesuraError as error:
                replies = [wire.ErrorReply(id=request.id, code=error.code, message=error.message)]
            self.send(client, replies)
        return True

    def send(self, client: bytes, replies: Iterable[wire.Message]) -> None:
        for reply in replies:
            self.socket.send_multipart([client, wire.encode(reply)])

    def answer(self, client: bytes, request: wire.Request) -> Iterable[wire.Message]:
        def reply(kind: type[wire.Message], **fields: object) -> list[wire.Message]:
            return [kind(id=request.id, **fields)]

        match request:
            case wire.HelloReqInput():
                return welcome(request, self.incarnation)
            case wire.GenerateReqInput():
                if request.min_weights_epoch is not None and request.min_weights_epoch > self.epoch:
                    raise _refusal("epoch_behind", f"the weights epoch is {self.epoch}")
                if self.paused is None:
                    return [self._generated(request)]
                self.held[rid_of(request)] = client, request
                return []
            case wire.AbortReq():
                return reply(wire.AbortReqOutput, aborted=self._abort(request))
            case wire.GetStatusReqInput():
                return [self._status(request)]
            case wire.PauseGenerationReqInput():
                self.paused, self.lease_s, self.owners["pause"] = request.mode, request.lease_s, request.owner
                counts = {"held_requests": len(self.held), "held_tokens": 0, "waiting_requests": 0}
                return reply(
                    wire.PauseGenerationReqOutput, mode=request.mode, step=1, aborted_requests=0, **counts
                )
            case wire.ContinueGenerationReqInput():
                was, self.paused = self.paused, None
                for each, held in self.held.values():
                    self.send(each, [self._generated(held)])
                self.held.clear()
                return reply(wire.ContinueGenerationReqOutput, was_paused=was is not None)
            case wire.RenewPauseLeaseReqInput():
                self.renewals += 1
                return reply(wire.RenewPauseLeaseReqOutput, renewed=True, lease_left_s=60.0)
            case wire.FlushCacheReqInput():
                return reply(wire.FlushCacheReqOutput, freed_tokens=0)
            case wire.WeightsCheckerReqInput():
                return reply(wire.WeightsCheckerReqOutput, total=f"{hash(self.label) & (1 << 64) - 1:032x}")
            case wire.BeginWeightUpdateReqInput():
                self.session, self.loaded, self.written = request.id, None, 0
                self.owners["session"] = request.owner
                return reply(wire.BeginWeightUpdateReqOutput, session_id=request.id, weights_epoch=self.epoch)
            case wire.EndWeightUpdateReqInput():
                return [self._ended(request)]
            case wire.UpdateWeightFromDiskReqInput() | wire.UpdateWeightsFromTensorReqInput():
                return [self._loaded(request)]
        raise _refusal("unsupported", f"a light engine does not know {type(request).__name__}")

    def _loaded(self, request: wire.WeightUpdateOptions) -> wire.Message:
        if request.session_id != self.session:
            raise _refusal("no_session", f"no session {request.session_id!r} is open")
        self.written += len(getattr(request, "specs", ())) or 1
        if self.session is None:
            return self._committed(request, request.weight_version)
        self.weights, self.loaded = "poisoned", request.weight_version
        return msgspec.structs.replace(update_reply(request, committed=False), session_id=self.session)

    def _ended(self, request: wire.EndWeightUpdateReqInput) -> wire.Message:
        if self.session is None or request.session_id not in (None, self.session):
            raise _refusal("no_session", f"no session {request.session_id!r} is open")
        self.session = None
        if request.commit:
            return self._committed(request, request.weight_version or self.loaded)
        return update_reply(request, committed=False)

    def _committed(self, request: wire.Request, label: str | None) -> wire.Message:
        self.label, self.weights, self.epoch = label or self.label, "valid", self.epoch + 1
        reply = update_reply(request, version=self.label)
        return msgspec.structs.replace(reply, weights_epoch=self.epoch)

    def _status(self, request: wire.Request) -> wire.Message:
        session = self.session and wire.SessionStatus(
            kind="explicit",
            session_id=self.session,
            owner=self.owners["session"],
            age_s=0.0,
            deadline_s=None,
            written_tensors=self.written,
        )
        return msgspec.structs.replace(
            status_reply(request),
            incarnation=self.incarnation,
            generation="running" if self.paused is None else "paused",
            pause_mode=self.paused,
            pause_owner=self.owners["pause"] if self.paused else None,
            weights=self.weights,
            weight_version=self.label,
            weights_epoch=self.epoch,
            session=session or None,
            model_path=self.folder,
            running_requests=len(self.held),
            waiting_requests=0,
        )

    def _generated(self, request: wire.GenerateReqInput) -> wire.Message:
        params = request.sampling_params
        tokens = list(range(params.max_new_tokens))
        span = wire.WeightVersionSpan(version=self.label, epoch=self.epoch, start=0, end=len(tokens))
        self.served += params.n
        return results(
            *(
                finished(rid_of(request), tokens, index, weight_versions=[span])
                for index in range(request.first_sample, request.first_sample + params.n)
            )
        )

    def _abort(self, request: wire.AbortReq) -> int:
        named = {request.rid} if isinstance(request.rid, str) else set(request.rid or self.held)
        for rid in named & self.held.keys():
            client, held = self.held.pop(rid)
            reason = wire.FinishReason(type="abort", message="Aborted")
            self.send(
                client,
                [
                    results(finished(rid, [], index, finish_reason=reason))
                    for index in range(held.sampling_params.n)
                ],
            )
        return len(named)


def _refusal(code: str, message: str) -> wire.CaesuraError:
    return wire.CaesuraError(wire.ErrorCode(code), message)


class LightEngines:
    """``number`` engines behind sockets of their own, served by one thread; use it with ``with``.

    ``dies(number, request)`` is asked before each answer: True ends that engine as a crash does.
    """

    def __init__(
        self,
        number: int,
        *,
        dies: Died = lambda number, request: False,
        folder: str = "/model",
        curve: bool = False,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._dies, self._folder = dies, folder
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, LightEngine] = {}
        pairs = [zmq.curve_keypair() if curve else (b"", b"") for _ in range(number)]
        self.server_keys = [public.decode() for public, _ in pairs]
        """CURVE public keys of the engines, which take any client; empty without keys."""
        self._secret_keys = [secret for _, secret in pairs]
        self._ports = itertools.cycle(PORTS[(start := random.randrange(len(PORTS))) :] + PORTS[:start])
        self.engines = [self._started_anywhere(index) for index in range(number)]
        self.endpoints = [engine.endpoint for engine in self.engines]
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._waker, self._woken = socket.socketpair()
        self._epoll.register(self._woken, select.EPOLLIN)
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def dead(self) -> list[int]:
        """Numbers of the engines that have ended."""
        numbers: list[int] = self._do(lambda: [each.number for each in self.engines if each.socket.closed])
        return numbers

    def end(self, numbers: Iterable[int]) -> None:
        """Close these engines' sockets as crashes would."""
        self._do(lambda: [self._end(self.engines[number]) for number in numbers])

    def start(self, numbers: Iterable[int]) -> None:
        """Start these engines again, at their endpoints, with the weights of the start."""

        def start(number: int) -> None:
            self.engines[number] = self._started(number, self.endpoints[number])

        for number in numbers:
            while True:
                with contextlib.suppress(zmq.ZMQError):  # libzmq unbinds its predecessor in a moment
                    self._do(partial(start, number))
                    break
                sleep(0.001)

    def close(self) -> None:
        self._do(lambda: setattr(self, "_ended", True))
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _started_anywhere(self, number: int) -> LightEngine:
        while True:
            with contextlib.suppress(zmq.ZMQError):  # somebody has this port
                return self._started(number, f"tcp://127.0.0.1:{next(self._ports)}")

    def _started(self, number: int, endpoint: str) -> LightEngine:
        engine = LightEngine(number, self._context, endpoint, self._folder, self._secret_keys[number])
        descriptor = engine.socket.getsockopt(zmq.FD)
        self._epoll.register(descriptor, select.EPOLLIN)
        self._by_descriptor[descriptor] = engine
        return engine

    def _end(self, engine: LightEngine) -> None:
        if engine.socket.closed:
            return
        descriptor = engine.socket.getsockopt(zmq.FD)
        if self._by_descriptor.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            engine.socket.unbind(engine.endpoint)  # at once: its successor binds the same address
            engine.socket.close(linger=0)

    def _do(self, work: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._work.append((work, done))
        self._waker.send(b"\0")
        return done.result()

    def _run(self) -> None:
        alive_at = monotonic()
        while not self._ended:
            for descriptor, _ in self._epoll.poll(KEEPALIVE_S):
                engine = self._by_descriptor.get(descriptor)
                if engine is not None and not engine.turn(self._dies):
                    self._end(engine)
                elif descriptor == self._woken.fileno():
                    self._woken.recv(4096)
            while self._work:
                work, done = self._work.popleft()
                try:
                    done.set_result(work())
                except zmq.ZMQError as error:
                    done.set_exception(error)
            if monotonic() - alive_at > KEEPALIVE_S:
                alive_at = monotonic()
                for engine in list(self._by_descriptor.values()):
                    for client in {client for client, _ in engine.held.values()}:
                        engine.send(client, [wire.Keepalive(step=1)])
                    if not engine.turn(self._dies):
                        self._end(engine)
        for engine in list(self._by_descriptor.values()):
            self._end(engine)
        self._epoll.close()
        self._context.destroy(linger=0)


class EnginesProcess:
    """Light engines in a process of their own; use it with ``with``."""

    def __init__(self, number: int, folder: str = "/model") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.light_engines", str(number), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        self.endpoints: list[str] = self._answer()

    def tell(
        self, what: Literal["end", "start", "arm"], told: "Mapping[int, str] | Sequence[int]"
    ) -> list[int]:
        """Have engines ``told`` end, or those that have ended start again, or ones die of a message.

        ``arm`` takes the name of the message of which each engine dies, and takes back what was told before.
        Return the numbers of the engines concerned.
        """
        assert self._process.stdin is not None
        plan = dict(told) if isinstance(told, Mapping) else dict.fromkeys(told, "")
        self._process.stdin.write(json.dumps([what, plan]) + "\n")
        self._process.stdin.flush()
        answer: list[int] = self._answer()
        return answer

    def close(self) -> None:
        self._process.communicate()  # which ends its input

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def main() -> None:
    number, folder = sys.argv[1:]
    armed: dict[int, str] = {}

    def dies(number: int, request: wire.Request) -> bool:
        return armed.get(number) == type(request).__name__ and armed.pop(number, None) is not None

    with LightEngines(int(number), dies=dies, folder=folder) as engines:
        print(json.dumps(engines.endpoints), flush=True)
        for line in sys.stdin:
            what, told = json.loads(line)
            numbers = [int(each) for each in told]
            if what == "start":
                numbers = engines.dead
                engines.start(numbers)
            elif what == "end":
                engines.end(numbers)
            else:
                armed.clear()
                armed |= {int(each): kind for each, kind in told.items()}
            print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
