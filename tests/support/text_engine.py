"""A scripted engine below a TokenizerManager."""

import asyncio
from contextlib import asynccontextmanager

from support.fake_scheduler import FakeScheduler, answer, delta, finished, floats, results, rid_of

from caesura.client import AsyncSchedulerClient
from caesura.client.text.tokenizer_manager import TokenizerManager
from caesura.io_struct import AbortReq, AbortReqOutput, FinishReason, GenerateReqInput

from .waiting import PATIENCE_S as PATIENCE


@asynccontextmanager
async def engine_below(endpoint, tokenizer, handler, **options):
    """Yield a manager and the engine below it."""
    with FakeScheduler(endpoint, handler) as fake:
        async with AsyncSchedulerClient(endpoint, **options) as client, asyncio.timeout(PATIENCE):
            yield TokenizerManager(client, tokenizer), fake


class Engine:
    """Holds generations open; ``say`` streams tokens."""

    def __init__(self, more=()):
        self.more = list(more)
        self.said = {}
        self.fake = None

    def __call__(self, request):
        if isinstance(request, GenerateReqInput):
            self.request = request
            self.said = {index: [] for index in range(request.sampling_params.n)}
            return []
        if isinstance(request, AbortReq):
            chosen = [i for i in self.said if request.index is None or i == request.index]
            return [AbortReqOutput(id=request.id, aborted=len(chosen)), *map(self.end, chosen)]
        return answer(request)

    def end(self, index, reason=None, extra=None):
        tokens = self.said.pop(index) + (self.more if extra is None else extra)
        logprobs = floats(map(float, tokens)) if self.request.return_logprob else None
        values = {"finish_reason": reason or FinishReason(type="abort", message="Aborted")}
        values["output_logprobs"] = logprobs
        return results(finished(rid_of(self.request), tokens, index, **values))

    def say(self, fake, index, tokens):
        start = len(self.said[index])
        self.said[index] += tokens
        fake.push(delta((rid_of(self.request), index, start, tokens)))

    async def begun(self, fake):
        return await asyncio.to_thread(fake.next_request, GenerateReqInput)


async def until_abort(fake):
    return await asyncio.to_thread(fake.next_request, AbortReq)


def script(tokens, reason=None, **fields):
    def handler(request):
        if not isinstance(request, GenerateReqInput):
            return answer(request)
        values = {"finish_reason": reason or FinishReason(type="length", length=len(tokens)), **fields}
        indices = range(request.sampling_params.n)
        return [results(*(finished(rid_of(request), tokens, index, **values) for index in indices))]

    return handler
