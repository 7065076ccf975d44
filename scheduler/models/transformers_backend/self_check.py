"""The check at load: packed requests over pages against a plain forward of each by transformers' attention.

That a class says its attention goes through transformers' interface does not show that nothing else looks
across tokens (convolutions, recurrent states). So three requests of random tokens are computed both ways, by
served weights: one in two chunks, one with a decode step. Where kernels are compiled, all of it is
done once more over them.

Invariants:
- A model that differs is refused with the figures; a state that its weights switch off is served.
- Nothing of the engine's pools is touched: the check has pages of its own.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...attention.paged_cpu import PagedCpuBackend
from ...attention.sdpa import SdpaBackend
from ...attention.shape import Shape
from ...cache.pool import MHAPool
from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels import TORCH, best
from ...runtime.engine_config import PAGE_SIZE
from ..causal_lm import result_of
from .probe import refused

if TYPE_CHECKING:
    from .model import TransformersForCausalLM

logger = logging.getLogger(__name__)

_LENGTHS = (9, 21, 5)
_STEPS = (((0, 9), (0, 13), (0, 4)), ((4, 5), (13, 21)))
"""First and end of the tokens of each step; the second step decodes request 2 and goes on with request 1."""
_ROWS = ((0, 1, 2), (2, 1))
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Norm of a token's difference over that of its hidden state; a leak gives 1, rounding a tenth of these."""


def check(model: "TransformersForCausalLM") -> None:
    """Compare with the weights that are loaded; CaesuraError UNSUPPORTED_MODEL if hidden states differ."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    requests = [torch.randint(0, vocab, (length,), generator=generator) for length in _LENGTHS]
    kinds: list[type[SdpaBackend | PagedCpuBackend]] = [SdpaBackend]
    if model.device.type == "cpu" and best("attention", model.device, model.dtype) != TORCH:
        kinds.append(PagedCpuBackend)
    with torch.inference_mode():
        expected = [_plain(model, tokens) for tokens in requests]
        found = [_paged(model, requests, kind) for kind in kinds]
    worst, where = 0.0, ""
    pairs = [
        (number, *pair) for each in found for number, pair in enumerate(zip(each, expected, strict=True))
    ]
    for number, ours, theirs in pairs:
        if not bool(theirs.isfinite().all()):
            logger.warning(
                "the check of %s says nothing: its weights give values that are not finite",
                model.config.architecture,
            )
            return
        gaps = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp_min(1e-30)
        gap, token = (float(each) for each in gaps.nan_to_num(torch.inf).max(dim=0))
        if gap > worst:
            worst, where = gap, f"token {token:.0f} of request {number}"
    if worst > _TOLERANCE.get(expected[0].dtype, 1e-3):
        raise refused(
            model.config.architecture,
            f"over pages and beside others, the hidden state of {where} differs by {worst:.2g} of its norm "
            "from a plain forward; something other than attention looks across tokens, or attention does "
            "what was not asked of it",
        )
    logger.info(
        "checked %s against transformers' attention: largest difference %.2g",
        model.config.architecture,
        worst,
    )


def _plain(model: "TransformersForCausalLM", tokens: Tensor) -> Tensor:
    config = model.module.config
    before = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        device = model.device
        return model.hidden(tokens.to(device), torch.arange(len(tokens), device=device)).clone()
    finally:
        config._attn_implementation = before


def _paged(
    model: "TransformersForCausalLM",
    requests: Sequence[Tensor],
    kind: type[SdpaBackend] | type[PagedCpuBackend],
) -> list[Tensor]:
    pages = [-(-len(tokens) // PAGE_SIZE) for tokens in requests]
    config = model.config
    pool = MHAPool(
        num_layers=config.num_layers,
        num_pages=1 + sum(pages),
        kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        dtype=model.dtype,
        device=model.device,
        page_size=PAGE_SIZE,
    )
    shape = Shape(
        device=model.device,
        dtype=model.dtype,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
    )
    backend: AttentionBackend = kind(pool, shape)
    ends = np.cumsum([1, *pages])
    held = [np.arange(*span) for span in pairwise(ends.tolist())]
    parts: list[list[Tensor]] = [[] for _ in requests]
    for rows, spans in zip(_ROWS, _STEPS, strict=True):
        tokens = [requests[row][start:end].numpy() for row, (start, end) in zip(rows, spans, strict=True)]
        sampled = np.arange(sum(map(len, tokens)))
        begins, of_rows = [start for start, _ in spans], [held[row] for row in rows]
        decode = sum(len(each) == 1 for each in tokens)
        batch = ForwardBatch.of_rows(tokens, begins, of_rows, sampled, model.device, num_decode=decode)
        backend.plan(batch)
        out = model.forward(batch, backend).clone()
        if not torch.allclose(
            out, result_of(model.forward_by_layer(batch, backend)), rtol=1e-3, atol=1e-5, equal_nan=True
        ):
            raise refused(config.architecture, "its layers cannot be computed one by one")
        for row, part in zip(rows, out.split([len(each) for each in tokens]), strict=True):
            parts[row].append(part)
    return [torch.cat(each) for each in parts]
