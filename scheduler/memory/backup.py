"""A component whose values survive a release of its memory, in a copy on the host.

Invariants:
- :meth:`BackedUpComponent.keep` comes before each release and copies the values of that moment: they may have changed since
  the last one. A copy that fails changes nothing.
- The copy exists from there until :meth:`BackedUpComponent.give_up`, once everything that was resumed with it is there. A
  resume that fails can therefore be repeated.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .host_copy import HostCopy
from .storage import Component


class BackedUpComponent:
    """``component`` with a copy, which ``make_copy`` makes room for."""

    def __init__(self, component: Component, make_copy: Callable[[], HostCopy]) -> None:
        self.moves = component.moves
        self._component = component
        self._make_copy = make_copy
        self._copy: HostCopy | None = None
        self._tensors: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Sum over the tensors."""
        return self._component.nbytes

    @property
    def copied_bytes(self) -> int:
        """Size of the copy; 0 where there is none."""
        return 0 if self._copy is None else self.nbytes

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One more tensor of zeros."""
        tensor = self._component.allocate(shape, dtype, device)
        self._tensors.append(tensor)
        return tensor

    def occupied_bytes(self) -> int:
        """What the tensors take now; the copy is counted apart."""
        return self._component.occupied_bytes()

    def keep(self) -> Iterator[None]:
        """Copy the values to the host.

        Raises:
            OSError, RuntimeError: there is no room; the values are where they were.
        """
        copy = self._make_copy()
        yield from copy.save(self._tensors)
        self._copy = copy

    def release(self) -> Iterator[None]:
        """Give the memory of all tensors back."""
        assert self._copy is not None or not self._tensors, "the values have not been kept"
        return self._component.release()

    def resume(self) -> Iterator[None]:
        """Take the memory again, and copy the values back.

        Raises:
            OSError, RuntimeError: the copy cannot be read, or the allocator refused; the copy is kept.
        """
        yield from self._component.resume()
        if self._copy is not None:
            yield from self._copy.load(self._tensors)

    def give_up(self) -> None:
        """Drop the copy."""
        self._copy = None
