# Generated from connection/async_handle.py by `python client/_blocking/generate.py`: change that file.
"""What ``submit`` returns: one generation in flight.

Invariant: only :meth:`GenerationHandle.abort` affects the generation; a timeout or an interrupted wait leaves it running.
"""

from collections.abc import Iterator
from typing import Protocol

from ...io_struct import AbortReqOutput
from ..exceptions import TimedOut
from .channel import Deltas, Result, next_delta, wait_for
from .connection import Generation
from .fork import Process
from .options import seconds
from .results import GenerateOutput, TokenDelta


class Abort(Protocol):
    """A client's ``abort``."""

    def __call__(self, rid: str, *, timeout: float | None) -> AbortReqOutput: ...


class Explained(Protocol):
    """A client's way to find out what a generation that timed out waits for."""

    def __call__(self, error: TimedOut, /) -> TimedOut: ...


class GenerationHandle:
    """One submitted prompt. Iterating yields the tokens as :class:`TokenDelta` (all at once unless it streams)."""

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

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """The output of the only sample. Raises like :meth:`results`, and ValueError if ``n`` is not 1."""
        self._process.require()
        if self.n != 1:
            raise ValueError(f"n = {self.n}: use results()")
        outputs = self.results(timeout)
        return outputs[0]

    def results(self, timeout: float | None = None) -> list[GenerateOutput]:
        """The outputs of all samples, in order.

        Raises:
            TimedOut: not all ended within ``timeout`` seconds; they continue. The message says what the engine waits for.
            EngineError: the request was refused or failed; ``.output`` and ``.outputs`` have what was generated.
        """
        self._process.require()
        timeout = seconds("timeout", timeout)
        try:
            outputs: list[GenerateOutput] = wait_for(self._future, self.message_id, timeout)
        except TimedOut as error:
            raise self._explained(error) from None
        return outputs

    def abort(self, timeout: float | None = None) -> AbortReqOutput:
        """Abort this generation; its result is then the partial output."""
        return self._abort(self.rid, timeout=timeout)

    def deltas(self, timeout: float | None = None) -> Iterator[TokenDelta]:
        """Yield every token once, in order per sample; waits at most ``timeout`` seconds for each delta.

        Raises like :meth:`results` at the end of the stream.
        """
        self._process.require()
        timeout = seconds("timeout", timeout)
        if self._deltas is None:
            for output in self.results(timeout):
                yield output.as_delta()
            return
        try:
            while (delta := next_delta(self._deltas, self.message_id, timeout)) is not None:
                yield delta
        except TimedOut as error:
            raise self._explained(error) from None
        self._deltas.put_nowait(None)  # a second iteration ends at once instead of waiting forever
        self.results()

    def __iter__(self) -> Iterator[TokenDelta]:
        return self.deltas()
