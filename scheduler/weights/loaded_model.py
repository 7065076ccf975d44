"""A model with its weights in, as the start of an engine hands it on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..layers.lora import AdapterSlots
from ..layers.sharding import head_windows
from ..models.causal_lm import CausalLM, Weights
from ..models.config import ModelConfig
from ..parallel.group import SINGLE, TensorParallel
from .loader import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    model: Weights
    loader: WeightLoader
    dtype: torch.dtype
    device: torch.device
    digest: str
    """Digest as ``Checkpoint.local_digest`` makes it."""

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.model.named_storage())

    @property
    def derived_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.model.derived())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(LoadedWeights):
    config: ModelConfig
    model: CausalLM
    parallel: TensorParallel = SINGLE
    adapters: AdapterSlots | None = None
    addresses: Callable[[], tuple[int, ...]] = tuple
    """Returns where the memory lies that steps read and that a release may move."""

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.config.num_heads // self._sharing_heads.size

    @property
    def num_kv_heads(self) -> int:
        """KV heads that this rank stores; 0 with latent attention."""
        return head_windows(self.config.num_heads, self.config.num_kv_heads, self._sharing_heads)[1].length

    @property
    def _sharing_heads(self) -> TensorParallel:
        return self.parallel if self.model.rank_rows is None else SINGLE
