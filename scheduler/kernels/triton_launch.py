"""Launches of Triton kernels that cost the host little.

Invariants:
- Triton chooses a variant by the types of all arguments, by which integers are 1 or multiples of 16, and by
  which pointers are multiples of 16. Finding that out at every launch costs as much as one of torch's
  operations; so the choice is kept for each kind of launch, and a kind tells the same or more.
- A pointer that is no multiple of 16, read by more than an element, goes Triton's own way.

Imported only with Triton. Compiled for sm_90; not run on a GPU.
"""

from typing import Any

from torch import Tensor

_ALIGNMENT = 16


class Launcher:
    """Launcher of one kernel, whose parameters are tensors, then numbers, then ``tl.constexpr``."""

    def __init__(self, kernel: Any, *, tensors: int, numbers: int) -> None:
        self._kernel = kernel
        self._variants: dict[Any, Any] = {}
        params = getattr(kernel, "params", None)  # the interpreter's kernels have none, and no variants
        self._aligned = [
            i for i in range(tensors) if params is None or not params[i].do_not_specialize_on_alignment
        ]
        self._special = [
            i for i in range(numbers) if params is None or not params[tensors + i].do_not_specialize
        ]

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        places = 0
        for i in self._aligned:
            places |= tensors[i].data_ptr()
        kind = (
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[numbers[i] for i in self._special],
            constants,
        )
        variant = None if places % _ALIGNMENT else self._variants.get(kind)
        if variant is not None:
            variant[grid](*tensors, *numbers, *constants)
            return
        found = self._kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
        if found is not None and not places % _ALIGNMENT:
            self._variants[kind] = found
