"""A traced decoder computing steps.

Invariants:
- What a step computes with is chosen by its backend: all layers in one call where it is planned for that,
  products as they are where it rotates and stores them, else what the modules do.
- All ways read the same parameters, and stop before the same layers.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels import elementwise_for
from ...kernels.attention_form import AttentionForm
from ...tracing.passes import compiled, tidy, write_in_place
from ...tracing.tracer import NotTraceableError, Trace
from .fused_decoder import fused_decoder
from .fusion import RopeTable, Sizes, fuse_attention, fuse_gates
from .norms import proven_norms
from .probe import Probe
from .products import Given, Head
from .tracing import trace_decoder, trace_head

logger = logging.getLogger(__name__)


class _Program:
    """One trace as functions, compiled when they are first called."""

    def __init__(self, trace: Trace, tables: Sequence[RopeTable]) -> None:
        self.trace, self._tables = trace, tables

    def arguments(self, batch: ForwardBatch, backend: AttentionBackend) -> list[Any]:
        positions, tables = batch.positions, self._tables
        longest = max(batch.kv_lens_host) if tables else 0
        found = [each for table in tables for each in table.rows(positions, longest)]
        return [batch.input_ids, positions, backend, *found, batch.input_ids.shape[0]]

    @cached_property
    def run(self) -> Callable[..., Tensor]:
        return self._compiled(stops=False)

    @cached_property
    def run_by_layer(self) -> Callable[..., Generator[int, None, Tensor]]:
        return self._compiled(stops=True)

    def _compiled(self, *, stops: bool) -> Callable[..., Any]:
        inputs = [*self.trace.inputs, *(each for table in self._tables for each in table.inputs)]
        return compiled(self.trace.calls, inputs, [self.trace.out], stops=stops)


class TracedDecoder:
    def __init__(self, trace: Trace, sizes: Sizes, dtype: torch.dtype, *, kernels: bool) -> None:
        """``kernels``: compiled ones serve the model's dtype."""
        tidy(trace)
        if kernels:
            fuse_gates(trace, dtype)
        self.plain = _Program(trace, ())
        self.fused: _Program | None = None
        """Program whose attention takes products as they are, or None."""
        self.in_one_call = None
        if kernels:
            fused = Trace(trace.inputs, [replace(call) for call in trace.calls], trace.out)
            tables = fuse_attention(fused, sizes, dtype)
            if tables:
                self.fused = _Program(fused, tables)
                self.in_one_call = fused_decoder(fused, sizes)

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        if self.in_one_call is not None and backend.paged is not None:
            return self.in_one_call.sampled(batch, backend)
        program = self._serving(backend)
        return program.run(*program.arguments(batch, backend)).index_select(0, batch.sample_tokens)

    def by_layer(self, batch: ForwardBatch, backend: AttentionBackend) -> Generator[int, None, Tensor]:
        program = self._serving(backend)
        hidden = yield from program.run_by_layer(*program.arguments(batch, backend))
        return hidden.index_select(0, batch.sample_tokens)

    def _serving(self, backend: AttentionBackend) -> _Program:
        return self.plain if self.fused is None or backend.fused is None else self.fused


def traced_decoder(
    module: PreTrainedModel,
    decoder: nn.Module,
    probe: Probe,
    forms: list[AttentionForm],
    dtype: torch.dtype,
    device: torch.device,
) -> TracedDecoder | None:
    """Return ``decoder``, a part of ``module`` with its parameters in place, traced; None if it cannot be."""
    if device.type != "cpu":
        return None  # graphs record there
    first = probe.attended[0]
    sizes = Sizes(first.num_heads, first.num_kv_heads, max(first.key_size, first.value_size))
    kernels = elementwise_for(device, dtype)
    norms = {} if kernels is None else proven_norms(decoder, dtype, device, kernels)
    try:
        trace = trace_decoder(module, decoder, probe, norms, forms, sizes.head_size, device)
    except NotTraceableError as error:
        logger.info("%s is computed by its modules: %s", type(module).__name__, error)
        return None
    return TracedDecoder(trace, sizes, dtype, kernels=kernels is not None)


def traced_head(
    headed: Any, given: Given, head: Head | None, dtype: torch.dtype, device: torch.device, hidden_size: int
) -> Callable[..., Tensor] | None:
    """Return a function of hidden states, memory for logits, and S that returns logits, maybe elsewhere.

    None if the head cannot be traced.
    """
    if device.type != "cpu" or head is None:
        return None
    try:
        trace = trace_head(headed, given, head, dtype, hidden_size)
    except NotTraceableError as error:
        logger.info("logits of %s are computed by its module: %s", type(headed).__name__, error)
        return None
    tidy(trace)
    for call in trace.calls:
        if call.kind == "head":
            write_in_place(trace, call.outs[0])
    return compiled(trace.calls, trace.inputs, [trace.out])
