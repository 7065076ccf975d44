"""All layers of a dense decoder in one call on the CPU, compiled (``cpu/decoder.cpp``).

Invariants:
- The bits are those of the same layers computed operation by operation (``layers/``) with compiled kernels.
- Addresses are asked for at every step: a release of memory may move tensors.
- Results lie in one grow-only workspace; a call overwrites those of the call before it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .attention import PAGE_SIZE, PagedStep
from .linear import is_storage, packable, storage_shape
from .native import FLOAT, INT, POINTER, SIZE

_DECODER = {
    dtype: native.function(f"caesura_decoder_{name}", POINTER, SIZE, POINTER, POINTER, INT)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32"))
}
_counters = native.function("caesura_decoder_counters", SIZE, INT, result=SIZE)
_LINE = 64


class LayerTensors(NamedTuple):
    """One layer's parameters; products are packed storage (``linear.py``)."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer, the same for all."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int

    @property
    def q(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Elements of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_size


class _Step(ctypes.Structure):
    """decoder.cpp's ``Step``."""

    _fields_ = [
        *((name, SIZE) for name in ("tokens", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *((name, POINTER) for name in ("residual", "update", "x", "qkv", "attended", "gate_up", "gated")),
        *((name, POINTER) for name in ("cos", "sin")),
        ("angles_token", SIZE),
        *(("slots", POINTER), ("pages", POINTER), ("pages_row", SIZE)),
        *(("tasks", POINTER), ("num_tasks", SIZE)),
        *(("scratch", POINTER), ("thread_floats", SIZE)),
        *((name, FLOAT) for name in ("eps", "head_eps", "scale")),
    ]


class DecoderKernel:
    """The kernel and its memory, for the layers of one model."""

    def __init__(
        self, layers: Sequence[LayerTensors], shape: LayerShape, *, eps: float, head_eps: float | None
    ) -> None:
        """
        Args:
            eps: of the norms of a layer.
            head_eps: of the norms of queries and keys. None: there are none.

        Raises:
            ValueError: a tensor that the kernel would misread.
        """
        self._shape, self._sizes = shape, astuple(shape)
        self._dtype = layers[0].qkv.dtype
        for number, layer in enumerate(layers):
            _check_layer(number, layer, shape, self._dtype, head_norms=head_eps is not None)
        self._eps, self._head_eps = eps, head_eps or 0.0
        self._layers = layers
        self._compute = _DECODER[self._dtype]
        self._table = (POINTER * (len(layers) * (len(LayerTensors._fields) + 2)))()
        self._counters = torch.empty(0, dtype=torch.uint8)
        # Per token, each a multiple of a cache line: update, x, qkv, attended; gate_up and gated take the place of the
        # latter two, which are dead by then.
        widths = [shape.hidden, shape.hidden, shape.qkv, shape.q, 2 * shape.intermediate, shape.intermediate]
        lane = _LINE // self._dtype.itemsize
        self._widths = [-(-width // lane) * lane for width in widths]
        self._workspace = torch.empty((0, sum(self._widths[:2]) + self._shared_width()), dtype=self._dtype)

    def _shared_width(self) -> int:
        *_, qkv, attended, gate_up, gated = self._widths
        return max(qkv + attended, gate_up + gated)

    def __call__(self, residual: Tensor, cos: Tensor, sin: Tensor, step: PagedStep) -> Tensor:
        """All layers of a step of T tokens.

        Args:
            residual: [T, hidden], contiguous: the embeddings; updated in place.
            cos, sin: [T, 1, head size / 2], of equal strides.

        Returns:
            [T, hidden]: what the last layer adds to ``residual``, not yet added; valid until the next call.

        Raises:
            ValueError: a tensor that the kernel would misread.
        """
        shape, attention, threads = self._shape, step.attention, native.num_threads()
        tokens = len(residual)
        self._check(residual, cos, sin, step)
        if tokens > len(self._workspace):
            # Freed first, so that the peak is the larger of the two and not their sum.
            width = self._workspace.shape[1]
            self._workspace = torch.empty((0, width), dtype=self._dtype)
            self._workspace = torch.empty((tokens, width), dtype=self._dtype)
        update, x, shared = accumulate(
            (tokens * width * self._dtype.itemsize for width in self._widths[:2]),
            initial=self._workspace.data_ptr(),
        )
        row = tokens * self._dtype.itemsize
        scratch, thread_floats = attention.scratch(threads)
        arguments = _Step(
            tokens,
            *self._sizes,
            residual.data_ptr(),
            update,
            x,
            shared,
            shared + row * self._widths[2],
            shared,
            shared + row * self._widths[4],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            step.kv_slots.data_ptr(),
            step.page_table.data_ptr(),
            step.page_table.stride(0),
            step.tasks.ctypes.data,
            len(step.tasks),
            scratch,
            thread_floats,
            self._eps,
            self._head_eps,
            attention.scale,
        )
        self._fill_table(step)
        counters = self._counters_for(threads)
        self._compute(self._table, len(self._layers), ctypes.byref(arguments), counters, threads)
        return self._workspace.view(-1)[: tokens * shape.hidden].view(tokens, shape.hidden)

    def _counters_for(self, threads: int) -> int:
        """Address of what the threads count with."""
        needed = _counters(len(self._layers), threads) + _LINE
        if self._counters.numel() < needed:
            self._counters = torch.empty(needed, dtype=torch.uint8)
        address = self._counters.data_ptr()
        return address + -address % _LINE

    def _fill_table(self, step: PagedStep) -> None:
        tensors = chain.from_iterable((*layer, *step.kv(number)) for number, layer in enumerate(self._layers))
        self._table[:] = [None if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _check(self, residual: Tensor, cos: Tensor, sin: Tensor, step: PagedStep) -> None:
        shape, attention, dtype = self._shape, step.attention, self._dtype
        keys, values = step.kv(0)  # all layers' are alike
        tokens = len(residual)
        fits = (
            residual.dtype == cos.dtype == sin.dtype == keys.dtype == values.dtype == attention.dtype == dtype
            and residual.shape == (tokens, shape.hidden)
            and residual.is_contiguous()
            and cos.shape == sin.shape == (tokens, 1, shape.head_size // 2)
            and cos.stride(0) == sin.stride(0)
            and cos.stride(2) == sin.stride(2) == 1
            and attention.kv_heads == shape.kv_heads
            and attention.group * shape.kv_heads == shape.heads
            and attention.head_size == shape.head_size
            and keys.shape[1:] == values.shape[1:] == (shape.kv_heads, PAGE_SIZE, shape.head_size)
            and keys.is_contiguous()
            and values.is_contiguous()
            and step.kv_slots.dtype == torch.int64
            and step.kv_slots.shape == (tokens,)
            and step.kv_slots.is_contiguous()
            and step.page_table.dtype == torch.int32
            and step.page_table.stride(1) == 1
        )
        if not fits:
            raise ValueError(
                f"no layers of {shape} in {dtype}: residual {residual.dtype} {tuple(residual.shape)}, angles {tuple(cos.shape)}, "
                f"pages {keys.dtype} {tuple(keys.shape)}, slots {tuple(step.kv_slots.shape)}"
            )


def _check_layer(
    number: int, layer: LayerTensors, shape: LayerShape, dtype: torch.dtype, *, head_norms: bool
) -> None:
    """Raise ValueError for whatever the kernel would read wrongly."""
    products = {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.q),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    heads = dict.fromkeys(("q_norm", "k_norm"), shape.head_size)
    biases = {"qkv_bias": shape.qkv, "o_bias": shape.hidden}
    vectors = {"input_norm": shape.hidden, "mlp_norm": shape.hidden, **heads, **biases}
    for name, tensor in layer._asdict().items():
        if tensor is None or (name in heads and not head_norms):
            fits = tensor is None and (name in biases or (name in heads and not head_norms))
        elif name in products:
            outputs, inputs = products[name]
            fits = (
                packable(inputs, dtype)
                and tensor.shape == storage_shape(outputs, inputs, dtype)
                and is_storage(tensor)
            )
        else:
            fits = tensor.shape == (vectors[name],) and tensor.is_contiguous()
        if not fits or (tensor is not None and tensor.dtype != dtype):
            described = None if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"no layer {number} of {shape} in {dtype}: {name} is {described}")
