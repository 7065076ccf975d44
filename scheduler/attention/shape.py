"""Sizes of a model's attention, which backends are made for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..cache.pool import MHAPool, MLAPool
from ..kernels.attention_form import FormKind

if TYPE_CHECKING:
    from ..weights.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requirements of a model on attention kernels."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores of layers without one of their own."""
    latent: int | None = None
    """Width of the latents, which are the values (``head_dim`` has the rotated key, too), or None."""
    kinds: tuple[FormKind, ...] = (FormKind(),)
    """Distinct kinds of the layers' forms, in a fixed order."""

    @property
    def features(self) -> tuple[str, ...]:
        """Features of the layers beyond plain causal attention, by name."""
        return tuple({name: None for kind in self.kinds for name in kind.features})

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple({kind.window: None for kind in self.kinds})

    def pool(self, num_layers: int, num_pages: int, **windows: Any) -> MHAPool | MLAPool:
        """Return storage of pages; ``windows``: of :class:`~..cache.pool.MHAPool`."""
        if self.latent is not None:
            return MLAPool(
                num_layers=num_layers,
                num_pages=num_pages,
                width=self.head_dim,
                dtype=self.dtype,
                device=self.device,
            )
        return MHAPool(
            num_layers=num_layers,
            num_pages=num_pages,
            kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            **windows,
        )

    @classmethod
    def of(cls, loaded: "LoadedModel") -> "Shape":
        """Return the shape of a model's layers, with this rank's heads."""
        model, mla = loaded.config, loaded.config.mla
        return cls(
            device=loaded.device,
            dtype=loaded.dtype,
            num_heads=loaded.num_heads,
            num_kv_heads=loaded.num_kv_heads if mla is None else 1,
            head_dim=model.head_dim if mla is None else mla.latent_width,
            scale=model.attention_scale if mla is None else mla.softmax_scale,
            latent=None if mla is None else mla.kv_lora_rank,
            kinds=tuple(sorted({form.kind for form in loaded.model.forms}, key=repr)),
        )
