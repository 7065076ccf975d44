"""What ``submit`` returns: one generation in flight.

Invariant: only :meth:`AsyncGenerationHandle.abort` affects the generation; a timeout or an interrupted wait leaves it running.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from ...io_struct import AbortReqOutput
from ..exceptions import TimedOut
from .async_channel import Deltas, Result, next_delta, wait_for
from .connection import Generation
from .fork import Process
from .options import seconds
from .results import GenerateOutput, TokenDelta


class Abort(Protocol):
    """A client's ``abort``."""

    async def __call__(self, rid: str, *, timeout: float | None) -> AbortReqOutput: ...


class Explained(Protocol):
    """A client's way to find out what a generation that timed out waits for."""

    async def __call__(self, error: TimedOut, /) -> TimedOut: ...


class AsyncGenerationHandle:
    """One submitted prompt. ``async for`` yields the tokens as :class:`TokenDelta` (all at once unless it streams)."""

    def __init__(self, abort: Abort, explained: Explained, generation: Generation[Result, Deltas]) -> None:
        self.rid = generation.rid
        """Request id, for ``abort`` and ``fetch_result``."""
        self.message_id = generation.message_id
        """Message id of the request; ``submit`` with this id and the same arguments attaches to it."""
        self.n = generation.n
        """Number of samples."""
        self._abort = abort
        self._explained = explained
        self._future = generation.waiter
        self._deltas = generation.deltas
        self._process = Process("generation")

    def done(self) -> bool:
        """Whether all samples have ended."""
        self._process.require()
        return self._future.done()

    async def result(self, timeout: float | None = None) -> GenerateOutput:
        """The output of the only sample. Raises like :meth:`results`, and ValueError if ``n`` is not 1."""
        self._process.require()
        if self.n != 1:
            raise ValueError(f"n = {self.n}: use results()")
        outputs = await self.results(timeout)
        return outputs[0]

    async def results(self, timeout: float | None = None) -> list[GenerateOutput]:
        """The outputs of all samples, in order.

        Raises:
            TimedOut: not all ended within ``timeout`` seconds; they continue. The message says what the engine waits for.
            EngineError: the request was refused or failed; ``.output`` and ``.outputs`` have what was generated.
        """
        self._process.require()
        timeout = seconds("timeout", timeout)
        try:
            outputs: list[GenerateOutput] = await wait_for(self._future, self.message_id, timeout)
        except TimedOut as error:
            raise await self._explained(error) from None
        return outputs

    async def abort(self, timeout: float | None = None) -> AbortReqOutput:
        """Abort this generation; its result is then the partial output."""
        return await self._abort(self.rid, timeout=timeout)

    async def deltas(self, timeout: float | None = None) -> AsyncIterator[TokenDelta]:
        """Yield every token once, in order per sample; waits at most ``timeout`` seconds for each delta.

        Raises like :meth:`results` at the end of the stream.
        """
        self._process.require()
        timeout = seconds("timeout", timeout)
        if self._deltas is None:
            for output in await self.results(timeout):
                yield output.as_delta()
            return
        try:
            while (delta := await next_delta(self._deltas, self.message_id, timeout)) is not None:
                yield delta
        except TimedOut as error:
            raise await self._explained(error) from None
        self._deltas.put_nowait(None)  # a second iteration ends at once instead of waiting forever
        await self.results()

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self.deltas()
