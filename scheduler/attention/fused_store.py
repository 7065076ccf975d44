"""Head norms, rotation and the store of K and V in one kernel, before attention over pages.

Invariant: slots are read on the device where a step's staging puts them, so a graph can hold the launch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache.pool import MHAPool
from ..kernels import Elementwise, elementwise_for
from ..kernels.attention_form import AttentionForm, HeadNorms

if TYPE_CHECKING:
    from ..execution.forward import ForwardBatch

Attend = Callable[[Tensor, int, AttentionForm], Tensor]


class FusedStore:
    """A :class:`~..forward.FusedAttention` over stored K and V; the backend's ``plan`` sets ``batch``."""

    def __init__(self, pool: MHAPool, num_heads: int, attend: Attend, kernels: Elementwise) -> None:
        """``attend`` takes rotated queries [T, heads, size], a layer with stored K and V, its form."""
        self.batch: ForwardBatch | None = None
        self._pool, self._heads, self._attend, self._kernels = pool, num_heads, attend, kernels

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int, norm: HeadNorms | None, form: AttentionForm
    ) -> Tensor:
        assert self.batch is not None, "plan comes first"
        q, slots = qkv[:, : self._heads], self.batch.slots_in(form)
        keys, values = self._pool.layer(layer)
        self._kernels.rope_store(qkv, self._heads, cos, sin, slots, keys, values, out=q, norm=norm)
        return self._attend(q, layer, form)


def fused_store(pool: MHAPool, num_heads: int, attend: Attend) -> FusedStore | None:
    keys, _ = pool.layer(0)
    kernels = elementwise_for(keys.device, keys.dtype)
    return None if kernels is None else FusedStore(pool, num_heads, attend, kernels)
