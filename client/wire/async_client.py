"""``AsyncSchedulerClient``: the engine, from coroutines of one event loop.

Invariants: those of :class:`~.async_control_client.AsyncControlClient`, and: a ``generate`` that raises, or is interrupted, has
aborted what it started, except where only its patience ran out.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Unpack, overload

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    FetchResultReqInput,
    FetchResultReqOutput,
    SamplingParams,
    ScoreReqOutput,
)
from ..exceptions import EngineError, TimedOut
from .async_channel import Deltas, Result, wait_for_all
from .async_control_client import AsyncControlClient
from .async_handle import AsyncGenerationHandle
from .connection import Generation
from .options import GenerateOptions, id_of, seconds
from .prompts import Plan, one_request, plan
from .results import GenerateOutput, decode_output
from .scoring import Scores


class AsyncSchedulerClient(AsyncControlClient):
    """A connection to one engine that generates; constructor and timeouts as of its base class."""

    @overload
    async def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        rid: str | Sequence[str] | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateOutput]: ...

    @overload
    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        rid: str | Sequence[str] | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutput | Any: ...  # a list when n > 1, which no type says

    async def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Generate and wait. One prompt gives one output (a list of ``n`` when n > 1); a list of prompts gives a list,
        prompt by prompt, the ``n`` samples of each together.

        Args:
            input_ids: [tokens], or a list of such prompts; ids of numpy are taken too. Every option below holds for each prompt.
            sampling_params: one value for all prompts, or one per prompt. None: the defaults.
            return_logprob: of each new token, natural logarithms: log-softmax over the full vocabulary after temperature.
            return_raw_logprob: the same of the unedited logits, at temperature 1.
            return_sampled_logprob: the same under the distribution really sampled, after top-k, top-p and min-p.
            logprob_start_len: with ``return_logprob``, also of the prompt's tokens from this position on. -1: none.
            top_logprobs_num: with ``return_logprob``, also the so many likeliest tokens at each position; at most 128.
            token_ids_logprob: with ``return_logprob``, also of these token ids at each position; at most 1,024.
            return_routed_experts: which experts computed each position, [rows, layers, experts per token].
            routed_experts_start_len: first position whose experts are returned; at most the prompt's length.
            rid: names the generation, one per prompt; a single one becomes ``rid-0``, ``rid-1``, … for a list. None: drawn.
            cache_salt: prefix-cache entries are shared only within one salt.
            min_weights_epoch: refuse with :class:`EpochBehind` on an engine whose weights are older. None: any.
            message_id: of an earlier call with the same arguments that timed out: attaches to it. None: a new call.
            timeout: seconds for the whole call. None: until the engine answers or dies.

        Raises:
            TimedOut: not everything ended within ``timeout``; the generations go on.
            EngineError: the first prompt that was refused or failed; the others of this call are aborted.
        """
        timeout = seconds("timeout", timeout)
        work = plan(input_ids, sampling_params, options, rid=rid, message_id=message_id)
        return await self._generate(work, timeout)

    async def submit(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        rid: str | None = None,
        message_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationHandle:
        """Start one prompt and return at once; refusals are raised by the handle.

        Args:
            input_ids: [tokens], one prompt.
            stream: the handle's deltas come step by step. False: all at once, at the end.
            message_id: of an earlier call with the same arguments: attaches to it. None: a new call.

        The other arguments are those of :meth:`generate`, for one prompt.

        Raises:
            InvalidRequest: token ids that are not integers.
        """
        request = one_request(
            input_ids, sampling_params, options, rid=rid, message_id=message_id, stream=stream
        )
        return AsyncGenerationHandle(self.abort, self._channel.start_generation(request))

    @overload
    async def score(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        start: int | Sequence[int],
        temperature: float = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
    ) -> list[list[float]]: ...

    @overload
    async def score(
        self,
        input_ids: Sequence[int],
        *,
        start: int,
        temperature: float = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
    ) -> list[float]: ...

    async def score(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        start: int | Sequence[int],
        temperature: float = 1.0,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Log-probabilities of the tokens from ``start`` on (for all sequences, or one for each), given all before them, under
        the engine's reference checkpoint: its log-softmax after ``temperature``, over the full vocabulary.

        One sequence gives a list of floats, a list of sequences gives a list of lists: [tokens - start] natural logarithms each.

        Raises:
            Unsupported: the engine has no reference.
            EngineError: a sequence was refused (the message names it), and with it the whole call.
        """
        scores = Scores(input_ids, start, temperature, message_id)
        return scores.decode(await self._call(scores.request, ScoreReqOutput, timeout))

    async def abort(
        self,
        rid: str | None = None,
        *,
        abort_all: bool = False,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> AbortReqOutput:
        """End generations now, by rid or all of them; each answers its own caller with its partial output."""
        return await self._call(
            AbortReq(id=id_of(message_id), rid=rid, abort_all=abort_all), AbortReqOutput, timeout
        )

    async def fetch_result(
        self, rid: str, *, message_id: str | None = None, timeout: float | None = None
    ) -> list[GenerateOutput]:
        """Results of generation ``rid`` that ended while its client could not be reached, kept for a while by the engine;
        empty where nothing is kept."""
        request = FetchResultReqInput(id=id_of(message_id), rid=rid)
        reply = await self._call(request, FetchResultReqOutput, timeout)
        return [decode_output(result) for result in reply.results]

    async def _generate(self, work: Plan, timeout: float | None) -> Any:
        generations: list[Generation[Result, Deltas]] = []
        try:
            for request in work.requests:
                generations.append(self._channel.start_generation(request))  # noqa: PERF401 (kept if the next raises)
            futures = [generation.waiter for generation in generations]
            await wait_for_all(futures, timeout)
            return work.collect(futures, timeout)
        except TimedOut:
            raise
        except BaseException:
            self._abandon(generations)
            raise

    def _abandon(self, generations: list[Generation[Result, Deltas]]) -> None:
        """Abort what is unfinished, without waiting: its caller is leaving with another error."""
        for generation in generations:
            if not generation.waiter.done():
                with contextlib.suppress(EngineError):
                    self._channel.start_call(AbortReq(rid=generation.rid), AbortReqOutput)
