"""The gated delta rule over states of sequences by torch: linear attention that runs everywhere.

``kernels/delta.py`` serves on the CPU. Yang, Kautz, Hatamizadeh, 2025 (arXiv:2412.06464). Each value head
stores values under keys in a matrix S [key, value]. A token lets all of it decay, then stores the part of its
value that S does not return for its key already:

    S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)' k_t))'        o_t = S_t' q_t

Prefill computes chunks of :data:`CHUNK` tokens. Within a chunk, with c_t = a_1 ... a_t, the stored values
(u_t = b_t (v_t - a_t S_(t-1)' k_t), the rows of U) solve a triangular system:

    u_t + b_t sum_(j<t) (c_t / c_j) (k_t' k_j) u_j = b_t (v_t - c_t S_0' k_t)

Invariants:
- A row's state is read and written once per step and layer; rows of a step never read each other's.
- The state is float32, and so are all results from it.
- A sequence begins from zeros, not from zero times old contents.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.pool import StatePool, StateShape
from ..execution.forward import AttentionBackend, ForwardBatch, StateSegment, StateStep
from ..kernels.attention_form import PLAIN, AttentionForm
from ..kernels.delta import NO_STATE, PlannedStates, Segments

CHUNK = 64
"""Tokens that prefill computes at a time: systems grow with its square, steps fall with it."""
_NORM_EPS = 1e-6
"""Epsilon of the norm of queries and keys."""


class HybridBackend(AttentionBackend):
    """Attention backend for models in which some layers have states (:meth:`delta`) instead of KV."""

    def __init__(self, attention: AttentionBackend, pool: StatePool) -> None:
        self.fused = attention.fused
        self.reads_page_table = attention.reads_page_table
        self._attention, self.pool = attention, pool
        self._step: StateStep | None = None
        self._segments: Segments | None = None
        self._decode = 0

    def plan(self, batch: ForwardBatch) -> None:
        self._attention.plan(batch)
        self._decode = batch.num_decode
        if batch.states is not self._step:
            self._step, self._segments = batch.states, None
        if self._step is None:  # a warm-up: rows of nobody
            rows = torch.zeros(batch.num_rows, dtype=torch.int64, device=batch.input_ids.device)
            self._step = StateStep(rows=rows, sources=None, segments=(), kept=None)
        if (paged := self._attention.paged) is not None:
            if self._segments is None:
                self._segments = segments_of(self._step, self._decode)
            paged.states = PlannedStates(self._segments, self.pool.layer)
            self.paged = paged

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        return self._attention.forward(q, k, v, layer, form)

    def compiled(self, layer: int, kernel: Callable[[Segments, Tensor, Tensor], None]) -> None:
        """Run ``kernel`` over all of the step's tokens, in the pool's states of layer number ``layer``."""
        if self._segments is None:
            self._segments = segments_of(self._planned(), self._decode)
        kernel(self._segments, *self.pool.layer(layer))

    def delta(self, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, layer: int) -> Tensor:
        """Compute convolution and delta rule of one layer, from each row's state to its next.

        Args:
            mixed: [T, channels]: queries, keys, values, as they go into the convolution, of the result's
                dtype.
            weight: [channels, kernel], a filter per channel, oldest position first.
            decay: float32 [T, value heads]: logarithms of a_t, at most 0; ``beta``, alike: b_t.
            layer: its number among those with states.
        """
        step, shape = self._planned(), self.pool.shape
        past, recurrent = self.pool.layer(layer)
        out = mixed.new_empty((mixed.shape[0], shape.value_heads, shape.value_size))
        decode = self._decode
        if decode:
            rows = step.rows[:decode]
            sources = rows if step.sources is None else step.sources
            inputs = torch.cat((past[sources], mixed[:decode].unsqueeze(1)), dim=1)
            past_after = inputs[:, 1:]
            convolved = _activated((inputs.float() * weight.t().float()).sum(dim=1), mixed.dtype)
            q, k, v = split_heads(convolved, shape)
            states = recurrent[sources]
            out[:decode] = decode_step(states, q, k, v, decay[:decode], beta[:decode].float())
            past[rows], recurrent[rows] = past_after, states
            if step.kept is not None:
                index, targets = step.kept
                past[targets], recurrent[targets] = past_after[index], states[index]
        for segment in step.segments:
            here = slice(segment.start, segment.end)
            out[here] = self._prefill(segment, mixed[here], weight, decay[here], beta[here], past, recurrent)
        return out

    def _planned(self) -> StateStep:
        assert self._step is not None, "a step is planned before its layers are computed"
        return self._step

    def _prefill(
        self,
        segment: StateSegment,
        mixed: Tensor,
        weight: Tensor,
        decay: Tensor,
        beta: Tensor,
        past: Tensor,
        recurrent: Tensor,
    ) -> Tensor:
        count, shape = mixed.shape[0], self.pool.shape
        if segment.source is None:
            before = mixed.new_zeros(shape.past)
            state = recurrent.new_zeros(shape.recurrent)
        else:
            before, state = past[segment.source], recurrent[segment.source]
        inputs = torch.cat((before, mixed))
        # One filter per channel, as a sum of shifted products: torch's convolutions choose their sums by
        # size.
        summed = torch.zeros((count, shape.channels), dtype=torch.float32, device=mixed.device)
        for tap in range(shape.kernel):
            summed.addcmul_(inputs[tap : tap + count].float(), weight[:, tap].float())
        q, k, v = split_heads(_activated(summed, mixed.dtype), shape)
        results, state = prefill(state, q, k, v, decay, beta.float())
        for row in (segment.target,) if segment.kept is None else (segment.target, segment.kept):
            past[row], recurrent[row] = inputs[count:], state
        return results


def segments_of(step: StateStep, num_decode: int) -> Segments:
    """Return the kernel's table: ``num_decode`` sequences of one token, then those of the segments."""
    rows = step.rows[:num_decode]
    decode = torch.empty((num_decode, 5), dtype=torch.int64)
    decode[:, 0] = torch.arange(num_decode)
    decode[:, 1] = 1
    decode[:, 2] = rows if step.sources is None else step.sources
    decode[:, 3] = rows
    decode[:, 4] = NO_STATE
    if step.kept is not None:
        index, targets = step.kept
        decode[index, 4] = targets
    if not step.segments:
        return Segments(decode, torch.arange(num_decode + 1))
    prefill, starts, follows = [], list(range(num_decode)), None
    for number, (start, end, source, target, kept) in enumerate(step.segments, num_decode):
        if source is None or (source, start) != follows:
            starts.append(number)
        first = NO_STATE if source is None else source
        prefill.append((start, end - start, first, target, NO_STATE if kept is None else kept))
        follows = target, end
    table = torch.cat((decode, torch.tensor(prefill, dtype=torch.int64)))
    return Segments(table, torch.tensor([*starts, len(table)], dtype=torch.int64))


