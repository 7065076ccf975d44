"""Tokens that top-k, top-p and min-p keep, one by one in float64."""

import numpy as np

from caesura.io_struct import SamplingParams

UNDERFLOW = 1e-36
"""Relative to the likeliest token: below it a weight may be 0 in float32, and the token can then not be
sampled.
"""


def kept_tokens(logits: np.ndarray, params: SamplingParams, slack: float = 0.0) -> set[int]:
    """Return the tokens kept of float32 ``logits`` [V]. ``slack`` is added to the bounds, relatively."""
    if params.temperature < 1e-6:
        return {int(np.argmax(logits))}
    scaled = logits / np.float32(params.temperature)
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = [token for token in order if scaled[token] > -np.inf]
    weights = np.exp(scaled.astype(np.float64) - float(scaled[order[0]]))
    if params.top_k > 0:
        order = order[: params.top_k]
    enough = params.top_p * (1 + slack) * sum(weights[token] for token in order)
    found: set[int] = set()
    mass = 0.0
    for token in order:
        if found and params.top_p < 1 and mass >= enough:
            break
        if found and weights[token] < max(params.min_p * (1 - slack), UNDERFLOW if slack < 0 else 0.0):
            break
        mass += weights[token]
        found.add(token)
    return found
