"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467).

Invariant: statistics and scaling are fp32, the result is rounded to the input's dtype, and only then
multiplied by the weight; with factors stored as their distance from one, everything is fp32 and rounded once.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from ..kernels import elementwise_for
from .parameters import Parameter, Placement, WeightSlot

if TYPE_CHECKING:
    from .fp8_products import Quantizer, Rows


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in fp32, in fresh memory."""
    return functional.rms_norm(x, (x.shape[-1],), None, eps)


class RMSNorm:
    """Normalisation over the last dimension, with a weight."""

    def __init__(
        self, name: str, checkpoint: str, size: int, eps: float, *, from_one: bool = False, place: Placement
    ) -> None:
        """``from_one``: the factor is ``1 + weight``, and the product is rounded once (Gemma)."""
        self.eps, self.from_one = eps, from_one
        self._checkpoint = checkpoint
        self._kernels = elementwise_for(place.device, place.dtype)
        self._weight = Parameter(f"{name}.weight", (size,), place.dtype, place.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, size] to the same shape and dtype, in fresh memory."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self._weight.data, self.eps, from_one=self.from_one)
        return self.by_torch(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, then return the norm of the new residual."""
        if self._kernels is not None:
            return self._kernels.rms_norm(
                x, self._weight.data, self.eps, residual=residual, from_one=self.from_one
            )
        return self.forward(residual.add_(x))

    def rows(
        self, x: Tensor, quantizer: "Quantizer | None" = None, *, residual: Tensor | None = None
    ) -> "Rows":
        """Return :meth:`forward`, or :meth:`add` to ``residual``; by ``quantizer`` if there is one."""
        if quantizer is not None:
            return quantizer.norm(x, self._weight.data, self.eps, residual, from_one=self.from_one)
        return self.forward(x) if residual is None else self.add(x, residual)

    def by_torch(self, x: Tensor) -> Tensor:
        if not self.from_one:
            return self.scale_(normalize(x, self.eps))
        return normalize(x.float(), self.eps).mul_(1.0 + self._weight.data.float()).to(x.dtype)

    def scale_(self, normalized: Tensor) -> Tensor:
        """Multiply by the weight, in place, without ``from_one``."""
        return normalized.mul_(self._weight.data)

    @property
    def weight(self) -> Tensor:
        return self._weight.data

    def slots(self) -> Iterator[WeightSlot]:
        yield self._weight.slot(f"{self._checkpoint}.weight")

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
