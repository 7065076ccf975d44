"""Runs steps of a real model, on the forward stream where there is one.

Invariants:
- Weights, KV and captured buffers are read only on the forward stream; whoever writes them does so inside
  :meth:`ModelRunner.on_stream` and synchronises before telling anybody (I4, I5).
- The stream waits for the scheduling stream before a step, and the scheduling stream for it after; inputs and
  results travel on it (``staging.py``).
- A decode row's input is the token that its slot sampled last, taken on the device, unless the host knows it.
- A warm-up goes the way of a step but for its rows, which are nobody's.
- Decode-only steps are replayed if their graphs are captured (``graphs.py``), others run eagerly.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.pool import RoutingPool
from ..layers.logits_processor import SharedLogits, autotune_dummy_run_mode
from ..layers.lora import AdapterRows, AdapterSlots
from ..memory.device_memory import is_out_of_memory
from ..memory.device_module import DeviceModule, graphs_of, streams_of
from ..models.causal_lm import CausalLM
from ..observability.stage_profiler import StageProfiler
from ..parallel.group import SINGLE, TensorParallel
from .forward import (
    AttentionBackend,
    CapturableBackend,
    ForwardBatch,
    ForwardOutput,
    FurtherLogprobs,
    HostOutput,
    StepLimits,
)
from .graphs import DecodeGraphs
from .logit_edits import SpecialSampler, input_logprobs
from .sampler import Sampler, SamplerOutput
from .scratch_steps import dummy_decode
from .staging import InputStaging, OutputStaging

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadyOutput:
    output: HostOutput

    def fetch(self) -> HostOutput:
        return self.output


class _OneCall:
    """A decode step that one call has computed: arrays in the memory of its tensors."""

    def __init__(self, batch: ForwardBatch, sampled: SamplerOutput) -> None:
        self.batch, self.sampled = batch, sampled
        self.input_ids, self.slots = batch.input_ids.numpy(), batch.slots.numpy()
        self.results = _arrays_of(sampled)


class ModelRunner:
    """The :class:`~caesura.scheduler.execution.forward.Runner` of a real model.

    The caller captures ``graphs``. ``stages`` counts the time of head and sampler, on the host.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        limits: StepLimits,
        device: torch.device,
        device_module: DeviceModule,
        routing: RoutingPool | None = None,
        adapters: AdapterSlots | None = None,
        parallel: TensorParallel = SINGLE,
        addresses: Callable[[], tuple[int, ...]] = tuple,
        graph_rows: int | None = None,
        pool_pages: int = 0,
    ) -> None:
        """Run on a stream of ``device_module`` if it has any; ``routing`` stores the experts chosen.

        ``addresses`` as in ``LoadedModel``. Decode steps of more than ``graph_rows`` rows are not captured;
        None limits nothing, and 0 captures none. ``pool_pages``: pages of this rank's KV pool, without
        scratch, for data-parallel attention.
        """
        self.model = model
        self.stages = StageProfiler()
        self._routing, self._pool_pages = routing, pool_pages
        self._adapters = adapters
        self.backend = backend
        self.sampler = sampler
        self._special = SpecialSampler(sampler, model.config.vocab_size, device)
        self._streams = streams_of(device_module)
        # One more than there are requests, for the rows that graphs are padded with; then known inputs.
        self.last_tokens = torch.zeros(limits.spare_slot + 1 + limits.rows, dtype=torch.int64, device=device)
        self._known_at = limits.spare_slot + 1
        self._stream: torch.Stream | None = None
        self.graphs: DecodeGraphs | None = None
        self._last: _OneCall | None = None
        if self._streams is None:
            self._host_tokens = self.last_tokens.numpy()
        else:
            self._stream = self._streams.Stream()
            self._outputs = OutputStaging(limits, device=device, device_module=self._streams)
            self._inputs = InputStaging(limits, device=device, device_module=self._streams)
            graphs = graphs_of(device_module)
            graph_rows = limits.rows if graph_rows is None else graph_rows
            if graph_rows and graphs is not None and isinstance(backend, CapturableBackend):
                self.graphs = DecodeGraphs(
                    self._forward,
                    self._sample_tokens,
                    sampler,
                    backend,
                    self._inputs,
                    limits=limits,
                    largest=graph_rows,
                    device=device,
                    device_module=graphs,
                    on_stream=self.on_stream,
                    parallel=parallel,
                    addresses=addresses,
                )

    def on_stream(self) -> AbstractContextManager[Any]:
        if self._streams is None or self._stream is None:
            return nullcontext()
        return self._streams.stream(self._stream)

    def execute(self, batch: ForwardBatch) -> ForwardOutput:
        """Enqueue one step; on the CPU it has run when this returns."""
        if self._stream is None:
            return ReadyOutput(self._repeat(batch) or self._compute(batch))
        return self._enqueue(batch)

    def _repeat(self, batch: ForwardBatch) -> HostOutput | None:
        """Compute the step before once more, if ``batch`` is it with other contents; None if it is not.

        By numpy alone, unless rows want further log-probabilities: behind a step the caches hold weights, and
        the first call into torch takes 0.1 ms.
        """
        last, self._last = self._last, None
        if last is None or last.batch is not batch:
            return None
        if torch.autograd.profiler._is_profiler_enabled:  # a trace is of torch's operations
            return None
        self._plan(batch)
        if batch.known is None:
            last.input_ids[:] = self._host_tokens[last.slots]
        sampled = self.model.sample(batch, self.backend, self._special.arguments)
        if sampled is None:
            return None
        sampled.further = self._further(batch, sampled)
        if sampled is not last.sampled:
            last = _OneCall(batch, sampled)
        self._record_experts(batch)
        self._host_tokens[last.slots] = np.maximum(last.results.token_ids, 0)
        self._last = last
        return _host_output(sampled, last.results)

    @torch.inference_mode()
    def _compute(self, batch: ForwardBatch) -> HostOutput:
        self._plan(batch)
        sampled = self._sample_in_one_call(batch)
        if sampled is None:
            sampled = self._sample(batch, self._forward(batch, self.backend))
        return _host_output(sampled, _arrays_of(sampled))

    @torch.inference_mode()
    def _enqueue(self, batch: ForwardBatch) -> ForwardOutput:
        with self._waiting_both_ways():
            if batch.known is not None:
                batch = self._with_known(batch, batch.known)
            output = self._outputs.send(self._step(batch))
        return output

    def _with_known(self, batch: ForwardBatch, known: Tensor) -> ForwardBatch:
        """Let decode rows, of a graph too, take ``known`` as last tokens of slots that nobody has."""
        end = self._known_at + len(known)
        self.last_tokens[self._known_at : end] = known.to(self.last_tokens.device, non_blocking=True)
        slots = torch.cat([torch.arange(self._known_at, end), batch.slots[len(known) :]])
        return replace(batch, slots=slots)

    @torch.inference_mode()
    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        with self.on_stream():
            device = self.last_tokens.device
            index, values = (torch.from_numpy(array).to(device, torch.int64) for array in (slots, tokens))
            self.last_tokens[index] = values

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def autotune(self, rows: int, head_rows: int) -> None:
        """Run a decode step of ``rows``, and head and sampler of ``head_rows``, for nobody, before requests.

        No temporary has rows times vocabulary. Running out of memory is a warning: the engine starts cold.
        """
        started = perf_counter()
        try:
            with self._waiting_both_ways():
                with autotune_dummy_run_mode():
                    batch, hidden = self._dummy_run(rows)
                if len(hidden := hidden[:head_rows]):
                    logits = self.model.logits_to_sample(hidden)
                    assert logits is not None, "the mode is off"
                    index = torch.arange(len(hidden), device=hidden.device)
                    self.sampler.sample(logits, batch.sampling.select(index))
                    self._special.warm_up(batch.sampling.select(index[:1]))
            self.synchronize()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("the engine starts cold: warming up %d rows failed: %s", rows, error)
        else:
            elapsed = 1e3 * (perf_counter() - started)
            logger.info("warmed up %d rows, %d with head, in %.1f ms", rows, head_rows, elapsed)

    def _dummy_run(self, batch_size: int) -> tuple[ForwardBatch, Tensor]:
        """Run a decode step up to its logits; return it and its hidden states [rows, hidden]."""
        batch = dummy_decode(batch_size, self.model.config.vocab_size)
        with self._inputs.staged(batch) if self._stream is not None else nullcontext(batch) as staged:
            self._plan(staged)
        hidden = self._forward(staged, self.backend)
        self.model.logits(hidden)
        return staged, hidden

    @contextmanager
    def _waiting_both_ways(self) -> Iterator[None]:
        """Run the work inside on the forward stream, in order with the scheduling stream."""
        if self._streams is None or self._stream is None:
            yield
            return
        scheduling = self._streams.current_stream()
        self._stream.wait_stream(scheduling)
        with self.on_stream():
            yield
        scheduling.wait_stream(self._stream)

    def _step(self, batch: ForwardBatch) -> SamplerOutput:
        if self.graphs is not None and self.graphs.serves(batch):
            staged, hidden = self.graphs.replay(batch)
            if not self.graphs.samples(batch):
                return self._sample(staged, hidden)
            with self.stages.stage("sample"):
                return self.graphs.sample(batch)
        with self._inputs.staged(batch, table=self.backend.reads_page_table) as staged:
            self._plan(staged)
        return self._sample(staged, self._forward(staged, self.backend))

    def _plan(self, batch: ForwardBatch) -> None:
        """Plan attention for the rows whose KV this rank has."""
        rows = self.model.rank_rows
        own = batch if rows is None else rows.divide(batch, self._pool_pages)
        if own is not None:
            self.backend.plan(own)

    def _forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Compute hidden states [S, hidden] from the slots' last tokens, as a graph captures it."""
        self._take_tokens(batch)
        wanted = batch
        # Neither is captured: prompts are prefilled, and graphs serve no steps with hidden states.
        further = [each.tokens for each in (batch.inputs, batch.hidden) if each is not None]
        if further:
            wanted = replace(batch, sample_tokens=torch.cat([batch.sample_tokens, *further]))
        self._adapt(batch)
        hidden = self.model.forward(wanted, backend)
        self._record_experts(batch)
        return hidden

    def _sample_in_one_call(self, batch: ForwardBatch) -> SamplerOutput | None:
        """Compute a step with its head and sampler; None if the model or a row needs more for it."""
        possible = self._special.in_one_call(batch.sampling) and batch.sample_slots.shape[0] > 0
        if not possible or batch.inputs is not None or batch.hidden is not None:
            return None
        self._take_tokens(batch)
        sampled = self.model.sample(batch, self.backend, self._special.arguments)
        if sampled is not None:
            sampled.further = self._further(batch, sampled)
            self._record_experts(batch)
            self._keep_tokens(batch, sampled)
            decodes = batch.num_decode == batch.num_rows == batch.sample_slots.shape[0]
            if decodes:
                self._last = _OneCall(batch, sampled)
        return sampled

    def _further(self, batch: ForwardBatch, sampled: SamplerOutput) -> FurtherLogprobs | None:
        """Return what rows want beside their tokens, from the logits of the call that has sampled them."""
        if batch.sampling.special is None:
            return None
        logits = self.model.logits_processor.memory(len(sampled.token_ids))
        return self._special.wanted(logits, batch.sampling, sampled)

    def _take_tokens(self, batch: ForwardBatch) -> None:
        decode = batch.num_decode
        if batch.known is None:
            torch.index_select(self.last_tokens, 0, batch.slots[:decode], out=batch.input_ids[:decode])

    def _keep_tokens(self, batch: ForwardBatch, sampled: SamplerOutput) -> None:
        # -1 marks a row without finite logits; its surplus step must still read a valid embedding.
        self.last_tokens[batch.sample_slots] = sampled.token_ids.clamp_min(0)

    def _record_experts(self, batch: ForwardBatch) -> None:
        if self._routing is not None and self.model.routing is not None:
            rows, slots = self.model.rank_rows, batch.kv_slots
            slots = slots if rows is None else rows.by_rank(slots)
            self._routing.store(slots, self.model.routing.rows(len(slots)))

    def _sample(self, batch: ForwardBatch, hidden: Tensor) -> SamplerOutput:
        """Sample from ``hidden``: first the S sampled tokens, then ``batch.inputs`` and ``batch.hidden``."""
        count = len(batch.sample_tokens)
        if count:
            with self.stages.stage("sample"):
                sampled, _ = self._sample_tokens(batch, hidden[:count])
        else:
            none = torch.empty(0, device=hidden.device)
            sampled = SamplerOutput(
                token_ids=none.to(torch.int64), logprobs=none, raw_logprobs=None, sampled_logprobs=None
            )
        if batch.inputs is not None:
            vocab_size = self.model.config.vocab_size

            def head(hidden: Tensor, tokens: Tensor) -> Tensor | None:
                return self._logits(hidden, batch, tokens)

            count += len(batch.inputs.tokens)
            scored = hidden[count - len(batch.inputs.tokens) : count]
            sampled.inputs = input_logprobs(scored, batch.inputs, head, self.sampler, vocab_size)
        if (wanted := batch.hidden) is not None:
            inner = [wanted.taken[layer] for layer in wanted.inner]
            sampled.hidden = torch.stack([*inner, hidden[count:]], 1)
        return sampled

    def _adapt(self, batch: ForwardBatch, tokens: Tensor | None = None) -> None:
        """Let products find the adapters of the query ``tokens``, or of all."""
        if self._adapters is not None:
            slots = batch.adapters
            if slots is not None and tokens is not None:
                slots = slots.index_select(0, tokens)
            self._adapters.rows = None if slots is None else AdapterRows(slots)

    def _logits(self, hidden: Tensor, batch: ForwardBatch, tokens: Tensor) -> Tensor | None:
        """Return logits of the step's query ``tokens``, whose hidden states are given."""
        self._adapt(batch, tokens)
        return self.model.logits(hidden)

    def _sample_tokens(
        self, batch: ForwardBatch, hidden: Tensor
    ) -> tuple[SamplerOutput, Tensor | SharedLogits]:
        """Sample from [S, hidden] and set the slots' last tokens, as a graph captures it."""
        self._adapt(batch, batch.sample_tokens)
        logits = self.model.logits_to_sample(hidden)
        assert logits is not None, "a dummy run samples nothing"
        special = batch.sampling.special
        if special is None:
            sampled = self.sampler.sample(logits, batch.sampling)
        else:
            before = None if special.word_ends is None else batch.input_ids[batch.sample_tokens]
            sampled = self._special.sample(logits, batch.sampling, special, before)
        self._keep_tokens(batch, sampled)
        return sampled, logits


class _Arrays(NamedTuple):
    """Arrays in the memory of a :class:`SamplerOutput`."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    raw: np.ndarray | None
    sampled: np.ndarray | None


def _arrays_of(sampled: SamplerOutput) -> _Arrays:
    raw, kept = (
        None if each is None else each.numpy() for each in (sampled.raw_logprobs, sampled.sampled_logprobs)
    )
    return _Arrays(sampled.token_ids.numpy(), sampled.logprobs.numpy(), raw, kept)


def _host_output(sampled: SamplerOutput, arrays: _Arrays) -> HostOutput:
    """Return copies of ``arrays``: the next step may overwrite them."""
    return HostOutput(
        token_ids=arrays.token_ids.astype(np.int32),
        logprobs=arrays.logprobs.copy(),
        raw_logprobs=None if arrays.raw is None else arrays.raw.copy(),
        sampled_logprobs=None if arrays.sampled is None else arrays.sampled.copy(),
        further=sampled.further,
        inputs=sampled.inputs,
        hidden=sampled.hidden,
    )
