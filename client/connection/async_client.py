"""``AsyncSchedulerClient``: generation, scoring and all commands, for coroutines of one event loop.

Invariant: a ``generate`` that fails or is interrupted aborts what it started, unless it timed out.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

from ... import io_struct as wire
from ...io_struct.control import TraceStage
from ..exceptions import EngineError, TimedOut
from .async_channel import Deltas, Result, next_delta, wait_for_all
from .async_control_client import AsyncControlClient
from .client_options import CallOptions, GenerateOptions, seconds
from .connection import Generation, ImageGeneration
from .fork import Process
from .image_generation import ImageOptions, plan_images
from .prompts import Ids, Plan, Prompts, RequestT, Sampling, Scores, one_request, plan
from .results import GenerateOutput, TokenDelta, decode_output

InFlight = Generation[Result, Deltas] | ImageGeneration[Result]


class AsyncGenerationHandle:
    """One submitted prompt. ``async for`` yields :class:`TokenDelta` (all at once unless it streams)."""

    def __init__(self, client: "AsyncSchedulerClient", generation: Generation[Result, Deltas]) -> None:
        self.rid = generation.rid
        """Request id, for ``abort`` and ``fetch_result``."""
        self.message_id = generation.message_id
        """Message id of the request; ``submit`` with this id and the same arguments attaches to it."""
        self.n = generation.n
        """Number of samples."""
        self._client = client
        self._future = generation.waiter
        self._deltas = generation.deltas
        self._process = Process("generation")

    def done(self) -> bool:
        """Return True if all samples have ended."""
        self._process.require()
        return self._future.done()

    async def result(self, timeout: float | None = None) -> GenerateOutput:
        """Return the output of the only sample; ValueError if ``n`` is not 1. Raises like :meth:`results`."""
        self._process.require()
        if self.n != 1:
            raise ValueError(f"n = {self.n}: use results()")
        outputs = await self.results(timeout)
        return outputs[0]

    async def results(self, timeout: float | None = None) -> list[GenerateOutput]:
        """Return all samples' outputs, in order. EngineError has what was generated in ``.output`` and
        ``.outputs``; TimedOut after ``timeout`` seconds says what the engine waits for.
        """
        self._process.require()
        timeout = seconds("timeout", timeout)
        try:
            outputs: list[GenerateOutput] = await self._client._wait_for(
                self._future, self.message_id, timeout
            )
        except TimedOut as error:
            raise await self._client._explained(error) from None
        return outputs

    async def abort(self, timeout: float | None = None) -> wire.AbortReqOutput:
        """Abort this generation; its result is then the partial output."""
        return await self._client.abort(self.rid, timeout=timeout)

    async def deltas(self, timeout: float | None = None) -> AsyncIterator[TokenDelta]:
        """Yield each token once, in order per sample; raise like :meth:`results`; ``timeout`` is per wait."""
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
            raise await self._client._explained(error) from None
        self._deltas.put_nowait(None)  # a second iteration ends at once instead of waiting forever
        await self.results()

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self.deltas()


class AsyncSchedulerClient(AsyncControlClient):
    """An :class:`AsyncControlClient` with generation, scoring and traces."""

    _wait_for_all = staticmethod(wait_for_all)

    @overload
    async def generate(
        self,
        input_ids: Sequence[Ids],
        sampling_params: Sampling | Sequence[Sampling] | None = ...,
        *,
        rid: str | Sequence[str] | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateOutput]: ...

    @overload
    async def generate(
        self,
        input_ids: Ids,
        sampling_params: Sampling | Sequence[Sampling] | None = ...,
        *,
        rid: str | Sequence[str] | None = ...,
        message_id: str | None = ...,
        timeout: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutput | Any: ...  # a list when n > 1, or of an array of two dimensions, which no type says

    async def generate(
        self,
        input_ids: Prompts,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Generate and wait for the results. A list of prompts returns a list of outputs in the order of the
        prompts, with the ``n`` samples of each prompt together. One prompt returns one output with ``n`` = 1,
        and a list of ``n`` otherwise; give ``[prompt]`` to have a list whatever ``n`` is.

        Args:
            input_ids: [tokens], or a list of such prompts. Tensors and arrays are accepted: one dimension is
                a prompt, two are several of equal length. The options below apply to each prompt.
            sampling_params: one value for all prompts, or one per prompt: a :class:`SamplingParams`, or a
                dict of its fields. None means the defaults.
            return_logprob: output tokens' log-softmax over the full vocabulary after temperature.
            return_raw_logprob: the same under the unmodified logits, at temperature 1.
            return_sampled_logprob: the same under the sampling distribution, after top-k, top-p and min-p.
            logprob_start_len: with ``return_logprob``, also for the prompt from this position on; -1: none.
            top_logprobs_num: with ``return_logprob``, also this many likeliest tokens a position, up to 128.
            token_ids_logprob: with ``return_logprob``, also for these token ids per position, up to 1,024.
            return_sampling_mask: the tokens that top-k, top-p and min-p kept at each output token.
            return_routed_experts: the experts that computed each position, [rows, layers, experts per token].
            return_hidden_states: hidden states of each position but the last, [rows, layers, hidden size].
            hidden_states_layers: as transformers numbers them; -1, the default, follows the final norm.
            hidden_states_start_len: first position whose hidden states are returned.
            routed_experts_start_len: first position whose experts are returned; at most the prompt's length.
            rid: request id, one per prompt; a single one becomes ``rid-0``, ``rid-1``, … for a list. None
                means random.
            cache_salt: prefix cache entries are shared only between requests of the same salt.
            prefix_lease: name of a lease on the cached prefix, by which it is evicted last.
            prefix_lease_s: seconds after which the lease ends by itself.
            min_weights_epoch: an engine with a lower weights epoch refuses with :class:`EpochBehind`.
            first_sample: index of the first of the ``n`` samples, in noise and results.
            continued_tokens: number of tokens at the prompt's end that penalties count as output.
            stream_details: for :meth:`submit` with ``stream``: deltas have each token's weights and logprobs.
            message_id: id of an earlier call with the same arguments that timed out, to attach to it.
            timeout: seconds for the whole call. None means until the engine answers or dies.

        Raises:
            TimedOut: not all generations ended within ``timeout``; they continue. The message says if the
                engine is paused, by whom and since when, or what else it waits for.
            InvalidRequest: a prompt is text or no token ids, or a sampling parameter is unknown.
            EngineError: of the first prompt that was refused or failed; the others of this call are aborted.
        """
        work = plan(input_ids, sampling_params, options, rid=rid, message_id=message_id)
        return await self._carry_out(work, self._channel.start_generation, timeout)

    async def submit(
        self,
        input_ids: Ids,
        sampling_params: Sampling | None = None,
        *,
        stream: bool = False,
        rid: str | None = None,
        message_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationHandle:
        """Start a generation of one prompt and return at once; the handle raises its errors.

        Arguments are those of :meth:`generate`. With ``stream`` the handle yields deltas after each step, not
        all at the end.
        """
        request = one_request(
            input_ids, sampling_params, options, rid=rid, message_id=message_id, stream=stream
        )
        return AsyncGenerationHandle(self, self._channel.start_generation(request))

    @overload
    async def score(
        self,
        input_ids: Sequence[Ids],
        *,
        start: int | Sequence[int],
        temperature: float = ...,
        **call: Unpack[CallOptions],
    ) -> list[list[float]]: ...

    @overload
    async def score(
        self, input_ids: Ids, *, start: int, temperature: float = ..., **call: Unpack[CallOptions]
    ) -> list[float]: ...

    async def score(
        self,
        input_ids: Prompts,
        *,
        start: int | Sequence[int],
        temperature: float = 1.0,
        **call: Unpack[CallOptions],
    ) -> Any:
        """Return logprobs of the tokens from ``start`` on (one for all, or one for each sequence) under the
        reference model: log-softmax over the full vocabulary after ``temperature``.

        One sequence returns a list of floats, several a list of lists, with [tokens - start] values each.
        Unsupported without a reference model; another EngineError names the sequence that was refused.
        """
        scores = Scores(input_ids, start, temperature)
        return scores.decode(await self._ask(scores.request, wire.ScoreReqOutput, call))

    async def generate_images(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        embeds: Mapping[str, Any] | None = None,
        rid: str | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> Any:
        """Make images with an engine that serves a diffusion pipeline. One prompt returns one
        :class:`ImageOutput` (a list if n > 1); a list of prompts a list in their order, the ``n`` samples of
        each together.

        Args:
            prompt: text. None: ``prompt_ids`` or ``embeds`` say what to draw.
            embeds: arrays by the pipeline's argument names (``prompt_embeds``, ``pooled_prompt_embeds``, for
                guidance with ``negative_`` before), without a batch dimension, or those of an
                :class:`ImageOutput`.
            options: the fields of :class:`~caesura.io_struct.GenerateImagesReqInput`.

        ``rid``, ``message_id``, ``timeout`` and errors are as in :meth:`generate`.
        """
        work = plan_images(prompt, embeds, options, rid=rid, message_id=message_id)
        start = partial(self._channel.start_images, buffers=work.buffers)
        return await self._carry_out(work, start, timeout)

    async def abort(
        self,
        rid: str | Sequence[str] | None = None,
        *,
        abort_all: bool = False,
        **call: Unpack[CallOptions],
    ) -> wire.AbortReqOutput:
        """Abort generations by their rids, or all of them. Their own callers get the partial outputs."""
        named = rid if rid is None or isinstance(rid, str) else list(rid)
        return await self._ask(wire.AbortReq(rid=named, abort_all=abort_all), wire.AbortReqOutput, call)

    async def end_prefix_leases(
        self, names: Sequence[str], **call: Unpack[CallOptions]
    ) -> wire.EndPrefixLeasesReqOutput:
        """End leases on cached prefixes, which are not used again: their pages are evicted first."""
        request = wire.EndPrefixLeasesReqInput(names=list(names))
        return await self._ask(request, wire.EndPrefixLeasesReqOutput, call)

    async def add_corpus(
        self, name: str, token_ids: Sequence[Sequence[int]], **call: Unpack[CallOptions]
    ) -> wire.AddCorpusReqOutput:
        """Keep texts, as ids, that an engine with speculation drafts from for every prompt."""
        request = wire.AddCorpusReqInput(name=name, token_ids=[list(text) for text in token_ids])
        return await self._ask(request, wire.AddCorpusReqOutput, call)

    async def remove_corpus(self, name: str, **call: Unpack[CallOptions]) -> wire.RemoveCorpusReqOutput:
        """Forget the texts of :meth:`add_corpus`."""
        return await self._ask(wire.RemoveCorpusReqInput(name=name), wire.RemoveCorpusReqOutput, call)

    async def list_corpora(self, **call: Unpack[CallOptions]) -> dict[str, int]:
        """Return the numbers of tokens of all corpora, by name."""
        reply = await self._ask(wire.ListCorporaReqInput(), wire.ListCorporaReqOutput, call)
        return reply.corpora

    async def fetch_result(self, rid: str, **call: Unpack[CallOptions]) -> list[GenerateOutput]:
        """Return the results of a generation that ended while its client could not be reached, if any."""
        request = wire.FetchResultReqInput(rid=rid)
        reply = await self._ask(request, wire.FetchResultReqOutput, call)
        return [decode_output(result) for result in reply.results]

    async def start_profile(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        num_steps: int | None = None,
        activities: Sequence[wire.TraceActivity] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        start_step: int | None = None,
        stages: Sequence[TraceStage] | None = None,
        profile_id: str | None = None,
        prefix: str | None = None,
        **call: Unpack[CallOptions],
    ) -> wire.StartProfileReqOutput:
        """Record a trace of the next ``num_steps`` with torch's profiler, or until :meth:`stop_profile`."""
        request = wire.StartProfileReqInput(
            output_dir=None if output_dir is None else os.fspath(output_dir),
            num_steps=num_steps,
            activities=None if activities is None else list(activities),
            with_stack=with_stack,
            record_shapes=record_shapes,
            start_step=start_step,
            stages=None if stages is None else list(stages),
            profile_id=profile_id,
            prefix=prefix,
        )
        return await self._ask(request, wire.StartProfileReqOutput, call)

    async def stop_profile(
        self, *, wait: bool = False, **call: Unpack[CallOptions]
    ) -> wire.StopProfileReqOutput:
        """End the trace (with ``wait``: let it end by itself); returns when its file is written."""
        request = wire.StopProfileReqInput(wait=wait)
        return await self._ask(request, wire.StopProfileReqOutput, call)

    async def _carry_out(
        self, work: Plan[RequestT], start: Callable[[RequestT], InFlight], timeout: float | None
    ) -> Any:
        timeout = seconds("timeout", timeout)
        generations: list[InFlight] = []
        try:
            for request in work.requests:
                generations.append(start(request))  # noqa: PERF401 (kept if the next raises)
            futures = [generation.waiter for generation in generations]
            await self._wait_for_all(futures, timeout)
            return work.collect(futures, timeout)
        except TimedOut as error:
            raise await self._explained(error) from None
        except BaseException:
            self._abandon(generations)
            raise

    def _abandon(self, generations: Sequence[InFlight]) -> None:
        for generation in generations:
            if not generation.waiter.done():
                with contextlib.suppress(EngineError):
                    self._channel.start_call(wire.AbortReq(rid=generation.rid), wire.AbortReqOutput)
