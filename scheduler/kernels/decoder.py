"""A dense decoder between its embeddings and its head in one call on the CPU, compiled (``cpu/decoder.cpp``).

Invariants:
- The bits are those of the same model computed operation by operation (``layers/``) with compiled kernels.
- Addresses are asked for at every step: a release of memory may move tensors.
- Results lie in one grow-only workspace; a call overwrites those of the call before it.
- Of several ranks each has its heads and its part of the width, and the sums over them are part of the call.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import PAGE_SIZE
from ..memory.workspace import ALIGNMENT, Workspace
from . import native
from .attention import PagedStep
from .collectives import Collective
from .linear import is_storage, packable, storage_shape
from .native import INT, POINTER, SIZE, DecoderStep

_DECODER = native.by_dtype("caesura_decoder", POINTER, SIZE, POINTER, POINTER, INT)
_counters = native.function("caesura_decoder_counters", SIZE, SIZE, INT, result=SIZE)


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
    """Sizes of a layer, the same for all; heads and intermediate are this rank's."""

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


class DecoderKernel:
    """The kernel and its memory, for one model."""

    def __init__(
        self,
        layers: Sequence[LayerTensors],
        last_norm: Tensor,
        shape: LayerShape,
        *,
        eps: float,
        head_eps: float | None,
        ranks: Collective | None = None,
    ) -> None:
        """
        Args:
            last_norm: [hidden], the weight of the norm behind the layers.
            eps: of the norms.
            head_eps: of the norms of queries and keys. None: there are none.
            ranks: over which attention's results and each layer's are summed. None: they are whole.

        Raises:
            ValueError: a tensor that the kernel would misread.
        """
        self._shape, self._sizes = shape, astuple(shape)
        self._dtype = layers[0].qkv.dtype
        for number, layer in enumerate(layers):
            _check_layer(number, layer, shape, self._dtype, head_norms=head_eps is not None)
        if last_norm.shape != (shape.hidden,) or last_norm.dtype != self._dtype:
            raise ValueError(
                f"no last norm of {shape} in {self._dtype}: {last_norm.dtype} {tuple(last_norm.shape)}"
            )
        self._eps, self._head_eps = eps, head_eps or 0.0
        self._ranks = ranks
        self._layers, self._last_norm = layers, last_norm
        self._compute = _DECODER[self._dtype]
        self._table = (POINTER * (len(layers) * (len(LayerTensors._fields) + 2)))()
        # Per token, each a multiple of a cache line: update, x, qkv, attended; gate_up and gated take the place of the
        # latter two, and the result that of x, which are dead by then.
        widths = [shape.hidden, shape.hidden, shape.qkv, shape.q, 2 * shape.intermediate, shape.intermediate]
        lane = ALIGNMENT // self._dtype.itemsize
        self._widths = [-(-width // lane) * lane for width in widths]
        _, x, qkv, attended, gate_up, gated = self._widths
        self._width = 2 * x + max(qkv + attended, gate_up + gated)
        self._workspace = Workspace()

    def __call__(
        self,
        residual: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        sampled: Tensor,
        step: PagedStep,
    ) -> Tensor:
        """A step of T tokens, S of them sampled.

        Args:
            residual: [T, hidden], contiguous: the embeddings; overwritten.
            angles: cosines and sines of at least the positions up to the largest, each [P, 1, head size / 2], contiguous.
            positions: int64 [T], contiguous; inside the table of angles, which is not checked.
            sampled: int64 [S], contiguous: which of the T tokens, likewise.

        Returns:
            [S, hidden] behind the last norm, valid until the next call.

        Raises:
            ValueError: a tensor that the kernel would misread.
            RankLostError: the results are of no use, and neither is what was stored of this step's tokens.
        """
        attention, threads, ranks = step.attention, native.num_threads(), self._ranks
        tokens, count = residual.shape[0], sampled.shape[0]
        self._check(residual, *angles, positions, sampled, step)
        shape = max(tokens, count), self._width
        memory = self._workspace.take("activations", shape, self._dtype)
        update, x, qkv, attended, gate_up, gated = self._regions(memory)
        scratch, thread_floats = attention.scratch(threads)
        arguments = DecoderStep(
            tokens,
            *self._sizes,
            *(residual.data_ptr(), update, x, qkv, attended, gate_up, gated),
            *(angles[0].data_ptr(), angles[1].data_ptr(), angles[0].stride(0)),
            *(positions.data_ptr(), step.kv_slots.data_ptr()),
            *(step.page_table.data_ptr(), step.page_table.stride(0)),
            *(step.tasks.ctypes.data, len(step.tasks)),
            *(sampled.data_ptr(), count, self._last_norm.data_ptr(), x),
            *(scratch, thread_floats),
            *(self._eps, self._head_eps, attention.scale),
            None if ranks is None else ranks.address,
        )
        self._fill_table(step)
        rounds = 0 if ranks is None else ranks.rounds(residual.nbytes)
        counted = _counters(len(self._layers), rounds, threads)
        counters = self._workspace.take("counters", (counted,), torch.uint8).data_ptr()
        self._compute(self._table, len(self._layers), ctypes.byref(arguments), counters, threads)
        if ranks is not None:
            ranks.check()
        first, hidden = (x - update) // self._dtype.itemsize, self._shape.hidden
        return memory.view(-1)[first : first + count * hidden].view(count, hidden)

    def _regions(self, memory: Tensor) -> tuple[int, int, int, int, int, int]:
        """Addresses of update, x, qkv, attended, gate_up and gated, with room for a row of ``memory`` each."""
        row = memory.shape[0] * self._dtype.itemsize
        update_width, x_width, qkv_width, _, gate_up_width, _ = self._widths
        update = memory.data_ptr()
        x = update + row * update_width
        shared = x + row * x_width
        return update, x, shared, shared + row * qkv_width, shared, shared + row * gate_up_width

    def _fill_table(self, step: PagedStep) -> None:
        tensors = chain.from_iterable((*layer, *step.kv(number)) for number, layer in enumerate(self._layers))
        self._table[:] = [None if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _check(
        self, residual: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, sampled: Tensor, step: PagedStep
    ) -> None:
        shape, attention, dtype = self._shape, step.attention, self._dtype
        keys, values = step.kv(0)  # all layers' are alike
        tokens = residual.shape[0]
        fits = (
            residual.dtype == cos.dtype == sin.dtype == keys.dtype == values.dtype == attention.dtype == dtype
            and residual.shape == (tokens, shape.hidden)
            and residual.is_contiguous()
            and cos.shape == sin.shape == (cos.shape[0], 1, shape.head_size // 2)
            and cos.is_contiguous()
            and sin.is_contiguous()
            and attention.kv_heads == shape.kv_heads
            and attention.group * shape.kv_heads == shape.heads
            and attention.head_size == shape.head_size
            and keys.shape[1:] == values.shape[1:] == (shape.kv_heads, PAGE_SIZE, shape.head_size)
            and keys.is_contiguous()
            and values.is_contiguous()
            and positions.shape == step.kv_slots.shape == (tokens,)
            and all(
                index.dtype == torch.int64 and index.dim() == 1 and index.is_contiguous()
                for index in (positions, sampled, step.kv_slots)
            )
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
