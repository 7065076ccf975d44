"""Decode steps as captured graphs: two launches instead of some hundred.

Invariants:
- Each size has two graphs: the hidden states of a decode-only step from its slots' last tokens, and head and
  sampler, which set them. Prefill and mixed steps run eagerly, and so do head and sampler of special rows
  and, without Triton, of filters and raw logprobs.
- The second graph computes all that the sampler can tell of a row, wanted or not.
- Weights and KV are read where they were at capture. Weights are updated in place; when a release moves them,
  graphs are dropped (:meth:`DecodeGraphs.drop`) and captured before the next step.
- Inputs are read where ``staging.py`` puts those of a step of its size, and what attention's ``plan`` writes,
  outside of the graph, in buffers that never move.
- Steps are padded to the next size of a ladder with rows on the scratch page, for a slot without a request.
- Slots of adapters are an input like others; if the engine serves adapters, a graph has the factors of all.
- Whatever a graph reads and has not allocated itself lives as long as the graph.
- Workspaces that grow have grown before anything is captured: the largest possible step runs first.
- What cannot be captured (it waits for the device, or memory is out) runs eagerly, with a warning; so does
  head and sampler alone. Tested with recorded operations, not run on a GPU.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..memory.device_memory import DeviceMemoryReading
from ..memory.device_module import GraphModule
from .forward import AttentionBackend, CapturableBackend, ForwardBatch, StepLimits
from .sampler import Sampler, SamplerOutput
from .scratch_steps import scratch_decode, scratch_prefill
from .staging import InputStaging

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch, AttentionBackend], Tensor]

Head = Callable[[ForwardBatch, Tensor], tuple[SamplerOutput, Tensor]]
"""Samples from the hidden states; returns the logits, too."""

_Result = TypeVar("_Result")


def ladder(largest: int) -> list[int]:
    """Return sizes to capture: 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 64 up to ``largest``.

    At most an eighth of the rows of a step above 64 are padding.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    attention: AttentionBackend
    inputs: ForwardBatch
    """Inputs besides staging, weights and KV: the graph keeps their addresses, not them."""
    hidden: Tensor
    """[size, hidden]"""
    head: "_CapturedHead | None"
    """None if head and sampler cannot be captured."""


