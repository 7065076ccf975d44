"""A decoder in one call on the CPU, compiled (``cpu/decoder.cpp``), with embeddings and head or without.

Invariants:
- The bits are those of the same model computed operation by operation (``layers/``) with compiled kernels.
- Addresses are read at every step, or kept until something moves (``memory/moves.py``).
- Results lie in one grow-only workspace; a call overwrites those of the call before it.
- Each rank has its heads and its part of the width; the call includes the sums over them.
- ValueError is raised for whatever the kernel would misread.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..memory import moves
from ..memory.workspace import ALIGNMENT, Workspace
from ..runtime.engine_config import PAGE_SIZE
from . import native
from .attention import PagedStep
from .decoder_layers import AdapterForm, LayerAdapters, LayerKind, LayerShape, LayerTensors
from .linear import INT8, Scales, holds, narrow_row_bytes, numbers_address
from .native import INT, LAYER_POINTERS, POINTER, SIZE, DecoderStep, LayerForm, Sampling

if TYPE_CHECKING:
    from ..parallel.host_group import HostGroup

_DECODER = native.by_dtype("caesura_decoder", POINTER, POINTER, SIZE, POINTER, POINTER, INT, result=INT)
_counters = native.function("caesura_decoder_counters", POINTER, SIZE, INT, INT, SIZE, INT, result=SIZE)

_INT64, _FLOAT32 = 8, 4
_NO_ADAPTERS: list[int | None] = [None] * 11
"""Pointers of a layer without adapters."""
_OF_STEP = len(_NO_ADAPTERS) + 5
"""Pointers at the end of a layer's list: adapters, the experts' record, keys, values (or states), angles."""

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, each [P, 1, rotated / 2], contiguous."""


class AdapterGroups(NamedTuple):
    """A step's rows with adapters, sorted by slot; int64."""

    tokens: np.ndarray
    """[rows]: the token of each."""
    slots: np.ndarray
    """[groups]"""
    starts: np.ndarray
    """[groups + 1]: first row of each group, and the end of the last."""
    changed: Sequence[Sequence[bool]]
    """For each layer, True for each of its four products that one of the slots changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Weights of tokens, with which a call begins at their ids, and ends with those that it samples."""

    size: int
    embeddings: Tensor | None = None
    """[size, hidden], or packed."""
    packed: bool = False
    """True if embeddings are packed as the weight of a product (``linear.py``)."""
    head: Tensor | None = None
    """Packed [size, hidden]."""
    head_scales: Tensor | None = None

    def check(self, shape: LayerShape, dtype: torch.dtype) -> None:
        """Raise ValueError for whatever the kernel would misread."""
        table, head, lines = self.embeddings, self.head, self.head_scales
        fits = True
        if head is not None:
            scales = None if lines is None else Scales(lines, shape.scale_columns, shape.scaled)
            fits = holds(head, scales, 1, self.size, shape.hidden, dtype)
        if table is not None and self.packed:
            fits = fits and holds(table, None, 1, self.size, shape.hidden, dtype)
        elif table is not None:
            fits = fits and table.shape == (self.size, shape.hidden) and table.dtype == dtype
            fits = fits and table.is_contiguous()
        if not fits:
            told = f"no vocabulary of {self.size} tokens of {shape} in {dtype}"
            raise native.misfit(told, table, head, lines)

    def fill(self, to: DecoderStep, sampling: Sampling | None, count: int) -> None:
        to.sampling = None
        if sampling is None:
            return
        sizes = sampling.rows, sampling.vocabulary, sampling.stride
        if self.head is None or sizes != (count, self.size, self.size):
            raise ValueError(f"no head for {count} rows of {self.size} tokens: {sizes}")
        to.head, to.sampling = self.head.data_ptr(), ctypes.addressof(sampling)
        to.head_scales = None if self.head_scales is None else self.head_scales.data_ptr()


NO_VOCABULARY = Vocabulary(size=0)


