"""Log-probabilities of prompt tokens, from the hidden states of the step that computes the prompt.

Invariant: logits exist for a bounded number of positions at a time, whatever the length of the prompt.

They are the log-softmax of the logits as they are: no temperature, no edits, as in SGLang.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .forward import FurtherLogprobs, InputTokens
from .logit_edits import further_of, joined

_BLOCK_BYTES_CPU = 10 << 20
_BLOCK_BYTES = 128 << 20
_LEAST_ROWS = 16
"""Fewer are hardly faster, since the head's weights must be read all the same."""


def input_logprobs(
    hidden: Tensor, inputs: InputTokens, head: Callable[[Tensor], Tensor | None], vocab_size: int
) -> FurtherLogprobs:
    """Of ``inputs``, whose hidden states are ``hidden`` [I, hidden]; ``head`` gives logits [rows, vocabulary] of such rows."""
    bound = _BLOCK_BYTES_CPU if hidden.device.type == "cpu" else _BLOCK_BYTES
    rows = max(_LEAST_ROWS, bound // (4 * vocab_size))
    parts = []
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        logits = head(hidden[block])
        assert logits is not None, "a dummy run has no prompts"
        logprobs = torch.log_softmax(logits.float(), 1)
        parts.append(further_of(logprobs, inputs.targets[block], inputs.top, inputs.token_ids[block]))
    return joined(parts)
