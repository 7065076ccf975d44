"""Steady load on an engine, from a process of its own, and when each step's tokens arrived.

Invariants:
- As many requests are live as the workload has. One that ends, in whatever way, is replaced at once, during a
  pause too, by one with another prompt; lengths differ, so that they do not all end in the same step.
- All of them stream, so a step is one message here, timed before it is decoded. Steps carry their numbers, so
  what came before a pause and what after it is known, not guessed from the time.
- Times are ``perf_counter``'s, which on Linux is one clock for all processes.

It speaks the wire itself, in one thread: nobody shares an interpreter lock with it, and it uses next to no
CPU.
"""

import multiprocessing
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import zmq

from caesura.io_struct import (
    BatchTokenOutput,
    GenerateReqInput,
    GenerateReqOutput,
    Keepalive,
    SamplingParams,
    StreamDelta,
    decode_reply,
    encode,
)

from .workload import Workload

PATIENCE_S = 300.0
"""Limit for one answer of the load's process, which may compute all prompts again before it."""
JOIN_S = 5.0

Arrival = tuple[int, float]
"""A step's number, and the time its tokens arrived."""


@dataclass(frozen=True)
class Steady:
    """Answered with None once all sampling requests have sampled and ``steps`` more steps have arrived."""

    steps: int


@dataclass(frozen=True)
class Steps:
    """Answered with the next ``count`` arrivals."""

    count: int


@dataclass(frozen=True)
class Around:
    """Answered with the last arrival up to ``step`` since the last ``Steady``, and ``count`` after it."""

    step: int
    count: int = 1


class LoadError(RuntimeError):
    """The load's process is gone; its traceback is on stderr."""


class Load:
    """Process that keeps requests live, as a context manager."""

    def __init__(self, endpoint: str, workload: Workload, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(theirs, endpoint, workload, seed), name="benchmark-load", daemon=True
        )
        self._process.start()
        theirs.close()

    def steady(self, steps: int) -> None:
        """Wait until every request that was sampling has sampled from now on, and for ``steps`` steps."""
        self._ask(Steady(steps))

    def step_seconds(self, count: int) -> list[float]:
        """Return the seconds of the next ``count`` steps, from tokens to tokens."""
        arrivals: list[Arrival] = self._ask(Steps(count + 1))
        return [(after - before) / (later - step) for (step, before), (later, after) in pairwise(arrivals)]

    def around(self, step: int) -> tuple[Arrival, Arrival]:
        """Return the last tokens sampled up to step number ``step``, and wait for the first ones after it."""
        last, first = self._ask(Around(step))
        return last, first

    def following(self, step: int, count: int) -> list[Arrival]:
        """Wait for the first ``count`` arrivals of tokens sampled after step number ``step``."""
        arrivals: tuple[Arrival, ...] = self._ask(Around(step, count))
        return list(arrivals[1:])

    def _ask(self, question: Steady | Steps | Around) -> Any:
        try:
            self._pipe.send(question)
            if not self._pipe.poll(PATIENCE_S):
                raise LoadError(f"no answer to {question} within {PATIENCE_S:g} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise LoadError("the load's process has ended") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # which ends it
        self._process.join(JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class Feeder:
    """The load's own process: keeps requests live and remembers arrivals."""

    def __init__(self, socket: "zmq.Socket[bytes]", workload: Workload, seed: int) -> None:
        self._socket = socket
        self._workload = workload
        self._random = random.Random(seed)
        self._slots: dict[str, int] = {}
        """Place of each live request among those that run side by side, by rid."""
        self._submitted = 0
        self._arrivals: list[Arrival] = []
        self._sampling = set(range(workload.requests))
        """Slots whose request has sampled, or succeeds an aborted one; all at the start."""
        self._unseen: set[int] = set()
        self._question: Steady | Steps | Around | None = None
        for slot in range(workload.requests):
            self._submit(slot, shortest=workload.load_new_tokens // 8)  # as if some had run for long

    def ask(self, question: Steady | Steps | Around) -> None:
        """Take the next question; the one before has been answered."""
        self._question = question
        match question:
            case Steady():
                self._unseen = set(self._sampling)
                self._arrivals.clear()
            case Steps():
                self._arrivals.clear()
            case Around():
                pass

    def take(self, frame: bytes, at: float) -> None:
        """Take a message of the engine that arrived at ``at``.

        Raises:
            RuntimeError: a request was refused or failed.
        """
        message = decode_reply(frame)
        match message:
            case Keepalive():
                return
            case BatchTokenOutput(step=step, delta=delta, finished=finished):
                if delta is not None:
                    self._arrivals.append((step, at))
                    self._see(delta)
                for result in finished:
                    self._replace(result)
            case _:
                raise RuntimeError(f"the load was refused: {message}")

    def answer(self) -> tuple[Any] | None:
        """Return the answer to the open question in a tuple, or None if there is none yet."""
        answer: tuple[Any] | None = None
        match self._question:
            case Steady(steps) if not self._unseen and len(self._arrivals) >= steps:
                answer = (None,)
            case Steps(count) if len(self._arrivals) >= count:
                answer = (self._arrivals[:count],)
            case Around(step, count) if len(self._arrivals) >= count and self._arrivals[-count][0] > step:
                after = next(place for place, (number, _) in enumerate(self._arrivals) if number > step)
                answer = (tuple(self._arrivals[after - 1 : after + count]),)
        if answer is not None:
            self._question = None
        return answer

    def _see(self, delta: StreamDelta) -> None:
        slots = [self._slots[rid] for rid in delta.rids]
        self._sampling.update(slots)
        self._unseen.difference_update(slots)

    def _replace(self, result: GenerateReqOutput) -> None:
        reason, slot = result.finish_reason, self._slots.pop(result.rid)
        if reason.type == "error":
            raise RuntimeError(f"a request of the load failed: {reason.message}")
        if reason.type != "abort":
            self._sampling.discard(slot)
            self._unseen.discard(slot)
        self._submit(slot, shortest=self._workload.load_new_tokens // 2)

    def _submit(self, slot: int, shortest: int) -> None:
        workload, rid = self._workload, f"load-{self._submitted}"
        self._submitted += 1
        self._slots[rid] = slot
        length = self._random.randint(max(1, shortest), workload.load_new_tokens)
        request = GenerateReqInput(
            id=rid,
            input_ids=[self._random.randrange(workload.vocab_size) for _ in range(workload.prompt_tokens)],
            sampling_params=SamplingParams(max_new_tokens=length, ignore_eos=True),
            stream=True,
        )
        self._socket.send(encode(request))


def _main(pipe: Connection, endpoint: str, workload: Workload, seed: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
    socket.connect(endpoint)
    feeder, poller = Feeder(socket, workload, seed), zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    try:
        while True:
            ready = dict(poller.poll())
            if socket in ready:
                at = time.perf_counter()
                feeder.take(socket.recv(), at)
            if pipe.fileno() in ready:
                feeder.ask(pipe.recv())
            answer = feeder.answer()
            if answer is not None:
                pipe.send(answer[0])
    except (EOFError, BrokenPipeError):
        return  # the benchmark is done with it
    finally:
        context.destroy(linger=0)
