"""Qwen-Image (Wu et al., 2025, arXiv:2508.02324): a Qwen2.5-VL as text encoder, guidance that keeps the norm.

The prompt stands in a template, whose first tokens are cut from the embeddings. Prompts have different
lengths: what is shorter is padded behind, and a mask says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .image_request import Embeds
from .pipeline_family import PackedFamily, unsupported

_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""The model was trained with it."""
_CUT = 34
"""Tokens of the template before the prompt, with the tokenizer of the model."""


class QwenImage(PackedFamily):
    pipeline = "QwenImagePipeline"
    classes = {  # noqa: RUF012  (declared as a ClassVar above)
        "transformer": ("diffusers.QwenImageTransformer2DModel",),
        "vae": ("diffusers.AutoencoderKLQwenImage",),
        "text_encoder": ("transformers.Qwen2_5_VLForConditionalGeneration",),
    }
    embed_names = ("prompt_embeds", "prompt_embeds_mask")
    vae_has_state = True

    def __init__(
        self, modules: Mapping[str, Any], tokenizers: Sequence[Any], scheduler_config: dict[str, Any]
    ) -> None:
        super().__init__(modules, tokenizers, scheduler_config)
        if self.transformer.config.guidance_embeds:
            raise unsupported("transformer/config.json: guidance_embeds")

    @property
    def pixels(self) -> int:
        return int(2 * 2 ** len(self.vae.config.temperal_downsample))

    @property
    def vae_channels(self) -> int:
        """Channels of the last block, half of those that the one before ends with."""
        return int(self.vae.config.base_dim)

    def tokenize(self, text: str, max_sequence_length: int) -> list[list[int]]:
        length = max_sequence_length + _CUT
        found = self.tokenizers[0]([_TEMPLATE.format(text)], max_length=length, truncation=True)
        return [found["input_ids"][0]]

    def align(
        self, ids: list[list[int]], against: list[list[int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        length = max(len(ids[0]), len(against[0]))
        padding = [self.tokenizers[0].pad_token_id]
        one, other = ([each[0] + padding * (length - len(each[0]))] for each in (ids, against))
        return one, other

    def encoded_tokens(self, ids: Sequence[Sequence[int]], max_sequence_length: int) -> int:
        return len(ids[0]) - _CUT

    def encode(self, ids: Sequence[Tensor], max_sequence_length: int) -> Embeds:
        """Return the last hidden states behind the template, with zeros for padding."""
        mask = (ids[0] != self.tokenizers[0].pad_token_id).long()
        found = self.encoders[0](
            input_ids=ids[0],
            attention_mask=mask,
            output_hidden_states=True,
            logits_to_keep=1,  # nobody reads them, and those of all tokens are the largest tensor there is
        )
        mask = mask[:, _CUT:]
        last = found.hidden_states[-1][:, _CUT:]
        return {"prompt_embeds": last * mask[..., None].to(last.dtype), "prompt_embeds_mask": mask}

    def velocity(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        shape = (1, size[0] // self.pixels, size[1] // self.pixels)
        velocity: Tensor = self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=sigma * 1000 / 1000,  # the pipeline's timestep, divided again: the same bits
            encoder_hidden_states_mask=embeds.get("prompt_embeds_mask"),
            encoder_hidden_states=embeds["prompt_embeds"],
            img_shapes=[[shape]] * len(x),
            return_dict=False,
        )[0]
        return velocity

    def trimmed(self, embeds: Embeds) -> Embeds:
        """Leave the mask out where there is no padding; with it, the transformer looks at its values."""
        if bool(embeds["prompt_embeds_mask"].all()):
            return {"prompt_embeds": embeds["prompt_embeds"]}
        return embeds

    def guide(self, negative: Tensor, positive: Tensor, scale: Tensor) -> Tensor:
        """Apply guidance with the norm of the prompt's own velocity, token by token."""
        guided = super().guide(negative, positive, scale)
        norms = [torch.norm(each, dim=-1, keepdim=True) for each in (positive, guided)]
        scaled: Tensor = guided * (norms[0] / norms[1])
        return scaled

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Decode latents as a video of one frame, with the mean and std of each channel."""
        config = self.vae.config
        frames = self.unpacked(latents, size)[:, :, None]
        mean, std = (
            torch.tensor(each, device=latents.device).view(1, -1, 1, 1, 1)
            for each in (config.latents_mean, config.latents_std)
        )
        scaled = (frames * std + mean).to(next(self.vae.parameters()).dtype)
        images: Tensor = self.vae.decode(scaled, return_dict=False)[0][:, :, 0]
        return images
