"""Maps parameter names in memory to checkpoint names.

Invariants: names and values equal those that ``save_pretrained`` writes, and the tensors are views of the model's own memory. Tensors that
share memory under several names are yielded once.

transformers 5 stores all experts of a layer in two parameters, ``experts.gate_up_proj`` [experts, 2 x intermediate, hidden] and
``experts.down_proj`` [experts, hidden, intermediate]. Checkpoints and engines have one tensor per expert and projection.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode

_SPLIT_FAMILIES = frozenset({"qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"})
"""``config.model_type`` of those whose checkpoints hold experts apart, gate before up."""


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and tensors of a transformers model. All parameters must be in this process (gathered, not on ``meta``).

    Raises:
        CaesuraError: ``unsupported``, the model fuses experts in a way that is not known here.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        prefix, _, projection = name.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            yield name, tensor
            continue
        if family not in _SPLIT_FAMILIES:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"{name!r} holds fused experts of {family!r}, whose checkpoint is not known",
            )
        for number, expert in enumerate(tensor):
            if projection == "down_proj":
                yield f"{prefix}.{number}.down_proj.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{prefix}.{number}.gate_proj.weight", gate
                yield f"{prefix}.{number}.up_proj.weight", up
