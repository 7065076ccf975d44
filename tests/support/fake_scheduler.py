"""A ROUTER that speaks the wire without an engine behind it, for the tests of the clients.

Runs in a thread (:class:`FakeScheduler`) or as a process (``python fake_scheduler.py --endpoint …``), which
is how the launcher's tests get a child that starts, refuses, crashes and hangs on demand.
"""

import argparse
import json
import os
import queue
import secrets
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import msgspec
import zmq

from caesura.io_struct import (
    WIRE_VERSION,
    AbortReq,
    AbortReqOutput,
    BatchTokenOutput,
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    DeviceMemory,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    GetMemoryHistoryReqInput,
    GetMemoryHistoryReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    HelloReqInput,
    HelloReqOutput,
    KVUsage,
    MemoryByTag,
    MemoryCause,
    MemoryEvent,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    RenewPauseLeaseReqInput,
    RenewPauseLeaseReqOutput,
    Request,
    ShutdownReqInput,
    ShutdownReqOutput,
    StageTimes,
    StartProfileReqInput,
    StartProfileReqOutput,
    StopProfileReqInput,
    StopProfileReqOutput,
    StreamDelta,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
    WeightVersionSpan,
    decode_request,
    encode,
)

Handler = Callable[[Request], Iterable[Message | bytes]]


class VanishError(Exception):
    """Raised by a handler: close the socket as a crash would."""


def ints(values: Iterable[int]) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}i", *values)


def floats(values: Iterable[float]) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}f", *values)


def finished(rid: str, tokens: list[int], index: int = 0, **fields: object) -> GenerateReqOutput:
    span = WeightVersionSpan(version="v0", epoch=0, start=0, end=len(tokens))
    values: dict[str, object] = {
        "output_ids": ints(tokens),
        "finish_reason": FinishReason(type="length", length=len(tokens)),
        "weight_versions": [span] if tokens else [],
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "seed": 7,
        **fields,
    }
    return GenerateReqOutput(rid=rid, index=index, **values)  # type: ignore[arg-type]


def results(*outputs: GenerateReqOutput) -> BatchTokenOutput:
    return BatchTokenOutput(step=1, finished=list(outputs))


def delta(*rows: tuple[str, int, int, list[int]], logprob: float = -1.0) -> BatchTokenOutput:
    tokens = [token for row in rows for token in row[3]]
    return BatchTokenOutput(
        step=1,
        delta=StreamDelta(
            rids=[row[0] for row in rows],
            indices=ints(row[1] for row in rows),
            starts=ints(row[2] for row in rows),
            counts=ints(len(row[3]) for row in rows),
            tokens=ints(tokens),
            logprobs=floats([logprob] * len(tokens)),
        ),
    )


def rid_of(request: GenerateReqInput) -> str:
    return request.rid or request.id


def echo(request: GenerateReqInput) -> BatchTokenOutput:
    """Return the prompt reversed, with the sample's index appended for each sample; logprobs as asked for."""
    outputs = []
    for index in range(request.sampling_params.n):
        tokens = [*reversed(request.input_ids), index]
        logprobs = floats(-float(token) for token in tokens)
        outputs.append(
            finished(
                rid_of(request),
                tokens,
                index,
                output_logprobs=logprobs if request.return_logprob else None,
                prompt_tokens=len(request.input_ids),
            )
        )
    return results(*outputs)


def update_reply(request: Request, *, committed: bool = True, version: str = "v0") -> WeightUpdateReqOutput:
    return WeightUpdateReqOutput(
        id=request.id,
        committed=committed,
        weights="valid",
        weights_epoch=int(committed),
        weight_version=version,
        written_tensors=2,
        written_bytes=64,
        changed_tensors=1,
        cast_tensors=0,
        skipped_tensors=0,
        flushed=True,
        stages=StageTimes(total=0.5),
    )


