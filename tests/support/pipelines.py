"""Tiny randomly initialised pipelines, written by diffusers and transformers from configs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from caesura.io_struct import GenerateImagesReqOutput

WORDS = ["a", "red", "green", "blue", "circle", "square"]
CLIP_TOKENS = 8
DTYPES = {"F32": np.float32, "U8": np.uint8, "I64": np.int64, "F16": np.float16}


def tensors_of(result: GenerateImagesReqOutput) -> dict[str, np.ndarray]:
    return {
        spec.name: np.frombuffer(result.buffers[spec.buffer], DTYPES[spec.dtype]).reshape(spec.shape)
        for spec in result.tensors
        if spec.dtype in DTYPES
    }


def clip_tokenizer() -> CLIPTokenizer:
    """Build a tokenizer with one token for each letter, and the encoders' length."""
    vocab = {"<|startoftext|>": 0, "<|pad|>": 1, "<|endoftext|>": 2}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
        vocab[f"{letter}</w>"] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token="<|pad|>", model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: number for number, word in enumerate(WORDS, 3)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=16,
    )


def _clip_config(vocab: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=12,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )


def _clip(seed: int, vocab: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    return _lively(CLIPTextModelWithProjection(_clip_config(vocab)))


def _t5(seed: int) -> T5EncoderModel:
    torch.manual_seed(seed)
    config = T5Config(vocab_size=len(WORDS) + 3, d_model=40, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return _lively(T5EncoderModel(config))


def _lively(module: Any) -> Any:
    """Scale random modules up: at their usual scale they hardly depend on input, and hide defects."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
    return module.eval().requires_grad_(False)


def _vae(seed: int, channels: int = 4) -> AutoencoderKL:
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        sample_size=16,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.3,
        shift_factor=0.1,
    )
    return vae.eval()


def make_sd3(
    path: Path, *, seed: int = 0, t5: bool = True, layers: int = 2, channels: int = 4, **scheduler: Any
) -> Path:
    """Write a pipeline of Stable Diffusion 3 for images of multiples of 8 pixels, about 60,000 parameters."""
    tokenizer = clip_tokenizer()
    vae = _vae(seed, channels)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        num_attention_heads=2,
        attention_head_dim=16,
        caption_projection_dim=32,
        joint_attention_dim=40,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=_lively(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=vae,
        text_encoder=_clip(seed + 1, len(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=_clip(seed + 2, len(tokenizer)),
        tokenizer_2=tokenizer,
        text_encoder_3=_t5(seed + 3) if t5 else None,
        tokenizer_3=t5_tokenizer() if t5 else None,
    )
    pipeline.save_pretrained(path)
    return path


def make_flux(path: Path, *, seed: int = 0, guidance: bool = True) -> Path:
    """Write a pipeline of Flux for images of multiples of 8 pixels, with dynamic shifting."""
    tokenizer = clip_tokenizer()
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=40,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=guidance,
    )
    pipeline = FluxPipeline(
        transformer=_lively(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=4),
        vae=_vae(seed),
        text_encoder=_lively(CLIPTextModel(_clip_config(len(tokenizer)))),
        tokenizer=tokenizer,
        text_encoder_2=_t5(seed + 3),
        tokenizer_2=t5_tokenizer(),
    )
    pipeline.save_pretrained(path)
    return path


def qwen_tokenizer() -> Qwen2Tokenizer:
    letters = sorted(ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token=special[0], extra_special_tokens=special[1:])


def make_qwen_image(path: Path, *, seed: int = 0) -> Path:
    """Write a pipeline of Qwen-Image for images of multiples of 8 pixels."""
    tokenizer = qwen_tokenizer()
    torch.manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.1, 0.9, 1.2, 1.0],
    )
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
            "vocab_size": len(tokenizer),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    )
    pipeline = QwenImagePipeline(
        transformer=_lively(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=4, shift_terminal=0.02
        ),
        vae=vae.eval(),
        text_encoder=_lively(Qwen2_5_VLForConditionalGeneration(config)),
        tokenizer=tokenizer,
    )
    pipeline.save_pretrained(path)
    return path


def load_pipeline(path: Path, kind: Any = StableDiffusion3Pipeline) -> Any:
    index = json.loads((path / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    pipeline = kind.from_pretrained(path, local_files_only=True, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
