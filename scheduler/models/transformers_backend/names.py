"""Which part of which parameter of a transformers module each checkpoint tensor is.

transformers 5 keeps some weights in another form than checkpoints do (experts stacked in one parameter, modules renamed) and
converts them where it loads and saves. What it would save is asked of it here, on the meta device, and each answer is traced
back to the memory that it is a part of.

Invariants:
- Names and shapes are those that ``save_pretrained`` writes.
- A checkpoint tensor that is not a part of one parameter, a concatenation of several for instance, is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ....io_struct import CaesuraError, ErrorCode
from ...layers.parameters import PlainSlot, WeightSlot


@dataclass(frozen=True, slots=True)
class Part:
    """A view of a parameter."""

    parameter: str
    """Its name in the module."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the parameter's first."""

    def of(self, data: Tensor) -> Tensor:
        """This part of the parameter's storage ``data``, contiguous from its first element on."""
        return data.as_strided(self.shape, self.stride, data.storage_offset() + self.offset)


class _WithoutCopies(TorchDispatchMode):
    """Copies are their originals: a conversion makes its results contiguous, and they would no longer be views."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_parts(module: PreTrainedModel) -> dict[str, Part]:
    """Of a module on the meta device: every tensor of its checkpoints, by name there; a tied one once.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, a checkpoint tensor is not a part of one parameter.
    """
    tied = set(module.all_tied_weights_keys)
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=False).items() if name not in tied}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    with _WithoutCopies():
        saved = revert_weight_conversion(module, dict(state))
    parts: dict[str, Part] = {}
    for name, tensor in saved.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED_MODEL,
                f"{type(module).__name__} cannot be served: the checkpoint's {name} is made of several parameters",
                fields=["architectures"],
            )
        parts[name] = Part(owner, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return parts


class StridedSlot(WeightSlot):
    """A checkpoint tensor that is a part of a parameter whose rows are not neighbours there."""

    __slots__ = ("_rows",)

    def __init__(self, name: str, parameter: str, rows: Tensor) -> None:
        """``rows``: a view of the parameter's storage, in the checkpoint's shape."""
        super().__init__(name, parameter, tuple(rows.shape), rows.dtype)
        self._rows = rows

    def write(self, rows: Tensor, start: int) -> None:
        """See :meth:`WeightSlot.write`."""
        self._target(rows, start).copy_(rows)

    def differs(self, rows: Tensor, start: int) -> bool:
        """See :meth:`WeightSlot.differs`."""
        target = self._target(rows, start).contiguous()
        new = rows.to(device=target.device, dtype=target.dtype).contiguous()
        return not torch.equal(new.view(torch.uint8), target.view(torch.uint8))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A view."""
        return self._rows[start:stop]

    def _target(self, rows: Tensor, start: int) -> Tensor:
        return self._rows.narrow(0, start, rows.shape[0])


def slot_of(name: str, parameter: str, view: Tensor) -> WeightSlot:
    """The slot of checkpoint tensor ``name``, which is ``view`` of the engine parameter ``parameter``."""
    return (
        PlainSlot(name, parameter, view) if view.is_contiguous() else StridedSlot(name, parameter, view)
    )