def status_reply(request: Request) -> GetStatusReqOutput:
    return GetStatusReqOutput(
        incarnation="fake",
        id=request.id,
        generation="paused",
        pause_mode="in_place",
        pause_age_s=1.5,
        weights="valid",
        memory="resident",
        weight_version="v0",
        weights_epoch=0,
        running_requests=2,
        prefilling_requests=0,
        waiting_requests=1,
        step=12,
        generated_tokens=34,
        num_retractions=0,
        kv=KVUsage(free=64, cached=16, held=32, total=112, page_size=16, bytes_per_token=128),
        device_memory=DeviceMemory(
            reserved=3 << 20, allocated=2 << 20, available=1 << 30, weights=1, kv_cache=2
        ),
        model_path="/models/tiny",
        dtype="float32",
        device="cpu",
        kernels={"linear": "avx2", "attention": "torch", "sampler": "avx2"},
        kernels_reason="attention_backend = 'sdpa'",
        context_len=128,
        vocab_size=64,
        max_running_requests=8,
        uptime_s=2.0,
        pid=os.getpid(),
        version="0",
    )


def memory_event(seq: int, cause: MemoryCause = "sample", **fields: object) -> MemoryEvent:
    """Return event ``seq`` of an engine that began at second 1,000 and looks each second; 3 MB reserved."""
    at = 1000.0 + seq
    parts = dict.fromkeys(MemoryByTag.__struct_fields__, 0) | {"weights": 2 << 20, "kv": 1 << 20}
    values: dict[str, object] = {
        "until": at,
        "detail": "",
        "step": 10 * seq,
        "weights_epoch": 0,
        "reserved": 3 << 20,
        "allocated": 1 << 20,
        "by_tag": MemoryByTag(**parts),
        **fields,
    }
    return MemoryEvent(seq=seq, at=at, cause=cause, **values)  # type: ignore[arg-type]


def silent(request: object) -> list[object]:
    return []


def answer(request: Request) -> Iterable[Message]:
    """Return the answers of a healthy engine to any request, at once."""

    def reply(kind: type[Message], **fields: object) -> list[Message]:
        return [kind(id=request.id, **fields)]

    match request:
        case GenerateReqInput():
            return [echo(request)]
        case AbortReq():
            return reply(AbortReqOutput, aborted=1)
        case PauseGenerationReqInput():
            counts = {"held_requests": 1, "held_tokens": 16, "waiting_requests": 0, "aborted_requests": 0}
            return reply(PauseGenerationReqOutput, mode=request.mode, step=5, **counts)
        case RenewPauseLeaseReqInput():
            return reply(RenewPauseLeaseReqOutput, renewed=True, lease_left_s=60.0)
        case ContinueGenerationReqInput():
            memory = {"reserved_before": 4 << 20, "reserved_after": 3 << 20, "freed": 1 << 20}
            return reply(ContinueGenerationReqOutput, was_paused=True, **memory)
        case FlushCacheReqInput():
            return reply(FlushCacheReqOutput, freed_tokens=16)
        case GetStatusReqInput():
            return [status_reply(request)]
        case GetMemoryHistoryReqInput():
            events = [memory_event(seq) for seq in (1, 2) if seq > request.after]
            return reply(GetMemoryHistoryReqOutput, events=events, more=False)
        case BeginWeightUpdateReqInput():
            return reply(BeginWeightUpdateReqOutput, session_id="s0", weights_epoch=0)
        case EndWeightUpdateReqInput():
            return [update_reply(request, committed=request.commit, version=request.weight_version or "v0")]
        case UpdateWeightFromDiskReqInput():
            return [update_reply(request, version=request.weight_version or "v0")]
        case WeightsCheckerReqInput():
            return reply(WeightsCheckerReqOutput, total="00")
        case StartProfileReqInput():
            steps = request.num_steps or 1000
            return reply(StartProfileReqOutput, path="/traces/t.json.gz", num_steps=steps)
        case StopProfileReqInput():
            return reply(StopProfileReqOutput, path="/traces/t.json.gz", steps=20)
        case ShutdownReqInput():
            return reply(ShutdownReqOutput)
    raise AssertionError(f"unexpected {request}")


def welcome(hello: HelloReqInput, incarnation: str) -> Iterable[Message]:
    major, minor = WIRE_VERSION
    versions = {"wire_major": major, "wire_minor": minor, "version": "0"}
    return [HelloReqOutput(id=hello.id, incarnation=incarnation, pid=os.getpid(), **versions)]


