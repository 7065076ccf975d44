"""A recorded decoder computing steps.

Invariants:
- What a step computes with is chosen by its backend: all layers in one call where it is planned for that, products as they
  are where it rotates and stores them, else what the modules do.
- All ways read the same parameters, and stop before the same layers.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels.attention_form import AttentionForm
from ...kernels.dispatch import elementwise_for
from .fusion import Rotations, Sizes, fuse_attention, fuse_gates
from .norms import proven_norms
from .probe import Probe
from .products import Given, Head
from .program import compiled, makers_of, slice_of, tidy, write_in_place
from .recorded import record, record_head
from .recording import NotRecordableError, Recording
from .whole import Whole, whole

logger = logging.getLogger(__name__)


class _Replay:
    """One recording as functions, made when they are first called."""

    def __init__(self, recording: Recording, rotations: Rotations) -> None:
        self._recording, self._rotations = recording, rotations

    def hidden(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Hidden states of all tokens, [T, hidden]."""
        found: Tensor = self._run(*self._arguments(batch, backend))
        return found

    def by_layer(self, batch: ForwardBatch, backend: AttentionBackend) -> Generator[int, None, Tensor]:
        """The same, stopping before each layer."""
        found: Tensor = yield from self._stopping(*self._arguments(batch, backend))
        return found

    def _arguments(self, batch: ForwardBatch, backend: AttentionBackend) -> list[Any]:
        positions, angles = batch.positions, self._rotations.angles
        longest = max(batch.kv_lens_host) if angles else 0
        found = [each for angle in angles for each in angle.of(positions, longest)]
        return [batch.input_ids, positions, backend, *found, batch.input_ids.shape[0]]

    @cached_property
    def _run(self) -> Callable[..., Any]:
        return self._compiled(stops=False)

    @cached_property
    def _stopping(self) -> Callable[..., Any]:
        return self._compiled(stops=True)

    def _compiled(self, *, stops: bool) -> Callable[..., Any]:
        recording = self._recording
        inputs = [*recording.inputs, *(each for pair in self._rotations.inputs for each in pair)]
        return compiled(recording.calls, inputs, [recording.out], stops=stops)


class _InOneCall:
    """All layers by one kernel."""

    def __init__(self, recording: Recording, found: Whole) -> None:
        ids, positions, _ = recording.inputs
        calls, _ = slice_of(makers_of(recording), [found.embedded], {ids, positions})
        self._embed = compiled(calls, [ids, positions], [found.embedded])
        self._kernel = found.kernel
        self._angles = [each.angles for each in found.attention]
        self._hidden = found.embedded.shape[-1]

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Hidden states of the sampled tokens, [S, hidden], valid until the next call."""
        assert backend.paged is not None
        longest, tokens = max(batch.kv_lens_host), batch.input_ids.shape[0]
        tables = {id(each): each.table(longest) for each in self._angles}
        embedded = self._embed(batch.input_ids, batch.positions, tokens).view(tokens, self._hidden)
        angles = [tables[id(each)] for each in self._angles]
        return self._kernel(embedded, angles, batch.positions, batch.sample_tokens, backend.paged)


class RecordedDecoder:
    """A decoder's calls, and the kernels that take the place of some."""

    def __init__(self, recording: Recording, sizes: Sizes, dtype: torch.dtype, *, kernels: bool) -> None:
        """``kernels``: compiled ones serve the model's dtype."""
        tidy(recording)
        if kernels:
            fuse_gates(recording, dtype)
        self._plain = _Replay(recording, Rotations())
        self._fused: _Replay | None = None
        self._in_one_call: _InOneCall | None = None
        if kernels:
            fused = Recording(recording.inputs, [replace(call) for call in recording.calls], recording.out)
            rotations = fuse_attention(fused, sizes, dtype)
            if rotations.angles:
                self._fused = _Replay(fused, rotations)
                found = whole(fused, sizes)
                self._in_one_call = None if found is None else _InOneCall(fused, found)

    @property
    def in_one_call(self) -> bool:
        """A compiled kernel computes all layers at once, where the step's attention is compiled, too."""
        return self._in_one_call is not None

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Hidden states of the sampled tokens, [S, hidden], valid until the next call."""
        if self._in_one_call is not None and backend.paged is not None:
            return self._in_one_call.sampled(batch, backend)
        return self._serving(backend).hidden(batch, backend).index_select(0, batch.sample_tokens)

    def by_layer(self, batch: ForwardBatch, backend: AttentionBackend) -> Generator[int, None, Tensor]:
        """:meth:`sampled`, stopping before each layer."""
        hidden = yield from self._serving(backend).by_layer(batch, backend)
        return hidden.index_select(0, batch.sample_tokens)

    def _serving(self, backend: AttentionBackend) -> _Replay:
        return self._plain if self._fused is None or backend.fused is None else self._fused


def recorded(
    module: PreTrainedModel,
    decoder: nn.Module,
    probe: Probe,
    forms: list[AttentionForm],
    dtype: torch.dtype,
    device: torch.device,
) -> RecordedDecoder | None:
    """``decoder``, a part of ``module`` with its parameters in their places, as a list of calls. None: as none."""
    if device.type != "cpu":
        return None  # graphs record there
    first = probe.attended[0]
    sizes = Sizes(first.num_heads, first.num_kv_heads, max(first.key_size, first.value_size))
    kernels = elementwise_for(device, dtype)
    norms = {} if kernels is None else proven_norms(decoder, dtype, device, kernels)
    try:
        found = record(module, decoder, probe, norms, forms, sizes.head_size, device)
    except NotRecordableError as error:
        logger.info("%s is computed by its modules: %s", type(module).__name__, error)
        return None
    return RecordedDecoder(found, sizes, dtype, kernels=kernels is not None)


def recorded_head(
    headed: Any, given: Given, head: Head | None, dtype: torch.dtype, device: torch.device, hidden_size: int
) -> Callable[..., Tensor] | None:
    """What makes logits [S, vocab] of hidden states [S, hidden], memory for them, and S; what it returns may be other memory.

    None: it is not recorded.
    """
    if device.type != "cpu" or head is None:
        return None
    try:
        found = record_head(headed, given, head, dtype, hidden_size)
    except NotRecordableError as error:
        logger.info("logits of %s are computed by its module: %s", type(headed).__name__, error)
        return None
    tidy(found)
    for call in found.calls:
        if call.kind == "head":
            write_in_place(found, call.outs[0])
    return compiled(found.calls, found.inputs, [found.out])
