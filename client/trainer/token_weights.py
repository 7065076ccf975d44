""":func:`~caesura.client.importance_weights` for padded tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..connection.results import GenerateOutput
from ..importance import LARGEST_EXPONENT, masked_tokens


def importance_weights(
    learner_logprobs: Tensor,
    outputs: Sequence[GenerateOutput],
    *,
    mask: Tensor | None = None,
    epoch: int | None = None,
    max_staleness: int | None = None,
    mask_stale_kv: bool = False,
    clip_max: float = 2.0,
) -> Tensor:
    """Return :func:`caesura.client.importance_weights` without gradient, in the shape of
    ``learner_logprobs``.

    Args:
        learner_logprobs: [samples, tokens], at the sampling temperature; row ``i`` begins with the output
            tokens of ``outputs[i]``, followed by padding, whose weights are 0.
        outputs: the samples, with ``return_logprob``.
        mask: [samples, tokens]; tokens at which it is 0 or False get weight 0 as well.

    Raises:
        ValueError: shapes do not fit, a sample has no logprobs, or ``max_staleness`` comes without ``epoch``.
    """
    learner = learner_logprobs.detach()
    longest = max((len(output.output_ids) for output in outputs), default=0)
    if learner.dim() != 2 or len(learner) != len(outputs) or learner.shape[1] < longest:
        raise ValueError(
            f"learner_logprobs has the shape {list(learner.shape)};"
            f" it must be [{len(outputs)}, {longest} or more]"
        )
    if mask is not None and mask.shape != learner.shape:
        raise ValueError(f"mask has the shape {list(mask.shape)}, learner_logprobs {list(learner.shape)}")
    sampler = torch.zeros(learner.shape, dtype=torch.float32)
    counts = torch.zeros(learner.shape, dtype=torch.bool)
    for row, output in enumerate(outputs):
        if output.output_logprobs is None:
            raise ValueError(f"sample {row} has no logprobs: generate with return_logprob=True")
        length = len(output.output_ids)
        sampler[row, :length] = torch.tensor(output.output_logprobs)
        counts[row, :length] = True
        for masked in masked_tokens(
            output.weight_versions,
            length,
            epoch=epoch,
            max_staleness=max_staleness,
            mask_stale_kv=mask_stale_kv,
        ):
            counts[row, masked] = False
    counts = counts.to(learner.device)
    if mask is not None:
        counts &= mask.to(device=learner.device, dtype=torch.bool)
    ratio = (learner.float() - sampler.to(learner.device)).clamp(max=LARGEST_EXPONENT).exp()
    return torch.where(counts, ratio.clamp(max=clip_max), 0.0).to(learner.dtype)
