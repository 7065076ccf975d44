"""A client that counts: it hands every message to a ledger as it came, before anything could merge or drop
it.

It has no thread: whoever waits for something calls :meth:`Witness.pump` meanwhile.
"""

import random
from types import TracebackType
from typing import Self

import zmq

from caesura.io_struct import (
    AbortReq,
    BatchTokenOutput,
    ErrorReply,
    GenerateReqInput,
    Message,
    SamplingParams,
    decode_reply,
    encode,
)

from .known import FIRST_TOKEN, VOCAB
from .ledger import Ledger

LONG_TOKENS = 3000


def draw_prompt(rng: random.Random) -> list[int]:
    length = rng.choice((1, 5, 17, 40, 600))
    return [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]


def greedy(new_tokens: int, samples: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, n=samples)


class Witness:
    """A DEALER socket on ``endpoint`` whose requests ``ledger`` keeps account of."""

    def __init__(self, endpoint: str, ledger: Ledger, *, allowed: tuple[str, ...] = ()) -> None:
        self.ledger = ledger
        self.arrived = 0
        """Messages so far."""
        self._allowed = allowed
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvhwm = self._socket.sndhwm = 0
        self._socket.connect(endpoint)
        self._replies: dict[str, Message] = {}

    def generate(
        self, rid: str, prompt: list[int], new_tokens: int, *, stream: bool = False, samples: int = 1
    ) -> None:
        self.ledger.asked(rid, prompt, new_tokens, samples)
        params = greedy(new_tokens, samples)
        self.send(GenerateReqInput(id=rid, rid=rid, input_ids=prompt, sampling_params=params, stream=stream))

    def abort_all(self) -> None:
        self.send(AbortReq(abort_all=True))

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def take_reply(self, message_id: str) -> Message | None:
        """Return the reply to a message that was no generation, once, or None before it has come."""
        return self._replies.pop(message_id, None)

    def pump(self, seconds: float) -> bool:
        """Take in what has come, after waiting at most so long for the first; whether anything came."""
        if not self._socket.poll(max(0, round(seconds * 1000))):
            return False
        while self._socket.poll(0):
            self._take(decode_reply(self._socket.recv_multipart()[0]))
            self.arrived += 1
        return True

    def _take(self, message: Message) -> None:
        if isinstance(message, BatchTokenOutput):
            if message.delta is not None:
                self.ledger.streamed(message.delta)
            for result in message.finished:
                self.ledger.ended(result)
        elif isinstance(message, ErrorReply):
            self.ledger.refused(message, allowed=self._allowed)
            self._replies[message.id] = message
        elif (message_id := getattr(message, "id", None)) is not None:
            self._replies[message_id] = message

    def close(self) -> None:
        if not self._context.closed:
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
