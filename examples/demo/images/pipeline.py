"""A Stable Diffusion 3 of 2.9 MB out of diffusers' and transformers' own classes, made from their
configurations.

Two small CLIP text encoders with random weights that stay as they are; no T5. Nothing is fetched.
"""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from .world import COLOURS, FILL, SIDE

LATENT = (4, 8, 8)
_START, _PAD, _END = "<|startoftext|>", "<|pad|>", "<|endoftext|>"
_MAX_TOKENS = 6
"""Tokens of a prompt: start, three words, end, and one of padding."""
_TEXT_WIDTH = 32
_WIDTHS = (16, 32, 32)
_DIM, _LAYERS, _HEADS = 64, 3, 4


def build(seed: int) -> StableDiffusion3Pipeline:
    """Return an untrained pipeline."""
    tokenizer = _tokenizer()
    encoders = [_text_encoder(len(tokenizer), seed + 1 + number) for number in range(2)]
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        sample_size=SIDE,
        block_out_channels=_WIDTHS,
        layers_per_block=1,
        latent_channels=LATENT[0],
        down_block_types=("DownEncoderBlock2D",) * len(_WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(_WIDTHS),
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    transformer = SD3Transformer2DModel(
        sample_size=LATENT[1],
        patch_size=2,
        in_channels=LATENT[0],
        out_channels=LATENT[0],
        num_layers=_LAYERS,
        num_attention_heads=_HEADS,
        attention_head_dim=_DIM // _HEADS,
        caption_projection_dim=_DIM,
        joint_attention_dim=2 * _TEXT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=LATENT[1],
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _text_encoder(vocab_size: int, seed: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_MAX_TOKENS,
            projection_dim=_TEXT_WIDTH,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    )
    for name, parameter in encoder.named_parameters():
        # CLIP's own scale of 0.02 gives all prompts nearly the same embeddings.
        if "token_embedding" in name:
            parameter.data.normal_(0, 1)
        elif parameter.dim() == 2 and "position" not in name:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)
    encoder.eval().requires_grad_(False)
    return encoder


def _tokenizer() -> CLIPTokenizer:
    """Return CLIP's tokenizer with one token for each word: a list of merges builds every word."""
    vocab = {_START: 0, _PAD: 1, _END: 2}
    merges: Any = []
    words = ["a", *COLOURS, *FILL]
    for word in words:
        for letter in _letters(word):
            vocab.setdefault(letter, len(vocab))
    for word in words:
        parts = _letters(word)
        for pair in merges:  # those of earlier words rank first, and apply here as well
            parts = _merged(parts, pair)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = _merged(parts, merges[-1])
            vocab.setdefault(parts[0], len(vocab))
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=_PAD, model_max_length=_MAX_TOKENS)


def _letters(word: str) -> list[str]:
    return [*word[:-1], word[-1] + "</w>"]


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@torch.no_grad()
def encode(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return embeddings [n, 6, 64] and pooled embeddings [n, 64] of ``prompts``."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds, pooled


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Return the pictures of ``latents`` [n, 4, 8, 8]."""
    decoded: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return decoded