class _Regions:
    """Places of a step's intermediate results in one piece of memory; attention and block share one."""

    def __init__(
        self,
        shape: LayerShape,
        kinds: Sequence[LayerKind],
        item: int,
        adapters: AdapterForm | None,
        *,
        embeds: bool,
    ) -> None:
        latent, heads, hidden = shape.latent, shape.heads, shape.hidden * item
        self.groups_row = 0
        self._common = {"update": (hidden, 0), "x": (hidden, 0)}
        if embeds:
            self._common["residual"] = hidden, 0
        if adapters is not None:
            inner = shape.heads * shape.head_size
            sizes = [kind.intermediate for kind in kinds]
            self._common |= {
                "adapter_x": (max(shape.hidden, inner, *sizes) * item, 0),
                "adapter_shrunk": (3 * adapters.rank * item, 0),
                "adapter_change": (max(shape.hidden, shape.qkv, *(2 * size for size in sizes)) * item, 0),
            }
        attended, qkv = heads * (shape.head_size if latent is None else latent.kv_lora_rank), shape.qkv
        if shape.delta is not None:
            attended, qkv = max(attended, shape.delta.values), max(qkv, shape.delta.width)
        if shape.scaled == INT8:
            values = 0 if shape.delta is None else shape.delta.values
            latents = 0 if latent is None else latent.q_lora_rank or 0
            inputs = max(
                shape.hidden, shape.attended, values, latents, *(kind.intermediate for kind in kinds)
            )
            of_experts = (
                narrow_row_bytes(max(shape.hidden, kind.experts.size)) * kind.experts.top_k
                for kind in kinds
                if kind.experts is not None
            )
            self._common["narrow"] = max(narrow_row_bytes(inputs), *of_experts, 0), 0
        attention = {"qkv": qkv, "attended": attended}
        if latent is not None:
            attention |= {"q": latent.q_lora_rank or 0, "q_up": shape.q, "queries": heads * shape.width}
            attention["values"] = shape.attended
        self._attention = {name: (width * item, 0) for name, width in attention.items()}
        size = max(kind.intermediate for kind in kinds)
        self._block = {"gate_up": (2 * size * item, 0), "gated": (size * item, 0)}
        experts = [kind.experts for kind in kinds if kind.experts is not None]
        if experts:
            count, k = max(each.count for each in experts), max(each.top_k for each in experts)
            size, indices = max(each.size for each in experts), (count + 1) * _INT64
            of_layers = len(kinds) * indices  # a thread may read those of a layer late
            self.groups_row = count + 1
            self._block |= {
                "logits": (count * _FLOAT32, 0), "ids": (k * _INT64, 0), "weights": (k * _FLOAT32, 0),
                "pair_tokens": (k * _INT64, 0), "places": (k * _INT64, 0), "gates": (item, 0),
                "next": (0, indices),
                "rows": (k * hidden, 0), "expert_gate_up": (2 * k * size * item, 0),
                "expert_gated": (k * size * item, 0),
            }  # fmt: skip
            self._common |= dict.fromkeys(("hit", "starts"), (0, of_layers))
            self._common["count"] = 0, len(kinds) * _INT64
        self._for: tuple[int, int] = 0, 0
        self._offsets: dict[str, int] = {}

    def of(self, tokens: int) -> tuple[dict[str, int], int]:
        """Return offsets in bytes by name, each a multiple of a cache line, and the total number of bytes."""
        if self._for[0] != tokens:
            self._offsets = {}
            begin = self._place(self._common, tokens, 0)
            ends = [self._place(part, tokens, begin) for part in (self._attention, self._block)]
            self._for = tokens, max(ends)
        return self._offsets, self._for[1]

    def _place(self, part: dict[str, tuple[int, int]], tokens: int, begin: int) -> int:
        for name, (per_token, fixed) in part.items():
            self._offsets[name] = begin
            begin += -(-(per_token * tokens + fixed) // ALIGNMENT) * ALIGNMENT
        return begin


class _Call(NamedTuple):
    """A call that was made."""

    arguments: tuple[Any, ...]
    step: PagedStep
    moves: int
    """Count of ``memory/moves.py`` at that time."""
    kept: tuple[object, ...]
    """Owners of memory at addresses in :attr:`arguments`."""


class DecoderKernel:
    def __init__(
        self,
        layers: Sequence[LayerTensors],
        kinds: Sequence[LayerKind],
        last_norm: Tensor,
        shape: LayerShape,
        *,
        eps: float,
        head_eps: float | None,
        ranks: "HostGroup | None" = None,
        adapters: tuple[AdapterForm, Sequence[LayerAdapters]] | None = None,
        vocabulary: Vocabulary = NO_VOCABULARY,
    ) -> None:
        """Sum results over ``ranks`` (None: whole). ``head_eps``: for norms of heads or latents."""
        self._shape = shape
        form: AdapterForm | None = None
        self._adapters: Sequence[LayerAdapters] = ()
        if adapters is not None:
            form, self._adapters = adapters
        self._dtype = layers[0].input_norm.dtype
        for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            shape.check(number, layer, kind, self._dtype, head_norms=head_eps is not None)
        if last_norm.shape != (shape.hidden,) or last_norm.dtype != self._dtype:
            raise native.misfit(f"no last norm of {shape} in {self._dtype}", last_norm)
        vocabulary.check(shape, self._dtype)
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._kinds, self._last_norm = kinds, last_norm
        self._parameters = [
            (number * LAYER_POINTERS + place, tensor)
            for number, layer in enumerate(layers)
            for place, tensor in enumerate(layer)
            if tensor is not None
        ]
        self._addresses: list[int | None] = [None] * (len(layers) * LAYER_POINTERS)
        self._compute = _DECODER[self._dtype]
        self._forms: ctypes.Array[LayerForm] | None = None
        self._table = (POINTER * (len(layers) * LAYER_POINTERS))()
        for each, kind in zip(self._adapters, kinds, strict=False):
            assert form is not None
            shape.check_adapters(each, kind, form, self._dtype)
        with_states = [kind.has_states for kind in kinds]
        # Of each layer among those that have states, or KV, as it has.
        self._numbers = [with_states[:layer].count(each) for layer, each in enumerate(with_states)]
        embeds = vocabulary.embeddings is not None
        self._regions = _Regions(shape, kinds, self._dtype.itemsize, form, embeds=embeds)
        self._windowed = any(kind.attention.window is not None for kind in kinds)
        self._step = self._constants(shape, form, eps, head_eps)
        self._workspace = Workspace()
        self._last: _Call | None = None
        self._placed = 0, 0  # intermediate results: where they begin, and of how many rows

    def _constants(
        self, shape: LayerShape, form: AdapterForm | None, eps: float, head_eps: float | None
    ) -> DecoderStep:
        """Return the arguments that are those of every step."""
        latent = shape.latent
        step = DecoderStep(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            rotated=shape.rotated,
            from_one=shape.from_one,
            groups_row=self._regions.groups_row,
            scale_columns=shape.scale_columns,
            head_gates=shape.head_gates,
            numbers=numbers_address(shape.codes),
            eps=eps,
            head_eps=head_eps or 0.0,
            ranks=None if self._ranks is None else self._ranks.address,
            adapter_rank=0 if form is None else form.rank,
            vocabulary=self._vocabulary.size,
            embeddings_packed=self._vocabulary.packed,
        )
        if latent is not None:
            step.latent, step.q_rank = latent.kv_lora_rank, latent.q_lora_rank or 0
            step.nope, step.value_size = latent.qk_nope_head_dim, latent.v_head_dim
            step.interleaved = latent.rope_interleave
        return step

    def __call__(
        self,
        tokens: Tensor,
        angles: Sequence[Angles],
        positions: Tensor,
        sampled: Tensor,
        step: PagedStep,
        record: Callable[[int], Tensor] | None = None,
        adapters: AdapterGroups | None = None,
        sampling: Sampling | None = None,
    ) -> Tensor:
        """Compute a step of T tokens, S of them sampled: [S, hidden] behind the norm, valid until the next.

        ``tokens``: int64 ids [T] if the vocabulary has embeddings, else these, [T, hidden], overwritten; it
        is contiguous. So are int64 ``positions`` [T], inside ``angles``, and ``sampled`` [S], both not
        checked. ``record`` returns integers [T, k] for a layer's expert ids. ``sampling``: of S contiguous
        rows of logits, which the head computes, without an adapter. IndexError: ids are beyond the
        vocabulary.
        After RankLostError neither results nor what was stored of these tokens are of use.
        """
        self._last = None
        threads, ranks, count = torch.get_num_threads(), self._ranks, sampled.shape[0]
        hidden = self._shape.hidden
        for cos, sin in {id(each): each for each in angles}.values():
            self._check(tokens, cos, sin, positions, sampled, step)
        rows = max(tokens.shape[0], count)
        offsets, nbytes = self._regions.of(rows)
        memory = self._workspace.take("activations", (nbytes,), torch.uint8)
        arguments, out = self._step, offsets["x"]
        self._fill_step(tokens, angles[0][0], positions, sampled, step, threads)
        arguments.adapter_rows = 0
        if adapters is not None:
            arguments.adapter_rows, arguments.adapter_count = len(adapters.tokens), len(adapters.slots)
            arguments.adapter_tokens = adapters.tokens.ctypes.data
            arguments.adapter_slots = adapters.slots.ctypes.data
            arguments.adapter_starts = adapters.starts.ctypes.data
        begin = memory.data_ptr()
        if self._placed != (begin, rows):
            for name, offset in offsets.items():
                setattr(arguments, name, begin + offset)
            self._placed = begin, rows
        arguments.out = begin + out
        self._vocabulary.fill(arguments, sampling, count)
        self._fill_table(step, angles, record, adapters)
        row, layers, latent = hidden * self._dtype.itemsize, len(self._kinds), self._shape.latent is not None
        rounds = 0 if ranks is None else ranks.rounds(tokens.shape[0] * row)
        counted = _counters(self._forms, layers, latent, adapters is not None, rounds, threads)
        counters = self._workspace.take("counters", (counted,), torch.uint8).data_ptr()
        call = self._table, self._forms, layers, ctypes.byref(arguments), counters, threads
        self._run(call)
        self._last = _Call(call, step, moves.count, (tokens, positions, sampled, sampling, adapters))
        return memory[out : out + count * row].view(self._dtype).view(count, hidden)

    def again(self, step: PagedStep) -> bool:
        """Make the last call once more, over what its tensors hold now.

        Return False if that was not a call of ``step``, or what it kept may no longer hold.
        """
        last, self._last = self._last, None
        if last is None or last.step is not step or last.moves != moves.count:
            return False
        if last.arguments[-1] != torch.get_num_threads():
            return False
        self._run(last.arguments)
        self._last = last
        return True

    def _run(self, arguments: tuple[Any, ...]) -> None:
        if not self._compute(*arguments):
            raise IndexError(f"token ids beyond [0, {self._vocabulary.size})")
        if self._ranks is not None:
            self._ranks.check()

    def _fill_step(
        self, tokens: Tensor, cos: Tensor, positions: Tensor, sampled: Tensor, step: PagedStep, threads: int
    ) -> None:
        to, attention = self._step, step.attention
        to.tokens = tokens.shape[0]
        if self._vocabulary.embeddings is None:
            to.residual = tokens.data_ptr()
        else:
            to.token_ids, to.embeddings = tokens.data_ptr(), self._vocabulary.embeddings.data_ptr()
        to.angles_row, to.positions = cos.stride(0), positions.data_ptr()
        to.slots, to.pages, to.pages_row = (
            step.kv_slots.data_ptr(), step.page_table.data_ptr(), step.page_table.stride(0),
        )  # fmt: skip
        if self._windowed:
            slots, table = step.window_slots, step.window_table
            slots = step.kv_slots if slots is None else slots
            table = step.page_table if table is None else table
            to.window_slots, to.window_pages, to.window_pages_row = (
                slots.data_ptr(), table.data_ptr(), table.stride(0),
            )  # fmt: skip
        to.tasks, to.num_tasks = step.tasks.ctypes.data, len(step.tasks)
        to.sampled, to.num_sampled = sampled.data_ptr(), sampled.shape[0]
        to.last_norm = self._last_norm.data_ptr()
        to.scratch, to.thread_floats = attention.scratch(threads)
        to.scale, to.parts = attention.scale, attention.parts
        if self._shape.delta is not None:
            assert step.states is not None
            to.delta = self._shape.delta.arguments(step.states.segments)

    def _fill_table(
        self,
        step: PagedStep,
        angles: Sequence[Angles],
        record: Callable[[int], Tensor] | None,
        adapters: AdapterGroups | None,
    ) -> None:
        records = [
            None if record is None or kind.experts is None else record(number)
            for number, kind in enumerate(self._kinds)
        ]
        if self._forms is None:
            forms = (kind.as_struct(each) for kind, each in zip(self._kinds, records, strict=True))
            self._forms = (LayerForm * len(self._kinds))(*forms)
        addresses = self._addresses
        for place, tensor in self._parameters:
            addresses[place] = tensor.data_ptr()
        for number, noted in enumerate(records):
            states = step.states if self._kinds[number].has_states else None
            keys, values = (step.kv if states is None else states.layer)(self._numbers[number])
            cos, sin = angles[number]
            end = (number + 1) * LAYER_POINTERS
            changes: list[int | None] = _NO_ADAPTERS
            if adapters is not None:
                of_layer = zip(self._adapters[number], adapters.changed[number], strict=True)
                changes = [
                    tensor.data_ptr() if changed else None
                    for tensors, changed in of_layer
                    for tensor in tensors
                ]
            addresses[end - _OF_STEP : end] = (
                *changes,
                None if noted is None else noted.data_ptr(),
                *(keys.data_ptr(), values.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            )
        self._table[:] = addresses  # type: ignore[assignment]

    def _check(
        self, given: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, sampled: Tensor, step: PagedStep
    ) -> None:
        shape, dtype = self._shape, self._dtype
        keys, values = step.kv(0)  # all layers' are alike
        tokens, embeds = given.shape[0], self._vocabulary.embeddings is not None
        slots = [each for each in (step.kv_slots, step.window_slots) if each is not None]
        tables = [each for each in (step.page_table, step.window_table) if each is not None]
        fits = (
            cos.dtype == sin.dtype == keys.dtype == values.dtype == dtype
            and given.dtype == (torch.int64 if embeds else dtype)
            and given.shape == ((tokens,) if embeds else (tokens, shape.hidden))
            and given.is_contiguous()
            and cos.shape == sin.shape == (cos.shape[0], 1, shape.rotated // 2)
            and cos.is_contiguous()
            and sin.is_contiguous()
            and self._attends_with(step, keys, values)
            and self._has_states(step)
            and all(each.shape == (tokens,) for each in (positions, *slots))
            and all(
                index.dtype == torch.int64 and index.dim() == 1 and index.is_contiguous()
                for index in (positions, sampled, *slots)
            )
            and all(table.dtype == torch.int32 and table.stride(1) == 1 for table in tables)
        )
        if not fits:
            raise native.misfit(f"no layers of {shape} in {dtype}", given, cos, keys, step.kv_slots)

    def _has_states(self, step: PagedStep) -> bool:
        delta, states = self._shape.delta, step.states
        if delta is None or states is None:
            return delta is None
        return states.segments.fits() and delta.takes(*states.layer(0), self._dtype)

    def _attends_with(self, step: PagedStep, keys: Tensor, values: Tensor) -> bool:
        shape, attention = self._shape, step.attention
        heads = attention.dtype == self._dtype and attention.group * attention.kv_heads == shape.heads
        if shape.latent is not None:
            sizes = attention.head_size == shape.width and attention.value_size == shape.latent.kv_lora_rank
            return (
                heads
                and sizes
                and attention.parts == attention.kv_heads
                and keys.data_ptr() == values.data_ptr()
                and keys.shape[1:] == (1, PAGE_SIZE, shape.width)
                and keys.is_contiguous()
            )
        return (
            heads
            and attention.parts == 1
            and attention.kv_heads == shape.kv_heads
            and attention.head_size == attention.value_size == shape.head_size
            and keys.shape[1:] == values.shape[1:] == (shape.kv_heads, PAGE_SIZE, shape.head_size)
            and keys.is_contiguous()
            and values.is_contiguous()
        )
