"""Recovery from a failed step of images: which samples end, and which are computed again.

Out of memory is no sample's fault: the step is made again with half its samples, down to one; a step of one sample that fails twice
ends it. Any other failure ends the samples of its step, and where it was to encode prompts, all samples of those.

Invariant: a step's output is recorded only if all of it has arrived, so what is made again begins from the same latents, with the
same noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ...io_struct import StepFailures
from ..memory.device_cache import DeviceCache
from ..scheduling.step_recovery import MAX_BUILDS, Failure
from .batcher import ImageBatch, ImageBatcher
from .outputs import ImageOutputs
from .request import ImageRequest


class ImageRecovery:
    """Restores a consistent state after a failed step, and counts failures."""

    def __init__(self, batcher: ImageBatcher, outputs: ImageOutputs, device_cache: DeviceCache) -> None:
        self._batcher = batcher
        self._outputs = outputs
        self._device_cache = device_cache
        self._failed = self._splits = self._failed_builds = 0

    def counts(self) -> StepFailures:
        """Failures since start, for status; ``token_limit`` is of samples."""
        return StepFailures(
            failed=self._failed, retried=self._splits, splits=self._splits, token_limit=self._batcher.limit
        )

    def step_built(self) -> None:
        """Building a step succeeded, or there was nothing to build."""
        self._failed_builds = 0

    def build_failed(self, failure: Failure) -> None:
        """An attempt to build a step has failed."""
        self._failed += 1
        self._failed_builds += 1
        if self._failed_builds == MAX_BUILDS:
            self._failed_builds = 0
            self._fail(self._batcher.failure_candidates(), failure)
        self._device_cache.after_failure(failure.message)

    def step_failed(self, batch: ImageBatch, failure: Failure, later: ImageBatch | None) -> None:
        """Roll back ``batch``; no step is launched behind another, so there is no ``later``."""
        self._failed += 1
        self._batcher.roll_back_step()
        alone = len(batch.samples) == 1
        if failure.out_of_memory and not (alone and batch.samples[0].failed_alone):
            batch.samples[0].failed_alone |= alone
            self._batcher.halve(len(batch.samples))
            self._splits += 1
        else:
            self._fail(self._batcher.needing(batch), failure)
        self._device_cache.after_failure(failure.message)

    @contextmanager
    def output_processing(self, batch: ImageBatch, number: int) -> Iterator[None]:
        """Context in which the output of ``batch`` is processed; an exception ends its samples, since some may have changed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  an unforeseen error: the other samples must go on
            failure = Failure.of(error, number)
        else:
            return
        self._failed += 1
        self._batcher.roll_back_step()
        self._fail(self._batcher.needing(batch), failure)
        self._device_cache.after_failure(failure.message)

    def _fail(self, samples: list[ImageRequest], failure: Failure) -> None:
        self._outputs.fail(samples, *failure.ending("the step"))
