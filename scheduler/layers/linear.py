"""Matrix products with weights, fused where several share an input.

Invariants:
- The rest of the engine sees ``forward``, ``slots`` (writing) and ``read`` (the canonical [out, in] weight); how the
  weight is stored is ``matrix.py``'s business.
- Fused weights are stacked along the output dimension in the order of their parts.
- A weight is FP8 where the checkpoint's config says so of all its parts; of some only is refused.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from .fp8_block import Fp8Matrix
from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot


class Linear:
    """``x @ weight.T + bias``, its weight stacked from one or more checkpoint modules."""

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        place: Placement,
    ) -> None:
        """
        Args:
            name: engine name; parameters are ``{name}.weight`` and ``{name}.bias``.
            parts: checkpoint module name (without ``.weight``) to its number of output features, in order.
        """
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self._parts = dict(parts)
        self._weight: Matrix | Fp8Matrix
        if all_fp8(parts, place):
            self._weight = Fp8Matrix(f"{name}.weight", list(parts.values()), in_features, place)
        else:
            self._weight = Matrix(f"{name}.weight", self.out_features, in_features, place)
        self._bias = (
            Parameter(f"{name}.bias", (self.out_features,), place.dtype, place.device) if bias else None
        )

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in] to [T, out]; into ``out`` where given (preallocated, contiguous, same dtype)."""
        return self._weight.product(x, self.bias, out)

    @property
    def packed(self) -> Tensor | None:
        """The weight's packed storage. None: it is stored otherwise."""
        return self._weight.packed

    @property
    def bias(self) -> Tensor | None:
        """[out], where there is one."""
        return None if self._bias is None else self._bias.data

    def read(self) -> Tensor:
        """The weight as [out, in]: a view where storage has that layout, else a copy."""
        return self._weight.read()

    def slots(self) -> Iterator[WeightSlot]:
        """Per part its weight, its scales where it is FP8, and its bias where there is one."""
        start = 0
        for part, size in self._parts.items():
            yield from self._weight.slots(part, start, size)
            if self._bias is not None:
                yield self._bias.slot(f"{part}.bias", start, size)
            start += size

    def parameters(self) -> Iterator[Parameter]:
        """Weight, its scales where it is FP8, then bias."""
        yield from self._weight.parameters()
        if self._bias is not None:
            yield self._bias


def all_fp8(modules: Iterable[str], place: Placement) -> bool:
    """Whether the checkpoint holds these modules, which are stored as one, as FP8.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, some of them only.
    """
    if place.fp8 is None:
        return False
    converted = {module: place.fp8.converts(module) for module in modules}
    if len(set(converted.values())) > 1:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED_MODEL,
            f"modules that are one product must be FP8 or not together: {converted}",
            fields=["quantization_config.modules_to_not_convert"],
        )
    return all(converted.values())


class QKVLinear(Linear):
    """Query, key and value projections of one attention layer in one product."""

    def __init__(
        self,
        name: str,
        prefix: str,
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        place: Placement,
    ) -> None:
        """``prefix`` is the checkpoint's attention module, which holds ``q_proj``, ``k_proj`` and ``v_proj``."""
        kv_size = num_kv_heads * head_dim
        parts = {
            f"{prefix}.q_proj": num_heads * head_dim,
            f"{prefix}.k_proj": kv_size,
            f"{prefix}.v_proj": kv_size,
        }
        super().__init__(name, in_features, parts, bias=bias, place=place)


class MergedLinear(Linear):
    """Several projections of equal width in one product, gate and up for instance."""

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        in_features: int,
        part_features: int,
        *,
        place: Placement,
    ) -> None:
        super().__init__(name, in_features, dict.fromkeys(parts, part_features), place=place)
        self.part_features = part_features

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views [T, part] of an output [T, out], one per part."""
        return tuple(
            y.narrow(-1, start, self.part_features)
            for start in range(0, self.out_features, self.part_features)
        )
