"""Flux (Black Forest Labs, 2024): CLIP's pooled output and T5's tokens, guidance as an input.

A latent is [tokens, 4 channels], packed 2 x 2, as the pipeline of diffusers and trainers have it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .family import Embeds, Family, packed_shape, padded_ids, unpacked, vae_scale


class Flux(Family):
    pipeline = "FluxPipeline"
    classes = {  # noqa: RUF012  (declared as a ClassVar above)
        "transformer": ("diffusers.FluxTransformer2DModel",),
        "vae": ("diffusers.AutoencoderKL",),
        "text_encoder": ("transformers.CLIPTextModel",),
        "text_encoder_2": ("transformers.T5EncoderModel",),
    }
    embed_names = ("prompt_embeds", "pooled_prompt_embeds")
    takes_negative = False

    @property
    def pixels(self) -> int:
        return 2 * vae_scale(self.vae)

    def is_guided(self, guidance_scale: float) -> bool:
        return False

    def tokenize(self, text: str, max_sequence_length: int) -> list[list[int]]:
        """Return ids padded to CLIP's fixed length, and to the request's length for T5."""
        clip, t5 = self.tokenizers
        return [padded_ids(clip, text, clip.model_max_length), padded_ids(t5, text, max_sequence_length)]

    def encoded_tokens(self, ids: Sequence[Sequence[int]], max_sequence_length: int) -> int:
        return len(ids[1])

    def encode(self, ids: Sequence[Tensor], max_sequence_length: int) -> Embeds:
        clip, t5 = self.encoders
        pooled = clip(ids[0], output_hidden_states=False).pooler_output
        return {"prompt_embeds": t5(ids[1])[0], "pooled_prompt_embeds": pooled}

    def embed_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        config = self.transformer.config
        if name == "pooled_prompt_embeds":
            return shape == (config.pooled_projection_dim,)
        return len(shape) == 2 and shape[0] > 0 and shape[1] == config.joint_attention_dim

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return packed_shape(height, width, self.pixels, self.transformer.config.in_channels)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        return latent_shape[0]

    def grid_arguments(self, steps: int) -> dict[str, Any]:
        """Return 1 to 1 / steps, which the scheduler then shifts."""
        return {"num_inference_steps": steps, "sigmas": np.linspace(1.0, 1 / steps, steps)}

    def velocity(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        rows, columns = size[0] // self.pixels, size[1] // self.pixels
        text = embeds["prompt_embeds"]
        axes = [torch.arange(count, device=x.device) for count in (1, rows, columns)]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(self.dtype)
        velocity: Tensor = self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=sigma * 1000 / 1000,  # the pipeline's timestep, divided again: the same bits
            guidance=guidance if self.transformer.config.guidance_embeds else None,
            pooled_projections=embeds["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device, dtype=self.dtype),
            img_ids=places.view(-1, 3),
            return_dict=False,
        )[0]
        return velocity

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        config = self.vae.config
        scaled = unpacked(latents, size, self.pixels) / config.scaling_factor + (config.shift_factor or 0.0)
        images: Tensor = self.vae.decode(scaled.to(next(self.vae.parameters()).dtype), return_dict=False)[0]
        return images
