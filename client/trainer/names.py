"""Maps parameter names in memory to checkpoint names.

Invariants: names and values equal those that ``save_pretrained`` writes, or the names of transformers 4.
Tensors are views of the model's own memory; those that share memory are yielded once.

transformers 5 stores all experts of a layer in two parameters, ``experts.gate_up_proj`` [experts, 2 x
intermediate, hidden] and ``experts.down_proj`` [experts, hidden, intermediate]. Checkpoints and engines have
one tensor per expert and projection, except those of gpt-oss.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode

_SPLIT_FAMILIES = frozenset({
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe"),
})  # fmt: skip
"""``config.model_type`` of models whose checkpoints hold experts apart, gate before up."""
_AS_THEY_ARE = "gpt_oss"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL, _MIXTRAL_PROJECTIONS = "mixtral", ("w1", "w3", "w2")


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a transformers model; ``unsupported`` if its fused experts are unknown."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        if family == _MIXTRAL:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, projection = name.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj") or tensor.dim() != 3 or family == _AS_THEY_ARE:
            yield name, tensor
            continue
        if family not in _SPLIT_FAMILIES and family != _MIXTRAL:
            reason = f"{name!r} holds fused experts of {family!r}, whose checkpoint is not known"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason)
        gate, up, down = _MIXTRAL_PROJECTIONS if family == _MIXTRAL else _PROJECTIONS
        for number, expert in enumerate(tensor):
            parts = {down: expert} if projection == "down_proj" else dict(zip((gate, up), expert.chunk(2)))
            for part, rows in parts.items():
                yield f"{prefix}.{number}.{part}.weight", rows
