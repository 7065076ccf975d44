"""Which part of which parameter of a transformers module each checkpoint tensor is.

transformers 5 keeps some weights in another form than checkpoints do (experts stacked in one parameter,
modules renamed). What it would save is asked of it on the meta device, and each answer is traced back to
the memory that it is a part of.

Invariants:
- Names and shapes are those that ``save_pretrained`` writes.
- A checkpoint tensor is a contiguous part of one parameter; anything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .probe import refused


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring elements of a parameter."""

    parameter: str
    shape: tuple[int, ...]
    offset: int
    """Elements from the parameter's first."""

    def of(self, data: Tensor) -> Tensor:
        return data.view(-1)[self.offset :][: prod(self.shape)].view(self.shape)


class _WithoutCopies(TorchDispatchMode):
    """Copies are their originals: a conversion makes its results contiguous, and they would not be views."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name() == "aten::clone":
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_parts(module: PreTrainedModel) -> dict[str, Part]:
    """Return every tensor of a meta module's checkpoints by name, a tied one once.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, a checkpoint tensor is no part of one parameter.
    """
    tied = set(module.all_tied_weights_keys)
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=False).items() if name not in tied}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    with _WithoutCopies():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(module, dict(state))
    parts: dict[str, Part] = {}
    for name, tensor in saved.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not tensor.is_contiguous():
            raise refused(type(module).__name__, f"the checkpoint's {name} is no part of one parameter")
        parts[name] = Part(owner, tuple(tensor.shape), tensor.storage_offset())
    return parts
