"""An adapter: low-rank changes of a frozen base in torch, in the form that PEFT saves.

Invariant: nothing but the factors is trained, kept by version or sent.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..settings import LoraSettings


class LowRank(torch.nn.Module):
    """A frozen product with weights, and a trained one of two factors beside it.

    ``y = W x + scale * B A x`` (Hu et al., 2021, arXiv 2106.09685); B begins at zero.
    """

    def __init__(self, frozen: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.a = torch.nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.frozen(x)
        return frozen + self.scale * (x @ self.a.T @ self.b.T)


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Freeze ``model``, and put factors beside every product of its layers."""
    model.requires_grad_(requires_grad=False)
    for parent in list(model.model.layers.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, torch.nn.Linear):
                setattr(parent, name, LowRank(module, settings.rank, settings.alpha / settings.rank))


def peft_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the factors by their names in ``adapter_model.safetensors``."""
    return {
        f"base_model.model.{name}.lora_{half}.weight": factor.detach()
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
        for half, factor in (("A", module.a), ("B", module.b))
    }


def peft_config(model: torch.nn.Module, settings: LoraSettings) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, LowRank)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(settings.out_dir / "model"),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(names),
    }


def save_adapter(model: torch.nn.Module, settings: LoraSettings, folder: Path) -> None:
    """Save the adapter as a folder that the engine, or PEFT, loads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(peft_tensors(model), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model, settings), indent=2))
