"""Differences between text-to-image models of flow matching: encoding, the transformer's inputs, decoding.

Invariants:
- A family calls the pipeline's own modules and repeats what the pipeline of diffusers does around them.
  Latents, sigmas and noise belong to the steps (``scheduler_step.py``, ``runner.py``).
- Everything has a batch dimension; rows do not see each other, and may differ in sigma and guidance scale.
- The names of embeddings are those of the pipeline's arguments.
"""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from ...io_struct import CaesuraError, ErrorCode
from ..runtime.files import checkpoint_error
from .image_request import Embeds

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 100, 20
_KEPT_GRIDS = 64
"""Grids of sigmas that are kept: making one takes a millisecond, in which no step is made."""
MAX_IDS = 4096
"""Token ids of one prompt for a text encoder whose config has no limit."""


class Family(ABC):
    pipeline: ClassVar[str]
    """Class of the pipeline, as in its ``model_index.json``."""
    classes: ClassVar[Mapping[str, tuple[str, ...]]]
    """Classes that each component may have, as ``library.Class``; in the order of the text encoders."""
    optional: ClassVar[frozenset[str]] = frozenset()
    takes_negative: ClassVar[bool] = True
    embed_names: ClassVar[tuple[str, ...]]
    """Names of the embeddings of one prompt."""
    vae_has_state: ClassVar[bool] = False

    def __init__(
        self, modules: Mapping[str, Any], tokenizers: Sequence[Any], scheduler_config: dict[str, Any]
    ) -> None:
        """``tokenizers`` are those of the text encoders that the folder has, in their order."""
        self.modules = modules
        self.tokenizers = tokenizers
        self.transformer: Any = modules["transformer"]
        self.vae: Any = modules["vae"]
        self.encoders: list[Any] = [
            modules[name] for name in self.classes if name in modules and name.startswith("text_")
        ]
        self.scheduler_config = scheduler_config
        self._grid = lru_cache(maxsize=_KEPT_GRIDS)(self._make_grid)
        if scheduler_config.get("invert_sigmas"):
            raise unsupported("scheduler/scheduler_config.json: invert_sigmas")

    @classmethod
    def load(cls, root: Path, modules: Mapping[str, Any], names: Mapping[str, str]) -> Self:
        """Return the family of the folder ``root``; ``names``: component to the name of its class."""
        encoders = [name for name in cls.classes if name in modules and name.startswith("text_")]
        wanted = [name.replace("text_encoder", "tokenizer") for name in encoders]
        try:
            tokenizers = [
                getattr(transformers, names[name]).from_pretrained(root / name, local_files_only=True)
                for name in wanted
            ]
            scheduler = FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise checkpoint_error(root, f"its tokenizers or scheduler cannot be read: {error}") from error
        return cls(modules, tokenizers, dict(scheduler))

    @property
    def dtype(self) -> torch.dtype:
        parameter: Tensor = next(self.transformer.parameters())
        return parameter.dtype

    @property
    @abstractmethod
    def pixels(self) -> int:
        pass

    @property
    def vae_channels(self) -> int:
        return int(self.vae.config.block_out_channels[:2][-1])

    @property
    def longest_side(self) -> int | None:
        """Largest width and height in pixels, or None without a limit."""
        return None

    def is_guided(self, guidance_scale: float) -> bool:
        """Return True if guidance takes a second row, of the negative prompt."""
        return guidance_scale > 1.0

    @abstractmethod
    def tokenize(self, text: str, max_sequence_length: int) -> list[list[int]]:
        pass

    def align(
        self, ids: list[list[int]], against: list[list[int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return ids of a prompt and its negative prompt, padded to the same lengths if the family can."""
        return ids, against

    def check_ids(self, ids: Sequence[Sequence[int]], field: str) -> None:
        """Refuse ids that are not one list for each encoder, of tokens that it knows."""
        if len(ids) != len(self.encoders):
            raise invalid(field, len(ids), f"needs ids for {len(self.encoders)} text encoders")
        for encoder, row in zip(self.encoders, ids, strict=True):
            text = encoder.config.get_text_config()
            longest = getattr(text, "max_position_embeddings", MAX_IDS)
            if not row or max(row) >= text.vocab_size or len(row) > longest:
                reason = (
                    f"has {len(row)} ids for a text encoder with {text.vocab_size} tokens and "
                    f"at most {longest} of them"
                )
                raise invalid(field, len(row), reason)

    @abstractmethod
    def encoded_tokens(self, ids: Sequence[Sequence[int]], max_sequence_length: int) -> int:
        """Return the tokens of ``prompt_embeds`` that :meth:`encode` makes; less than 1 if none."""

    @abstractmethod
    def encode(self, ids: Sequence[Tensor], max_sequence_length: int) -> Embeds:
        """Return embeddings of prompts: int64 [prompts, tokens] for each encoder."""

    def embed_bytes(self, tokens: int) -> int:
        """Return the bytes of ``prompt_embeds`` of so many tokens; the rest takes little beside them."""
        width: int = self.transformer.config.joint_attention_dim
        return tokens * width * self.dtype.itemsize

    def embed_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if an embedding given by a client may have ``shape``."""
        config = self.transformer.config
        if name == "pooled_prompt_embeds":
            return shape == (config.pooled_projection_dim,)
        if name == "prompt_embeds_mask":
            return len(shape) == 1
        return len(shape) == 2 and shape[0] > 0 and shape[1] == config.joint_attention_dim

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        pass

    @property
    def latent_bytes_per_pixel(self) -> float:
        """Bytes of a latent as results have it, float32, for each pixel."""
        return 4 * prod(self.latent_shape(self.pixels, self.pixels)) / self.pixels**2

    def sigmas(self, steps: int, shift: float | None, latent_shape: tuple[int, ...]) -> np.ndarray:
        """Return the pipeline's grid, float32 [steps + 1], with ``shift`` in place of its own unless None."""
        dynamic = shift is None and self.scheduler_config.get("use_dynamic_shifting")
        return self._grid(steps, shift, self.mu(latent_shape) if dynamic else None).copy()

    def _make_grid(self, steps: int, shift: float | None, mu: float | None) -> np.ndarray:
        changed = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config({**self.scheduler_config, **changed})
        scheduler.set_timesteps(mu=mu, **self.grid_arguments(steps))
        grid: np.ndarray = scheduler.sigmas.numpy()
        return grid

    def grid_arguments(self, steps: int) -> dict[str, Any]:
        """Return what the pipeline gives its scheduler for ``steps`` steps."""
        return {"num_inference_steps": steps}

    def mu(self, latent_shape: tuple[int, ...]) -> float:
        """Return the shift of dynamic shifting, linear in the number of image tokens."""
        config = self.scheduler_config
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        base, most = config.get("base_shift", 0.5), config.get("max_shift", self.default_max_shift)
        slope = (most - base) / (high - low)
        return float(self.image_tokens(latent_shape) * slope + (base - slope * low))

    default_max_shift: ClassVar[float] = 1.15

    @abstractmethod
    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        pass

    @abstractmethod
    def velocity(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Return the transformer's output, shaped as ``x`` float32 [rows, …latent]; ``sigma`` float32 [rows].

        ``guidance``: float32 [rows], for transformers that take it; ``size``: height and width of the images.
        """

    def trimmed(self, embeds: Embeds) -> Embeds:
        """Return the embeddings that :meth:`velocity` needs: a mask that masks nothing is left out."""
        return embeds

    def guide(self, negative: Tensor, positive: Tensor, scale: Tensor) -> Tensor:
        """Apply classifier-free guidance (Ho and Salimans, 2022, arXiv:2207.12598)."""
        return negative + scale * (positive - negative)

    def unpacked(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Return latents as [rows, channels, height, width]."""
        return latents

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Return images [rows, 3, height, width], about -1 to 1; here by an AutoencoderKL."""
        config = self.vae.config
        scaled = self.unpacked(latents, size) / config.scaling_factor + (config.shift_factor or 0.0)
        scaled = scaled.to(next(self.vae.parameters()).dtype)
        if scaled.device.type == "cpu":  # whose convolutions would reorder pixels before and after
            scaled = scaled.contiguous(memory_format=torch.channels_last)
        images: Tensor = self.vae.decode(scaled, return_dict=False)[0]
        return images


class PackedFamily(Family):
    """Elements of a latent are packed 2 x 2 into tokens: [tokens, 4 channels], as the pipelines have it."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        tokens = (height // self.pixels) * (width // self.pixels)
        return tokens, self.transformer.config.in_channels

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        return latent_shape[0]

    def grid_arguments(self, steps: int) -> dict[str, Any]:
        """Return 1 to 1 / steps, which the scheduler then shifts."""
        return {"num_inference_steps": steps, "sigmas": np.linspace(1.0, 1 / steps, steps)}

    def unpacked(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        rows, columns = size[0] // self.pixels, size[1] // self.pixels
        blocks = latents.view(len(latents), rows, columns, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return blocks.reshape(len(latents), -1, 2 * rows, 2 * columns)


def to_pixels(images: Tensor) -> Tensor:
    """Return what :meth:`Family.decode` returns as uint8 [rows, height, width, 3]."""
    levels = ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def vae_scale(vae: nn.Module) -> int:
    config: Any = vae.config
    return int(2 ** (len(config.block_out_channels) - 1))


def padded_ids(tokenizer: Any, text: str, length: int) -> list[int]:
    found = tokenizer([text], padding="max_length", max_length=length, truncation=True)
    ids: list[int] = found["input_ids"][0]
    return ids


def invalid(field: str, value: object, requirement: str) -> CaesuraError:
    """Return the error of a field of a request; a long value is shortened: answers and logs repeat it."""
    said = _SHORT.repr(value)
    reason = f"{field} = {said}: {requirement}"
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, reason, field=field, value=value if said == repr(value) else said
    )


def unsupported(what: str, field: str = "model_path") -> CaesuraError:
    return CaesuraError(ErrorCode.UNSUPPORTED, f"{what} is not supported", field=field)