def _activated(convolved: Tensor, dtype: torch.dtype) -> Tensor:
    """Activate, rounded as a convolution in the model's dtype is, and then again."""
    return functional.silu(convolved.to(dtype))


def split_heads(convolved: Tensor, shape: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """Split [T, channels] into float32 unit queries (scaled), keys [T, value heads, key size] and values."""
    keys = shape.key_heads * shape.key_size
    q, k, v = convolved.float().split([keys, keys, shape.value_heads * shape.value_size], dim=-1)
    q, k = (each.view(-1, shape.key_heads, shape.key_size) for each in (q, k))
    group = shape.value_heads // shape.key_heads
    q, k = (
        (each * torch.rsqrt((each * each).sum(dim=-1, keepdim=True) + _NORM_EPS)).repeat_interleave(
            group, dim=1
        )
        for each in (q, k)
    )
    return q * shape.key_size**-0.5, k, v.view(-1, shape.value_heads, shape.value_size)


def decode_step(states: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute a token of R sequences, [R, heads, value size]; ``states`` [R, heads, key, value] change.

    Queries, keys and values are float32 [R, heads, size], here and below; decay and beta [R, heads].
    """
    states *= decay.exp()[..., None, None]
    known = torch.matmul(k.unsqueeze(-2), states).squeeze(-2)
    states += k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - known)).unsqueeze(-2)
    return torch.matmul(q.unsqueeze(-2), states).squeeze(-2)


def prefill(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute T tokens from ``state`` [heads, key, value], left as it is; return results and next state."""
    out = []
    for start in range(0, q.shape[0], CHUNK):
        chunk = (each[start : start + CHUNK].transpose(0, 1) for each in (q, k, v, decay, beta))
        result, state = _chunk(state, *chunk)
        out.append(result.transpose(0, 1))
    return torch.cat(out), state


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute at most :data:`CHUNK` tokens, heads first in all tensors."""
    sums = decay.cumsum(dim=-1)
    since_start = sums.exp().unsqueeze(-1)
    # Below the diagonal at most 0; above it, it could overflow.
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
    keys = k.transpose(-1, -2)
    system = beta.unsqueeze(-1) * between * (k @ keys)
    wanted = beta.unsqueeze(-1) * (v - since_start * (k @ state))
    stored = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = since_start * (q @ state) + (between * (q @ keys)) @ stored
    to_end = (sums[..., -1:] - sums).exp().unsqueeze(-1)
    return out, since_start[..., -1:, :] * state + (to_end * k).transpose(-1, -2) @ stored
