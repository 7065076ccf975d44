"""Attention of every form as transformers' eager code computes it, and forms to try."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from caesura.scheduler.kernels.attention_form import AttentionForm


def attended(products: Tensor, v: Tensor, start: int, form: AttentionForm, scale: float) -> Tensor:
    """Return the dense attention of the tokens from position ``start`` on.

    Args:
        products: [kv heads, group, T, S] of queries and keys, not scaled.
        v: [S, kv heads, value size].
        scale: of a form that has none.

    Returns:
        [T, heads, value size]
    """
    kv_heads, group, tokens, positions = products.shape
    scores = products * (scale if form.scale is None else form.scale)
    if form.softcap is not None:
        scores = (scores / form.softcap).tanh() * form.softcap
    behind = torch.arange(start, start + tokens)[:, None] - torch.arange(positions)
    hidden = (behind < 0) | (behind >= (form.window or positions))
    scores = scores.masked_fill(hidden, -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, tokens, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :positions]
    return torch.einsum("kgts,skd->tkgd", weights, v).reshape(tokens, kv_heads * group, -1)


def forms(heads: int, dtype: torch.dtype) -> st.SearchStrategy[AttentionForm]:
    """Return every combination, in windows around what blocks and pages are cut at."""
    scores = st.lists(st.floats(-8, 8), min_size=heads, max_size=heads)
    return st.builds(
        AttentionForm,
        window=st.none() | st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 100, 1000]),
        softcap=st.none() | st.sampled_from([0.5, 5.0, 50.0]),
        scale=st.none() | st.sampled_from([0.01, 0.3, 2.0]),
        sinks=st.none() | scores.map(lambda values: torch.tensor(values).to(dtype)),
    )