@dataclass(frozen=True, slots=True)
class _CapturedHead:
    graph: torch.cuda.CUDAGraph
    sampled: SamplerOutput
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model, by batch size; everything here runs on the forward stream or enters it."""

    def __init__(
        self,
        forward: Forward,
        head: Head,
        sampler: Sampler,
        backend: CapturableBackend,
        staging: InputStaging,
        *,
        limits: StepLimits,
        device: torch.device,
        device_module: GraphModule,
        on_stream: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """``sampler`` is the one that ``head`` uses; ``on_stream`` enters the forward stream."""
        self._forward, self._head, self._sampler = forward, head, sampler
        self.backend = backend
        self._staging = staging
        self._limits = limits
        self._device = device
        self._module = device_module
        self._on_stream = on_stream
        self.captured: dict[int, _Captured] = {}
        self._failed = self._head_failed = False
        self.sizes = ladder(limits.rows)
        self.nbytes = 0
        """Bytes that the last capture has taken from the device."""

    @property
    def are_captured(self) -> bool:
        return bool(self.captured)

    def serves(self, batch: ForwardBatch) -> bool:
        """Return True if :meth:`replay` can compute this step."""
        decodes = batch.num_decode == batch.num_rows == len(batch.sample_tokens)
        return self.are_captured and decodes and batch.hidden is None

    def replay(self, batch: ForwardBatch) -> tuple[ForwardBatch, Tensor]:
        """Launch a decode-only step; return it, padded, and [S, hidden], valid until the next step."""
        rows = batch.num_rows
        size, captured = self._for(rows)
        with self._staging.staged(batch, size, table=captured.attention.reads_page_table) as staged:
            captured.attention.plan(staged)
        captured.graph.replay()
        return staged, captured.hidden[:rows]

    def samples(self, batch: ForwardBatch) -> bool:
        """Return True if :meth:`sample` can follow :meth:`replay`; else head and sampler run eagerly."""
        return self._for(batch.num_rows)[1].head is not None and self._sampler.graph_serves(batch.sampling)

    def sample(self, batch: ForwardBatch) -> SamplerOutput:
        """Launch head and sampler of the step just replayed; the results are valid until the next step."""
        head = self._for(batch.num_rows)[1].head
        assert head is not None, "not captured"
        head.graph.replay()
        wanted, found, rows = batch.sampling, head.sampled, slice(batch.num_rows)
        raw = found.raw_logprobs if wanted.want_raw else None
        sampled = found.sampled_logprobs if wanted.want_sampled else None
        return SamplerOutput(
            token_ids=found.token_ids[rows],
            logprobs=found.logprobs[rows],
            raw_logprobs=None if raw is None else raw[rows],
            sampled_logprobs=None if sampled is None else sampled[rows],
        )

    def _for(self, rows: int) -> tuple[int, _Captured]:
        size = self.sizes[bisect_left(self.sizes, rows)]
        return size, self.captured[size]

    def drop(self) -> None:
        """Give the graphs and their memory back to the allocator. The device is idle."""
        self.captured.clear()

    def capture(self) -> Iterator[None]:
        """Capture the ladder, largest first, to share memory; yield between sizes (no step may launch)."""
        if self.captured or self._failed:
            return
        self._module.synchronize()
        before = DeviceMemoryReading.of(self._module).reserved
        try:
            with torch.inference_mode(), self._on_stream():
                self._run_largest()
            pool = self._module.graph_pool_handle()
            for size in reversed(self.sizes):
                with torch.inference_mode(), self._on_stream():
                    self.captured[size] = self._capture(size, pool)
                yield
        # Compilers of kernels raise other errors than RuntimeError, and eager steps serve instead.
        except Exception as error:  # noqa: BLE001
            self.drop()
            # Out of memory may pass; what cannot be captured never can.
            self._failed = not isinstance(error, torch.OutOfMemoryError)
            logger.warning("decode steps are launched kernel by kernel: capturing them failed: %s", error)
            return
        self._module.synchronize()
        self.nbytes = DeviceMemoryReading.of(self._module).reserved - before
        logger.info(
            "captured decode steps of %d sizes up to %d in %.1f MiB",
            len(self.sizes), self.sizes[-1], self.nbytes / 2**20,
        )  # fmt: skip

    def _run_largest(self) -> None:
        """Run the largest possible prefill: workspaces reach their size, libraries choose kernels."""
        context, tokens = self._limits.context_len, self._limits.tokens
        lengths = [context] * (tokens // context) + ([tokens % context] if tokens % context else [])
        with self._staging.staged(scratch_prefill(lengths)) as staged:
            self.backend.plan(staged)
        self._forward(staged, self.backend)

    def _capture(self, size: int, pool: object) -> _Captured:
        attention = self.backend.for_decode(size)
        with self._staging.staged(scratch_decode(size, self._limits.spare_slot), size) as staged:
            attention.plan(staged)
        static = replace(
            staged,
            sample_tokens=torch.arange(size, device=self._device),
            # Read on the host, if at all, to size what depends on the longest row; captured once, it must
            # hold for all.
            kv_lens_host=[self._limits.context_len] * size,
            sampling=self._sampler.for_graph(staged.sampling),
        )
        graph, hidden = self._recorded(lambda: self._forward(static, attention), pool)
        return _Captured(graph, attention, static, hidden, self._capture_head(static, hidden, pool))

    def _capture_head(self, static: ForwardBatch, hidden: Tensor, pool: object) -> _CapturedHead | None:
        if self._head_failed:
            return None
        try:
            graph, (sampled, logits) = self._recorded(lambda: self._head(static, hidden), pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  as in `capture`
            self._head_failed = True
            logger.warning(
                "output head and sampler are launched kernel by kernel: capturing failed: %s", error
            )
            return None
        return _CapturedHead(graph, sampled, logits)

    def _recorded(self, work: Callable[[], _Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """Return a graph of ``work``, and where its replays leave the result."""
        work()  # libraries choose kernels and allocate before anything is recorded
        graph = self._module.CUDAGraph()
        # Other threads (receivers of weights) may use the device meanwhile: only this one must not wait for
        # it.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        except Exception:
            with suppress(RuntimeError):  # says only that the capture has failed; the error at hand says why
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, result
