"""Hidden states of requests that want some: which of a step's tokens have them, and what is kept.

Invariant: a position is recorded once, in order; what computes it again is not looked at.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ...io_struct import GenerateReqInput, HiddenStates
from ..execution.forward import HiddenTokens

if TYPE_CHECKING:
    from .request import RequestTable

LAST = -1
"""Number of the output of the final norm, in place of a layer's number."""
_NAMES: dict[torch.dtype, Literal["BF16", "F16", "F32"]] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


class HiddenRecord:
    def __init__(self, layers: list[int], start: int) -> None:
        self.layers = layers
        """Layers whose inputs are wanted, and LAST."""
        self.start = start
        self.known = 0
        """Rows that are recorded."""
        self._parts: list[Tensor] = []

    @staticmethod
    def of(message: GenerateReqInput, num_layers: int) -> "HiddenRecord | None":
        if not message.return_hidden_states:
            return None
        wanted = [-1] if message.hidden_states_layers is None else message.hidden_states_layers
        layers = [layer % (num_layers + 1) for layer in wanted]
        layers = [LAST if layer == num_layers else layer for layer in layers]
        return HiddenRecord(layers, message.hidden_states_start_len)

    @property
    def first_uncached(self) -> int:
        return self.start + self.known

    def put(self, first: int, rows: Tensor) -> None:
        """Record [rows, layers, hidden] of the positions from ``first`` on, unless they are known."""
        rows = rows[self.first_uncached - first :]
        self._parts.append(rows)
        self.known += len(rows)

    def forget(self) -> None:
        self.known, self._parts = 0, []

    def wire(self, prompt_tokens: int, outputs: int) -> HiddenStates | None:
        """Return the rows of a sample with this many ``outputs``; None if it has no rows."""
        if not outputs or not self.known:
            return None
        count = prompt_tokens + outputs - 1 - self.start
        assert count <= self.known, f"{self.known} rows of hidden states, {count} positions"
        rows = torch.cat(self._parts)[:count]
        return HiddenStates(
            data=rows.contiguous().view(torch.uint8).numpy().tobytes(),
            shape=list(rows.shape),
            dtype=_NAMES[rows.dtype],
            start=self.start,
        )


@dataclass(frozen=True, slots=True)
class HiddenSpan:
    slot: int
    record: HiddenRecord
    first: int
    count: int


def hidden_spans(
    table: "RequestTable", slots: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> list[HiddenSpan]:
    spans = []
    for row in np.flatnonzero(table.wants_hidden[slots]):
        slot = int(slots[row])
        request = table.by_slot[slot]
        assert request is not None and request.hidden is not None
        first, end = max(int(starts[row]), request.hidden.first_uncached), int(ends[row])
        if first < end:
            spans.append(HiddenSpan(slot, request.hidden, first, end - first))
    return spans


def hidden_tokens(spans: list[HiddenSpan], slots: np.ndarray, offsets: np.ndarray) -> HiddenTokens | None:
    """Return the runner's inputs; ``offsets`` [R] are query tokens' indices minus positions."""
    if not spans:
        return None
    offset_of = dict(zip(slots.tolist(), offsets.tolist(), strict=True))
    tokens = [np.arange(span.first, span.first + span.count) + offset_of[span.slot] for span in spans]
    inner = sorted({layer for span in spans for layer in span.record.layers if layer >= 0})
    return HiddenTokens(tokens=torch.from_numpy(np.concatenate(tokens)), inner=inner)


def record_hidden(spans: list[HiddenSpan], rows: Tensor) -> None:
    """Record [H, layers, hidden] of a step whose inputs were :func:`hidden_tokens`."""
    columns = [*sorted({layer for span in spans for layer in span.record.layers if layer >= 0}), LAST]
    offset = 0
    for span in spans:
        places = [columns.index(layer) for layer in span.record.layers]
        span.record.put(span.first, rows[offset : offset + span.count, places])
        offset += span.count
