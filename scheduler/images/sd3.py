"""Stable Diffusion 3 (Esser et al., 2024, arXiv:2403.03206): two CLIP encoders, T5 if the folder has it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .image_request import Embeds
from .pipeline_family import Family, invalid, padded_ids, vae_scale

_TIMESTEPS = 1000
"""The transformer's timestep at sigma 1."""


class StableDiffusion3(Family):
    pipeline = "StableDiffusion3Pipeline"
    classes = {  # noqa: RUF012  (declared as a ClassVar above)
        "transformer": ("diffusers.SD3Transformer2DModel",),
        "vae": ("diffusers.AutoencoderKL",),
        "text_encoder": ("transformers.CLIPTextModelWithProjection",),
        "text_encoder_2": ("transformers.CLIPTextModelWithProjection",),
        "text_encoder_3": ("transformers.T5EncoderModel",),
    }
    optional = frozenset({"text_encoder_3"})
    embed_names = ("prompt_embeds", "pooled_prompt_embeds")
    default_max_shift = 1.16

    @property
    def pixels(self) -> int:
        return int(vae_scale(self.vae) * self.transformer.config.patch_size)

    @property
    def longest_side(self) -> int | None:
        """Rows of the table of positions, in pixels."""
        longest = self.transformer.config.pos_embed_max_size
        return None if longest is None else int(longest * self.pixels)

    def tokenize(self, text: str, max_sequence_length: int) -> list[list[int]]:
        """Return ids padded to CLIP's fixed length, and to the request's length for T5."""
        clip = self.tokenizers[0].model_max_length
        ids = [padded_ids(tokenizer, text, clip) for tokenizer in self.tokenizers[:2]]
        return ids + [padded_ids(t5, text, max_sequence_length) for t5 in self.tokenizers[2:]]

    def check_ids(self, ids: Sequence[Sequence[int]], field: str) -> None:
        """Require as many ids for both CLIPs, whose tokens stand beside each other."""
        super().check_ids(ids, field)
        if len(ids[0]) != len(ids[1]):
            raise invalid(field, [*map(len, ids)], "the first two encoders need as many ids as each other")

    def encoded_tokens(self, ids: Sequence[Sequence[int]], max_sequence_length: int) -> int:
        """Return the tokens of CLIP, and those of T5 or as many zeros."""
        if not all(ids):
            return 0
        return len(ids[0]) + (len(ids[2]) if len(ids) > 2 else max_sequence_length)

    def encode(self, ids: Sequence[Tensor], max_sequence_length: int) -> Embeds:
        """Return CLIP's last layers but one beside each other, and behind them T5's output or zeros."""
        clip = [
            encoder(each, output_hidden_states=True)
            for encoder, each in zip(self.encoders[:2], ids[:2], strict=True)
        ]
        embeds = torch.cat([each.hidden_states[-2] for each in clip], dim=-1)
        width = self.transformer.config.joint_attention_dim
        embeds = pad(embeds, (0, width - embeds.shape[-1]))
        if len(ids) > 2:
            further = self.encoders[2](ids[2])[0].to(embeds.dtype)
        else:
            further = embeds.new_zeros((len(embeds), max_sequence_length, width))
        embeds = torch.cat([embeds, further], dim=-2)
        pooled = torch.cat([each[0] for each in clip], dim=-1)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        scale = vae_scale(self.vae)
        return self.transformer.config.in_channels, height // scale, width // scale

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        patch = self.transformer.config.patch_size
        return int((latent_shape[1] // patch) * (latent_shape[2] // patch))

    def velocity(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=sigma * _TIMESTEPS,
            encoder_hidden_states=embeds["prompt_embeds"],
            pooled_projections=embeds["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity
