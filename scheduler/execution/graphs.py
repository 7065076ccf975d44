"""Decode steps as captured graphs: two launches instead of some hundred.

Invariants:
- Each size has two graphs: the hidden states of a decode-only step from its slots' last tokens, and head and
  sampler, which set them. Prefill and mixed steps run eagerly, and so do head and sampler of special rows
  and, without Triton, of filters and raw logprobs.
- The second graph computes all that the sampler can tell of a row, wanted or not.
- Weights and KV are read where they were at capture. Weights are updated in place; after a release,
  :meth:`DecodeGraphs.capture` keeps the graphs if everything lies where it did, and else captures anew.
- A step is padded to less than twice its rows. Sizes at such distances are captured first, largest first, the
  rest while the device has room; steps that no captured size fits run eagerly.
- All ranks have graphs of the same sizes: they agree before each, since captures call collectives.
- Inputs are read where ``staging.py`` puts those of a step of its size, and what attention's ``plan`` writes,
  outside of the graph, in buffers that never move.
- Steps are padded with rows on the scratch page, for a slot without a request.
- Slots of adapters are an input like others; if the engine serves adapters, a graph has the factors of all.
- Whatever a graph reads and has not allocated itself lives as long as the graph.
- Workspaces that grow have grown before anything is captured: the largest possible step runs first.
- What cannot be captured (it waits for the device, or memory is out) runs eagerly, with a warning; so does
  head and sampler alone. Tested with recorded operations, not run on a GPU.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..layers.logits_processor import SharedLogits
from ..memory.device_memory import DeviceMemoryReading
from ..memory.device_module import GraphModule, free_and_total
from ..parallel.group import TensorParallel
from .forward import AttentionBackend, CapturableBackend, ForwardBatch, StepLimits
from .sampler import Sampler, SamplerOutput
from .scratch_steps import scratch_decode, scratch_prefill
from .staging import InputStaging

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch, AttentionBackend], Tensor]

Head = Callable[[ForwardBatch, Tensor], tuple[SamplerOutput, Tensor | SharedLogits]]
"""Samples from the hidden states; returns the logits, too."""

_KEPT_FREE = 64 << 20
"""Bytes of the device that captures leave to libraries and the driver."""

_Result = TypeVar("_Result")


def ladder(largest: int) -> list[int]:
    """Return sizes to capture: 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 64 up to ``largest``.

    At most an eighth of the rows of a step above 64 are padding.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """Return ``sizes`` in the order of capture: down from the largest at most by half each, then the rest.

    Large ones come first, so that later ones find their temporaries' memory.
    """
    coarse = [sizes[-1]]
    while coarse[-1] > sizes[0]:
        coarse.append(min(size for size in sizes if 2 * size >= coarse[-1]))
    return coarse + sorted(set(sizes) - set(coarse), reverse=True)


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
    logits: Tensor | SharedLogits


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
        largest: int,
        device: torch.device,
        device_module: GraphModule,
        on_stream: Callable[[], AbstractContextManager[Any]],
        parallel: TensorParallel,
        addresses: Callable[[], tuple[int, ...]],
    ) -> None:
        """``sampler`` is the one that ``head`` uses; ``on_stream`` enters the forward stream.

        ``largest`` is the most rows of a captured step; ``addresses`` as in ``LoadedModel``.
        """
        self._forward, self._head, self._sampler = forward, head, sampler
        self.backend = backend
        self._staging = staging
        self._limits = limits
        self._device = device
        self._module = device_module
        self._on_stream = on_stream
        self._parallel = parallel
        self._addresses = addresses
        self._captured_at: tuple[int, ...] = ()
        """``addresses`` when the graphs were captured."""
        self.captured: dict[int, _Captured] = {}
        self._failed = self._head_failed = False
        self.sizes = ladder(largest)
        self.nbytes = 0
        """Bytes that the last capture has taken from the device."""

    @property
    def are_captured(self) -> bool:
        return bool(self.captured)

    def serves(self, batch: ForwardBatch) -> bool:
        """Return True if :meth:`replay` can compute this step."""
        decodes = batch.num_decode == batch.num_rows == len(batch.sample_tokens)
        return decodes and batch.hidden is None and self._size_for(batch.num_rows) is not None

    def replay(self, batch: ForwardBatch) -> tuple[ForwardBatch, Tensor]:
        """Launch a decode-only step; return it, padded, and [S, hidden], valid until the next step."""
        rows = batch.num_rows
        size = self._size_for(rows)
        assert size is not None, "not captured"
        captured = self.captured[size]
        with self._staging.staged(batch, size, table=captured.attention.reads_page_table) as staged:
            captured.attention.plan(staged)
        captured.graph.replay()
        return staged, captured.hidden[:rows]

    def samples(self, batch: ForwardBatch) -> bool:
        """Return True if :meth:`sample` can follow :meth:`replay`; else head and sampler run eagerly."""
        return self._head_for(batch.num_rows) is not None and self._sampler.graph_serves(batch.sampling)

    def sample(self, batch: ForwardBatch) -> SamplerOutput:
        """Launch head and sampler of the step just replayed; the results are valid until the next step."""
        head = self._head_for(batch.num_rows)
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

    def _size_for(self, rows: int) -> int | None:
        larger = self.sizes[bisect_left(self.sizes, rows) :]
        size = next((size for size in larger if size in self.captured), None)
        return size if size is not None and size < 2 * rows else None

    def _head_for(self, rows: int) -> "_CapturedHead | None":
        size = self._size_for(rows)
        return None if size is None else self.captured[size].head

    def drop(self) -> None:
        """Give the graphs and their memory back to the allocator. The device is idle."""
        self.captured.clear()

    def capture(self) -> Iterator[None]:
        """Capture what is not captured where memory lies now; yield between sizes (no step may launch).

        All ranks call this at the same time.
        """
        addresses = self._addresses()
        if self._agree(self.are_captured and self._captured_at == addresses):
            return
        self.drop()
        if not self._agree(not self._failed):
            return
        self._module.synchronize()
        before = DeviceMemoryReading.of(self._module).reserved
        failure: Exception | None = None
        pool, rest, needed = None, coarse_first(self.sizes), 0.0
        while self._agree(failure is None and bool(rest) and self._free() >= needed):
            size, free = rest.pop(0), self._free()
            try:
                with torch.inference_mode(), self._on_stream():
                    if pool is None:
                        self._run_largest()
                        pool = self._module.graph_pool_handle()
                    self.captured[size] = self._capture(size, pool)
            # Compilers of kernels raise other errors than RuntimeError, and eager steps serve instead.
            except Exception as error:  # noqa: BLE001
                failure = error
                continue
            # The first has grown what all share; its successors take less and less.
            needed = _KEPT_FREE + (0 if len(self.captured) == 1 else max(0, free - self._free()))
            yield
        self._captured_at = addresses
        if not self._agree(failure is None):
            self.drop()
            # Out of memory may pass; what cannot be captured never can.
            self._failed = failure is not None and not isinstance(failure, torch.OutOfMemoryError)
            logger.warning(
                "decode steps are launched kernel by kernel: capturing them failed: %s",
                failure or "on another rank",
            )
            return
        self._module.synchronize()
        self.nbytes = DeviceMemoryReading.of(self._module).reserved - before
        if rest:
            logger.warning(
                "%d of %d sizes of decode steps are not captured: the device's memory is short",
                len(rest), len(self.sizes),
            )  # fmt: skip
        logger.info(
            "captured decode steps of %d sizes up to %d in %.1f MiB",
            len(self.captured), self.sizes[-1], self.nbytes / 2**20,
        )  # fmt: skip

    def _free(self) -> float:
        """Return the bytes that the device has left; infinite where it does not tell."""
        known = free_and_total(self._module)
        return inf if known is None else known[0]

    def _agree(self, here: bool) -> bool:
        """Return True if ``here`` is True on every rank."""
        if self._parallel.size == 1:
            return here
        with self._on_stream():
            refusals = torch.full((1,), float(not here), device=self._device)
            self._parallel.all_reduce(refusals)
            return refusals.item() == 0

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