class FakeScheduler:
    """Answers every request through ``handler``; ``requests`` holds what arrived, in order."""

    def __init__(self, endpoint: str, handler: Handler = answer, greet: Handler | None = None) -> None:
        self.endpoint = endpoint
        self.incarnation = secrets.token_hex(8)
        self.hellos = 0
        self._greet = greet
        self.requests: queue.Queue[Request] = queue.Queue()
        self._handler = handler
        self._outgoing: queue.Queue[Message | bytes] = queue.Queue()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = 0  # a ROUTER drops silently at its mark, and this one keeps no queue of its own
        self._router.bind(endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def push(self, message: Message | bytes) -> None:
        self._outgoing.put(message)

    def next_request(self, kind: type[Request] = Request, timeout: float | None = None) -> Request:
        """Return the next request of that kind, and skip others before it."""
        while True:
            request = self.requests.get(timeout=timeout)
            if isinstance(request, kind):
                return request

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        peer = b""
        try:
            while not self._stop.is_set():
                while not self._outgoing.empty():
                    self._send(peer, self._outgoing.get())
                if self._router.poll(5):
                    peer, header = self._router.recv_multipart()
                    try:
                        request = decode_request(header)
                    except msgspec.DecodeError as error:
                        given, code = msgspec.msgpack.decode(header), ErrorCode.MALFORMED_MESSAGE
                        self._send(peer, ErrorReply(id=given["id"], code=code, message=str(error)))
                        continue
                    if isinstance(request, HelloReqInput):
                        self.hellos += 1
                        replies = self._greet(request) if self._greet else welcome(request, self.incarnation)
                    else:
                        replies = self._handler(request)
                        self.requests.put(request)
                    for reply in replies:
                        self._send(peer, reply)
                    if isinstance(request, ShutdownReqInput):
                        break
        except VanishError:
            pass
        finally:
            # Linger so that replies sent just before a close arrive, as a real engine's do.
            self._router.close(linger=1000)
            self._context.term()

    def _send(self, peer: bytes, reply: Message | bytes) -> None:
        self._router.send_multipart([peer, reply if isinstance(reply, bytes) else encode(reply)])

    def wait(self) -> None:
        self._thread.join()


UNANSWERED = {"ignore-signals": ShutdownReqInput, "deaf": GetStatusReqInput, "silent": GenerateReqInput}
"""Request that a process with that behaviour never answers."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--state-file", help="Ignored.")
    behaviours = ["well", "refuse", "crash", "hang", "die-on-generate", "drain", *UNANSWERED]
    parser.add_argument("--behave", choices=behaviours, default="well")
    options = parser.parse_args()

    def say(**message: object) -> None:
        os.write(options.ready_fd, json.dumps(message).encode() + b"\n")

    if options.behave == "refuse":
        say(ready=False, code="checkpoint_error", message="no such folder", detail={"path": "/nowhere"})
        sys.exit(1)
    if options.behave == "crash":
        sys.exit("RuntimeError: out of paper")
    if options.behave == "hang":
        os.read(options.lifeline_fd, 1)
        sys.exit(0)

    def handler(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, GenerateReqInput) and options.behave == "die-on-generate":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if isinstance(request, UNANSWERED.get(options.behave, ())):
            return []
        if isinstance(request, ShutdownReqInput) and options.behave == "drain":
            Path(options.endpoint.removeprefix("ipc://")).with_name("draining").touch()
            return [ShutdownReqOutput(id=request.id, drain_s=request.timeout_s or 0.0)]
        return answer(request)

    if options.behave in ("ignore-signals", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fake = FakeScheduler(options.endpoint, handler)
        say(ready=True, endpoint=options.endpoint, pid=os.getpid())
        threading.Event().wait()
    fake = FakeScheduler(options.endpoint, handler)
    threading.Thread(target=lambda: (os.read(options.lifeline_fd, 1), os._exit(0)), daemon=True).start()
    say(ready=True, endpoint=options.endpoint, pid=os.getpid())
    fake.wait()
    if options.behave == "drain":
        threading.Event().wait()


if __name__ == "__main__":
    main()
