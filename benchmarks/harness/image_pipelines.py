"""Stable Diffusion 3 pipelines of random weights, written from their configurations: nothing is fetched."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

_TEXT_TOKENS = 16
_CHANNELS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer and its images."""

    layers: int
    heads: int
    width: int
    """Hidden size, a multiple of ``heads``."""
    side: int
    """Pixels of an image; a latent has a quarter of them."""
    text_layers: int = 2
    """Layers of each of the two text encoders."""
    text_width: int = 32


SHAPES = {
    "tiny": Shape(layers=3, heads=4, width=64, side=32),
    "small": Shape(layers=8, heads=8, width=512, side=128),
    "even": Shape(layers=8, heads=8, width=512, side=128, text_layers=12, text_width=768),
}


def write_pipeline(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write a pipeline without T5 to ``folder``."""
    torch.manual_seed(seed)
    latent = shape.side // 4
    tokenizer = _tokenizer()
    vae = AutoencoderKL(
        sample_size=shape.side,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    transformer = SD3Transformer2DModel(
        sample_size=latent,
        patch_size=2,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=shape.layers,
        num_attention_heads=shape.heads,
        attention_head_dim=shape.width // shape.heads,
        caption_projection_dim=shape.width,
        joint_attention_dim=2 * shape.text_width,
        pooled_projection_dim=2 * shape.text_width,
        pos_embed_max_size=latent,
        qk_norm="rms_norm",
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=_text_encoder(len(tokenizer), shape),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(len(tokenizer), shape),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(folder)
    return folder


def _tokenizer() -> CLIPTokenizer:
    """Return a tokenizer with one token for each letter."""
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        vocab |= {letter: len(vocab), f"{letter}</w>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=_TEXT_TOKENS)


def _text_encoder(vocab_size: int, shape: Shape) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=shape.text_width,
            intermediate_size=2 * shape.text_width,
            num_hidden_layers=shape.text_layers,
            num_attention_heads=4,
            max_position_embeddings=_TEXT_TOKENS,
            projection_dim=shape.text_width,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
