"""Blocks of image and text tokens by fewer operations: norms, gates, heads and GELUs in one pass over memory.

Invariants:
- Products and weights are the modules' own, packed or not. The results are those of diffusers' blocks, but
  for the order of sums.
- What has another form than the blocks below is left to diffusers.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..kernels.modulation import (
    add_and_modulate,
    add_gated,
    gelu_of_product,
    join_heads,
    joint_attention,
    modulate,
)


def use_joint_blocks(module: nn.Module) -> None:
    """Replace how joint blocks, their attention, and GELUs with tanh within ``module`` compute."""
    from diffusers.models.activations import GELU  # an extra
    from diffusers.models.attention import JointTransformerBlock
    from diffusers.models.attention_processor import JointAttnProcessor2_0
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    for each in module.modules():
        block: Any = each
        if type(each) is GELU and block.approximate == "tanh":
            block.forward = partial(_gelu, block.proj)
        elif type(each) is FluxTransformerBlock:
            block.forward = partial(_block, block)
        elif type(each) is JointTransformerBlock and not block.use_dual_attention:
            block.forward = partial(_block, block)
            attn = block.attn
            norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
            known = {type(norm) for norm in norms} in ({type(None)}, {RMSNorm})
            if known and type(attn.processor) is JointAttnProcessor2_0:
                attn.forward = partial(_attention, attn)


def _block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **further: Any,
) -> tuple[Tensor | None, Tensor]:
    """Compute image tokens and text tokens [samples, tokens, width]; of the last block only the image's."""
    image, text = hidden_states, encoder_hidden_states
    shift, scale, gate, *of_mlp = block.norm1.linear(block.norm1.silu(temb)).chunk(6, dim=1)
    of_text = block.norm1_context.linear(block.norm1_context.silu(temb))
    last = getattr(block, "context_pre_only", False)
    if last:
        text_scale, text_shift = of_text.chunk(2, dim=1)
    else:
        text_shift, text_scale, text_gate, *of_text_mlp = of_text.chunk(6, dim=1)
    attended, text_attended = block.attn(
        hidden_states=modulate(image, scale, shift, block.norm1.norm.eps),
        encoder_hidden_states=modulate(text, text_scale, text_shift, block.norm1_context.norm.eps),
        **(joint_attention_kwargs or {}),
        **further,
    )
    image = _feed_forward(image, attended, gate, of_mlp, block.norm2, block.ff)
    if last:
        return None, image
    text = _feed_forward(text, text_attended, text_gate, of_text_mlp, block.norm2_context, block.ff_context)
    return text, image


def _feed_forward(
    x: Tensor, attended: Tensor, gate: Tensor, of_mlp: list[Tensor], norm: Any, feed_forward: Any
) -> Tensor:
    shift, scale, mlp_gate = of_mlp
    total, modulated = add_and_modulate(x, attended, gate, scale, shift, norm.eps)
    made: Tensor = add_gated(total, feed_forward(modulated), mlp_gate)
    return made


def _gelu(layer: nn.Linear, x: Tensor) -> Tensor:
    made: Tensor = gelu_of_product(x, layer.weight, layer.bias, layer.forward)
    return made


def _attention(attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    image, text = hidden_states, encoder_hidden_states
    joined = [
        join_heads(of_image(image), of_text(text), attn.heads, *_norms(norm, text_norm))
        for of_image, of_text, norm, text_norm in (
            (attn.to_q, attn.add_q_proj, attn.norm_q, attn.norm_added_q),
            (attn.to_k, attn.add_k_proj, attn.norm_k, attn.norm_added_k),
            (attn.to_v, attn.add_v_proj, None, None),
        )
    ]
    attended = joint_attention(*joined).flatten(2)
    tokens = image.shape[1]
    image, text = attn.to_out[0](attended[:, :tokens]), attended[:, tokens:]
    return image, text if attn.context_pre_only else attn.to_add_out(text)


def _norms(norm: Any, text_norm: Any) -> tuple[Tensor | None, Tensor | None, float]:
    if norm is None:
        return None, None, 0.0
    return norm.weight, text_norm.weight, norm.eps
