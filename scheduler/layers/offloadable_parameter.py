"""Slots of offloaded parameters, through the component that knows where the values are.

Values written while a parameter is offloaded are those that come to the device next.
"""

from math import prod

from torch import Tensor

from ..memory.offload import OffloadableComponent
from .parameters import Parameter, WeightSlot, differ


class OffloadableSlot(WeightSlot):
    """One checkpoint tensor that is one whole parameter of ``movable``."""

    __slots__ = ("_movable", "_tensor")

    def __init__(self, parameter: Parameter, movable: OffloadableComponent) -> None:
        tensor = parameter.data
        super().__init__(parameter.name, parameter.name, tuple(tensor.shape), tensor.dtype)
        self._movable = movable
        self._tensor = tensor

    def write(self, rows: Tensor, start: int) -> None:
        """Write rows. Raises OSError if the copy on the host cannot be written."""
        self._movable.write(self._tensor, start * prod(self.shape[1:]), rows)

    def differs(self, rows: Tensor, start: int) -> bool:
        values = self._movable.values(self._tensor)
        return differ(rows, values if rows.shape == self.shape else values.narrow(0, start, rows.shape[0]))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a view, of host memory once the parameter has been offloaded."""
        values = self._movable.values(self._tensor)
        return values[start:stop] if self.shape else values
