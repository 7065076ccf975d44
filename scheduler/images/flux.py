"""Flux (Black Forest Labs, 2024): CLIP's pooled output and T5's tokens, guidance as an input."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .image_request import Embeds
from .pipeline_family import PackedFamily, padded_ids, vae_scale


class Flux(PackedFamily):
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
