"""Records the output of steps, and finishes samples, each with exactly one terminal result.

Invariants:
- I1: a sample is finished here and nowhere else, once, whatever ended it: its last step, an abort, a failure.
- I2: a result has a log-probability for each of its step indices, a latent for each of its latent indices, and spans that cover its
  steps; what was not made is not there.
- A step is recorded for all of its samples or for none of them.
- A result is a copy in memory of its own: it may be stored long after its sample has gone, and must keep nothing else alive, nor
  lie between the large blocks that steps take and free.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic

import numpy as np
import torch
from torch import Tensor

from ...io_struct import ErrorCode, FinishReason, GenerateImagesReqOutput, ResultTensor
from ..memory.device_memory import is_out_of_memory
from ..memory.mapped_results import in_a_mapping
from ..runtime.dtypes import NAMES
from ..scheduling.live_requests import LiveRequests
from ..scheduling.request import WeightStamp
from .batcher import ImageBatch, ImageBatcher
from .outbox import ImageOutbox
from .request import ImageRequest, Phase
from .runner import Decoded, DenoisedOnHost, Encoded, HostResult

logger = logging.getLogger(__name__)

TRAIN_TIMESTEPS = 1000
"""The timestep at sigma 1, in the terms of trainers and of diffusers."""


class ImageOutputs:
    """Records what steps made."""

    def __init__(
        self,
        batcher: ImageBatcher,
        live: LiveRequests[ImageRequest],
        outbox: ImageOutbox,
        *,
        on_finished: Callable[[ImageRequest, GenerateImagesReqOutput], None],
        stamp: WeightStamp,
    ) -> None:
        """``on_finished`` is called once for each sample, after its latents were released."""
        self.generated_tokens = 0
        """Denoise steps of samples: what ``gen_throughput`` counts."""
        self.finished: Counter[str] = Counter()
        self._batcher = batcher
        self._live = live
        self._outbox = outbox
        self._on_finished = on_finished
        self._stamp = stamp

    def set_stamp(self, stamp: WeightStamp) -> None:
        """After a weight commit: steps made from now on carry ``stamp``."""
        self._stamp = stamp

    def record(self, batch: ImageBatch, output: HostResult) -> None:
        """Record a step, and finish the samples that end."""
        if isinstance(output, Encoded):
            for prompting, embeds, negative in zip(
                batch.prompts, output.embeds, output.negative, strict=True
            ):
                prompting.embeds, prompting.negative = embeds, negative
        elif isinstance(output, Decoded):
            for sample, image in zip(batch.samples, output.images, strict=True):
                sample.image = image
                self._complete(sample)
        else:
            self._record_denoised(batch.samples, output)

    def finish(self, sample: ImageRequest, reason: FinishReason) -> None:
        """Finish a sample: build its result, then release its latents."""
        assert sample.phase is not Phase.FINISHED, "a sample ends once"
        try:
            result = result_of(sample, reason)
        except (
            Exception
        ) as error:  # the sample must get a terminal result, whatever is wrong with its outputs
            logger.error("request %s: its result could not be built", sample.rid, exc_info=error)
            result = lost_result(sample, error)
        self._batcher.retire(sample)
        sample.phase, sample.latent = Phase.FINISHED, None
        self._live.remove(sample)
        self._outbox.add_result(sample.client, result)
        self.finished[result.finish_reason.type] += 1
        self._on_finished(sample, result)

    def abort(self, requests: Iterable[ImageRequest], message: str, code: ErrorCode | None = None) -> int:
        """Abort samples now, with the steps they have; returns how many were live."""
        return self._finish_each(requests, FinishReason(type="abort", message=message, code=code))

    def abort_all(self, message: str) -> int:
        """Abort every live sample, queued ones included."""
        return self.abort(self._live, message)

    def fail(
        self, requests: Iterable[ImageRequest], message: str, code: ErrorCode = ErrorCode.INTERNAL
    ) -> None:
        """Finish samples with an error; they keep their earlier steps."""
        self._finish_each(requests, FinishReason(type="error", message=message, code=code))

    def _finish_each(self, requests: Iterable[ImageRequest], reason: FinishReason) -> int:
        count = 0
        for sample in list(requests):
            if sample.phase is not Phase.FINISHED:
                count += 1
                self.finish(sample, reason)
        return count

    def _record_denoised(self, samples: list[ImageRequest], output: DenoisedOnHost) -> None:
        broken = []
        kept = [
            _on_host(sample, output, row) for row, sample in enumerate(samples)
        ]  # may raise: nothing has changed yet
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


def _on_host(sample: ImageRequest, output: DenoisedOnHost, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Latents before and after a step, where the request keeps it; what an earlier step has copied is not copied again."""
    if output.log_probs[row] is None:
        return _NOTHING, _NOTHING
    before = sample.latents.get(sample.step)
    return (_copy(output.before[row]) if before is None else before), _copy(output.after[row])


def _copy(latent: Tensor) -> np.ndarray:
    """Of its own: a row on the CPU would keep the rows of all samples of its step."""
    copied: np.ndarray = latent.cpu().numpy().copy()
    return copied


_NOTHING = np.empty(0, np.float32)


def result_of(sample: ImageRequest, reason: FinishReason) -> GenerateImagesReqOutput:
    """The terminal result, with all that was made and asked for."""
    steps, places = sorted(sample.log_probs), sorted(sample.latents)
    tensors: dict[str, np.ndarray | Tensor] = {
        "timesteps": sample.sigmas[:-1] * np.float32(TRAIN_TIMESTEPS),
        "sigmas": sample.sigmas,
    }
    if places:
        tensors["latents"] = np.stack([sample.latents[place] for place in places])
        tensors["log_probs"] = np.asarray([sample.log_probs[step] for step in steps], np.float32)
        tensors["noise_stds"] = np.asarray([sample.stds[step] for step in steps], np.float32)
    if sample.message.return_embeds:
        tensors |= sample.prompting.embeds or {}
        tensors |= {f"negative_{name}": each for name, each in (sample.prompting.negative or {}).items()}
    if sample.image is not None:
        tensors["image"] = sample.image
    elif sample.is_denoised and sample.latent is not None and reason.type == "length":
        tensors["final_latents"] = sample.latent
    on_host = {name: torch.as_tensor(each).cpu().contiguous() for name, each in tensors.items()}
    buffers = in_a_mapping([each.reshape(-1).view(torch.uint8).numpy() for each in on_host.values()])
    now = monotonic()
    return GenerateImagesReqOutput(
        rid=sample.rid,
        index=sample.index,
        finish_reason=reason,
        weight_versions=sample.version_spans(),
        seed=sample.seed,
        steps=sample.steps,
        steps_done=sample.step,
        step_indices=steps,
        latent_indices=places,
        tensors=[
            ResultTensor(name=name, dtype=NAMES[each.dtype], shape=list(each.shape), buffer=number)
            for number, (name, each) in enumerate(on_host.items())
        ],
        num_retractions=sample.num_retractions,
        queue_time=(sample.first_scheduled or now) - sample.arrival,
        e2e_latency=now - sample.arrival,
    ).with_buffers(buffers)


def lost_result(sample: ImageRequest, error: Exception) -> GenerateImagesReqOutput:
    """A terminal result in place of one that cannot be built or sent."""
    code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
    return GenerateImagesReqOutput(
        rid=sample.rid,
        index=sample.index,
        finish_reason=FinishReason(
            type="error", message=f"its result could not be built: {type(error).__name__}: {error}", code=code
        ),
        weight_versions=[],
        seed=sample.seed,
        steps=sample.steps,
        steps_done=0,
    )
