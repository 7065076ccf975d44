"""A bare DEALER socket: for what the clients never send, and for seeing exactly what comes back."""

from typing import Any, Self

import numpy as np
import zmq

from caesura.io_struct import (
    BatchTokenOutput,
    GenerateReqOutput,
    Keepalive,
    Message,
    StreamDelta,
    decode_reply,
    encode,
)

from .waiting import PATIENCE_S

PATIENCE_MS = int(1e3 * PATIENCE_S)


class RawClient:
    def __init__(self, endpoint: str, *, identity: bytes | None = None, receive_hwm: int = 0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = receive_hwm
        if identity is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._context.closed:
            self._context.destroy(linger=0)

    def send(self, *frames: Message | bytes) -> None:
        self.socket.send_multipart([f if isinstance(f, bytes) else encode(f) for f in frames])

    def receive(self, patience_ms: int = PATIENCE_MS) -> Any:
        while True:
            assert self.socket.poll(patience_ms), "nothing came"
            (frame,) = self.socket.recv_multipart()
            message = decode_reply(frame)
            if not isinstance(message, Keepalive):
                return message

    def received(self) -> list[Any]:
        messages: list[Any] = []
        while self.socket.poll(0):
            messages.append(decode_reply(self.socket.recv_multipart()[0]))
        return messages

    def call(self, *frames: Message | bytes) -> Any:
        self.send(*frames)
        while isinstance(message := self.receive(), BatchTokenOutput):
            pass
        return message

    def result(self, rid: str) -> GenerateReqOutput:
        """Return the terminal result of the only sample of ``rid``, and drop stream deltas before it."""
        while True:
            message = self.receive()
            assert isinstance(message, BatchTokenOutput), message
            for result in message.finished:
                if result.rid == rid:
                    return result


Row = tuple[str, int, int, list[int], list[float]]


def rows(delta: StreamDelta | None) -> list[Row]:
    if delta is None:
        return []
    indices, starts, counts, tokens = (
        np.frombuffer(column, "<i4").tolist()
        for column in (delta.indices, delta.starts, delta.counts, delta.tokens)
    )
    logprobs = np.frombuffer(delta.logprobs, "<f4").tolist()
    assert len(delta.rids) == len(indices) == len(starts) == len(counts)
    assert sum(counts) == len(tokens) == len(logprobs)
    ends = np.cumsum(counts).tolist()
    return [
        (rid, index, start, tokens[end - count : end], logprobs[end - count : end])
        for rid, index, start, count, end in zip(delta.rids, indices, starts, counts, ends, strict=True)
    ]
