"""A client that counts: it hands every message to a ledger as it came, before anything could merge or drop
it.

It has no thread: whoever waits for something calls :meth:`Witness.pump` meanwhile.
"""

import random

from support.raw_client import RawClient

from caesura.io_struct import BatchTokenOutput, ErrorReply, GenerateReqInput, Message, SamplingParams

from .known import FIRST_TOKEN, VOCAB
from .ledger import Ledger

LONG_TOKENS = 3000


def draw_prompt(rng: random.Random) -> list[int]:
    length = rng.choice((1, 5, 17, 40, 600))
    return [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]


def greedy(new_tokens: int, samples: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, n=samples)


class Witness(RawClient):
    """A DEALER socket on ``endpoint`` whose requests ``ledger`` keeps account of."""

    def __init__(self, endpoint: str, ledger: Ledger) -> None:
        super().__init__(endpoint)
        self.ledger = ledger
        self.arrived = 0
        """Messages so far."""

    def generate(
        self, rid: str, prompt: list[int], new_tokens: int, *, stream: bool = False, samples: int = 1
    ) -> None:
        self.ledger.asked(rid, prompt, new_tokens, samples)
        params = greedy(new_tokens, samples)
        self.send(GenerateReqInput(id=rid, rid=rid, input_ids=prompt, sampling_params=params, stream=stream))

    def pump(self, seconds: float) -> bool:
        """Take in what has come, after waiting at most so long for the first; whether anything came."""
        if not self.socket.poll(max(0, round(seconds * 1000))):
            return False
        for message in self.received():
            self._take(message)
            self.arrived += 1
        return True

    def _take(self, message: Message) -> None:
        if isinstance(message, BatchTokenOutput):
            if message.delta is not None:
                self.ledger.streamed(message.delta)
            for result in message.finished:
                self.ledger.ended(result)
        elif isinstance(message, ErrorReply):
            self.ledger.refused(message)
