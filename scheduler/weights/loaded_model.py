"""A model with its weights in, as the start of an engine hands it on."""

from dataclasses import dataclass

import torch

from ..models.base import CausalLM
from ..models.config import ModelConfig
from .loader import WeightLoader


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in, and what follows from it."""

    config: ModelConfig
    model: CausalLM
    loader: WeightLoader
    dtype: torch.dtype
    device: torch.device
    digest: str
    """What tells the folder's files from others (``Checkpoint.digest``)."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of parameters and derived tensors."""
        return sum(tensor.nbytes for _, tensor in self.model.named_storage())

    @property
    def derived_bytes(self) -> int:
        """Bytes of derived tensors alone."""
        return sum(tensor.nbytes for _, tensor in self.model.derived())
