"""Records the output of steps of images, and builds the results of samples.

Invariants:
- I2: a result has a log-probability for each of its step indices, a latent for each of its latent indices,
  and spans that cover its steps; what was not made is not there.
- A step is recorded for all of its samples or for none of them.
- A result is a copy in memory of its own: it outlives its sample, and must neither keep anything else alive
  nor lie between the large blocks that steps take and free.
"""

import logging
import mmap
from collections.abc import Sequence
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...io_struct import FinishReason, GenerateImagesReqOutput, ResultTensor
from ..runtime.dtypes import NAMES
from ..scheduling.outputs import Outputs
from .image_batcher import ImageBatcher
from .image_request import Conditioning, ImageBatch, ImageRequest, Prompt
from .runner import Denoised, Encoded, HostResult

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

_ALIGN = 64

TRAIN_TIMESTEPS = 1000
"""Timestep at sigma 1, in the terms of trainers and of diffusers."""


class ImageOutputs(Outputs[ImageRequest]):
    def __init__(self, engine: "Engine", batcher: ImageBatcher) -> None:
        super().__init__(engine)
        self._batcher = batcher

    def record(self, batch: ImageBatch, output: HostResult) -> None:
        if isinstance(output, Encoded):
            for prompt, embeds in zip(output.prompts, output.embeds, strict=True):
                prompt.embeds = embeds
        elif isinstance(output, np.ndarray):
            for sample, image in zip(batch.samples, output, strict=True):
                sample.image = image
                self._complete(sample)
        else:
            self._record_denoised(batch.samples, output)

    def _result(self, sample: ImageRequest, reason: FinishReason) -> GenerateImagesReqOutput:
        tensors = _tensors(sample, reason)
        buffers = in_a_mapping([each.reshape(-1).view(torch.uint8).numpy() for each in tensors.values()])
        now = monotonic()
        return GenerateImagesReqOutput(
            rid=sample.rid,
            index=sample.index,
            finish_reason=reason,
            weight_versions=sample.version_spans(),
            seed=sample.seed,
            steps=sample.steps,
            steps_done=sample.step,
            step_indices=sorted(sample.log_probs),
            latent_indices=sorted(sample.latents),
            tensors=[
                ResultTensor(name=name, dtype=NAMES[each.dtype], shape=list(each.shape), buffer=number)
                for number, (name, each) in enumerate(tensors.items())
            ],
            num_retractions=sample.num_retractions,
            queue_time=(sample.first_scheduled or now) - sample.arrival,
            e2e_latency=now - sample.arrival,
        ).with_buffers(buffers)

    def _lost_result(self, sample: ImageRequest, reason: FinishReason) -> GenerateImagesReqOutput:
        return GenerateImagesReqOutput(
            rid=sample.rid,
            index=sample.index,
            finish_reason=reason,
            weight_versions=[],
            seed=sample.seed,
            steps=sample.steps,
            steps_done=0,
        )

    def _release(self, sample: ImageRequest, *, waited: bool, keep_prefix: bool) -> None:
        # The queue may refer to a finished sample for a while: what is large goes now.
        sample.latent, sample.conditioning = None, _NO_CONDITIONING
        self._batcher.retire(sample)

    def _record_denoised(self, samples: list[ImageRequest], output: Denoised) -> None:
        broken = []
        # This may raise: nothing has changed yet.
        kept = [_on_host(sample, output, row) for row, sample in enumerate(samples)]
        for row, (sample, (before, after)) in enumerate(zip(samples, kept, strict=True)):
            if not output.finite[row]:
                broken.append(sample)
                continue
            value = output.log_probs[row]
            if value is not None:
                sample.log_probs[sample.step], sample.stds[sample.step] = value, output.rows[row].std
                sample.latents[sample.step], sample.latents[sample.step + 1] = before, after
            sample.open_span(self._stamp)
            sample.latent = output.after[row]
            sample.step += 1
            self.generated_tokens += 1
            if sample.is_denoised and sample.message.output == "latents":
                self._complete(sample)
        if broken:
            logger.error(
                "%d samples: latents are not finite (weights epoch %d)", len(broken), self._stamp.epoch
            )
            self.fail(broken, "the latents are not finite: check the weights")

    def _complete(self, sample: ImageRequest) -> None:
        self.finish(sample, FinishReason(type="length", length=sample.steps))


_NOTHING = np.empty(0, np.float32)
_NO_CONDITIONING = Conditioning(Prompt(None))


def _on_host(sample: ImageRequest, output: Denoised, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return latents before and after a step that the request keeps; none is copied twice."""
    if output.log_probs[row] is None:
        return _NOTHING, _NOTHING
    before = sample.latents.get(sample.step)
    return (_copy(output.before[row]) if before is None else before), _copy(output.after[row])


def _copy(latent: Tensor) -> np.ndarray:
    # A row on the CPU would keep the rows of all samples of its step.
    copied: np.ndarray = latent.cpu().numpy().copy()
    return copied


def _tensors(sample: ImageRequest, reason: FinishReason) -> dict[str, Tensor]:
    steps, places = sorted(sample.log_probs), sorted(sample.latents)
    tensors: dict[str, np.ndarray | Tensor] = {
        "timesteps": sample.sigmas[:-1] * np.float32(TRAIN_TIMESTEPS),
        "sigmas": sample.sigmas,
    }
    if places:
        tensors["latents"] = np.stack([sample.latents[place] for place in places])
        tensors["log_probs"] = np.asarray([sample.log_probs[step] for step in steps], np.float32)
        tensors["noise_stds"] = np.asarray([sample.stds[step] for step in steps], np.float32)
    conditioning = sample.conditioning
    if sample.message.return_embeds:
        for prefix, prompt in zip(("", "negative_"), conditioning.prompts, strict=False):
            tensors |= {prefix + name: each for name, each in (prompt.embeds or {}).items()}
    if sample.image is not None:
        tensors["image"] = sample.image
    elif sample.is_denoised and sample.latent is not None and reason.type == "length":
        tensors["final_latents"] = sample.latent
    return {name: torch.as_tensor(each).cpu().contiguous() for name, each in tensors.items()}


def in_a_mapping(arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """Return copies of ``arrays`` (uint8 [n]) in one anonymous mapping, which goes with the last of them.

    In malloc's heap, small blocks that live long split free ones: 0.4 MB more for each image of 5 KB.
    """
    starts = [0, *accumulate(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)]
    mapping = memoryview(mmap.mmap(-1, max(1, starts[-1])))
    found = []
    for start, array in zip(starts, arrays, strict=False):
        part = mapping[start : start + array.nbytes]
        part[:] = array.data
        found.append(part)
    return found
