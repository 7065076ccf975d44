"""Schedules the steps of images: prompts are encoded, latents denoised, images decoded, each in its own step.

One denoise step advances samples of one *bucket* (shape of the latents, shapes of the embeddings, guidance)
by one place each in their own grids; they may join or leave between two steps. Buckets take turns.

Invariants:
- A step ends quickly, since a pause waits for it: it is one call of the transformer, of the VAE for a few
  images, or of the text encoders for a few prompts.
- Decoding goes first, since it ends samples; then encoding, since samples wait for it; then the bucket that
  was served longest ago.
- First come, first served, also after retraction; what samples hold is limited (``memory_limit.py``).
- If a call raises, every sample stays where it was.
- A prompt that is kept (``prompt_cache.py``) is not encoded again, and of equal prompts that wait one is.
"""

import logging
from collections.abc import Callable
from time import monotonic

from ...io_struct import ImageLoad
from ..scheduling.request import Phase
from ..scheduling.waiting_queue import WaitingQueue
from .image_request import Conditioning, ImageBatch, ImageRequest
from .memory_limit import MemoryLimit
from .prompt_cache import PromptCache

logger = logging.getLogger(__name__)

ENCODED_PROMPTS = 16
"""Most prompts of an encoding step, those of guidance included."""
ENCODED_TOKENS = 8192
"""Most tokens of an encoding step of several prompts, over all encoders: attention takes their square."""
DECODED_IMAGES = 2
"""Most images of a decoding step: a VAE's activations are the largest, and a pause waits for them."""
RAISE_AFTER = 32
"""Full steps after which a limit that memory has set is doubled."""


class ImageBatcher:
    """Owns the running samples and builds steps from them and from the queue; a ``StepBatcher``."""

    prompt_tokens = cached_tokens = prefilled_tokens = drafts = drafted_tokens = accepted_tokens = 0
    speculation = None
    after_barrier = False  # set as that of a Batcher, and nothing waits for it here

    def __init__(
        self,
        waiting: WaitingQueue[ImageRequest],
        *,
        max_running: int,
        limit: MemoryLimit,
        prompts: PromptCache,
        encoders_changed: Callable[[], bool],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """``limit`` decides which waiting sample may start; ``encoders_changed`` tells, at a commit, if it
        wrote one; ``on_idle`` is called when a sample has ended and none is left.
        """
        self.waiting = waiting
        self.prompts = prompts
        self.num_retractions = 0
        self.step_limit: int | None = None
        """Most samples of a step, after one ran out of memory, or None."""
        self._full_steps = 0  # at the limit, since it was set
        self._max_running = max_running
        self.limit = limit
        self._encoders_changed = encoders_changed
        self._on_idle = on_idle
        self.running: list[ImageRequest] = []
        self._served: dict[tuple[object, ...], int] = {}
        self._steps = 0
        self._in_flight: ImageBatch | None = None

    @property
    def num_running(self) -> int:
        return sum(1 for sample in self.running if sample.latent is not None)

    @property
    def num_prefilling(self) -> int:
        return len(self.running) - self.num_running

    @property
    def images(self) -> ImageLoad:
        decoding = sum(1 for sample in self.running if sample.is_denoised)
        encoding = sum(1 for sample in self.running if not sample.conditioning.is_ready)
        return ImageLoad(
            encoding=encoding, denoising=len(self.running) - decoding - encoding, decoding=decoding
        )

    @property
    def num_holding(self) -> int:
        """Samples with latents, which an in-place pause freezes."""
        return self.num_running

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> ImageBatch | None:
        if self.in_flight:
            return None
        while len(self.running) < self._max_running and len(self.waiting):
            if self.waiting.start_next(lambda _: True, self._start, 1) is None:
                break
        self._in_flight = self._decode() or self._encode() or self._denoise()
        return self._in_flight

    def complete_step(self, batch: ImageBatch, seconds: float) -> None:
        self._in_flight = None
        for sample in batch.samples:
            sample.failed_alone = False
        for conditioning in batch.prompts:
            self.prompts.keep(conditioning)
        if self.step_limit is None or len(batch.samples) < self.step_limit:
            return
        self._full_steps += 1
        if self._full_steps == RAISE_AFTER:  # memory that was short may be there again
            self._full_steps = 0
            raised = self.step_limit * 2
            self.step_limit = raised if raised < self._max_running else None

    def roll_back_step(self, batch: ImageBatch) -> None:
        self._in_flight = None

    def halve(self, batch: ImageBatch) -> bool:
        """Limit steps to half of ``batch``; False if its only sample ran out of memory alone before."""
        if len(batch.samples) == 1:
            if batch.samples[0].failed_alone:
                return False
            batch.samples[0].failed_alone = True
        self.step_limit, self._full_steps = max(1, len(batch.samples) // 2), 0
        logger.warning("steps are limited to %d samples for now", self.step_limit)
        return True

    def retire(self, sample: ImageRequest) -> None:
        if sample in self.running:
            self.running.remove(sample)
        if not self.has_work:
            self._on_idle()

    def retract_all(self, *, keep_prefix: bool = False) -> None:
        """Have every running sample begin again from its seed, in its order. No step may be in flight."""
        samples, self.running = self.running, []
        self.num_retractions += sum(sample.latent is not None for sample in samples)
        for sample in samples:
            sample.begin_again()
        self.waiting.push_front(samples)

    def restart_prefills(self) -> None:
        """Encode again, after a commit of a text encoder, prompts none of whose samples is under way."""
        if not self._encoders_changed():
            return
        self.prompts.encoders_changed()
        samples = [*self.running, *self.waiting.live()]
        begun = {id(sample.conditioning) for sample in samples if sample.latent is not None}
        again = {id(s.conditioning): s.conditioning for s in samples if id(s.conditioning) not in begun}
        for conditioning in again.values():
            conditioning.forget()

    def restore(self, runner: object) -> None:
        """Do nothing: latents of a step that is lost were not replaced."""

    def mark_stale(self) -> None:
        """Do nothing: latents are part of the sample, and spans say which weights made which step."""

    def requests_of(self, batch: ImageBatch) -> list[ImageRequest]:
        prompts = {id(conditioning) for conditioning in batch.prompts}
        samples = [*self.running, *self.waiting.live()]
        return [each for each in samples if each in batch.samples or id(each.conditioning) in prompts]

    def schedule_failure_candidates(self) -> list[ImageRequest]:
        return [*self.running]

    def _limited(self, samples: list[ImageRequest], most: int) -> list[ImageRequest]:
        return samples[: most if self.step_limit is None else min(most, self.step_limit)]

    def _start(self, sample: ImageRequest, num_skipped: int) -> bool:
        if not self.limit.allows(self.running, sample):
            return False
        sample.phase = Phase.PREFILL
        sample.first_scheduled = sample.first_scheduled or monotonic()
        self.running.append(sample)
        return True

    def _decode(self) -> ImageBatch | None:
        ready = [sample for sample in self.running if sample.is_denoised]
        if not ready:
            return None
        alike = [each for each in ready if each.shape == ready[0].shape and each.size == ready[0].size]
        return ImageBatch(kind="decode", samples=self._limited(alike, DECODED_IMAGES), prompts=[])

    def _encode(self) -> ImageBatch | None:
        """Return prompts whose ids have the lengths of the first one's, each once."""
        chosen: dict[int, tuple[ImageRequest, Conditioning]] = {}
        keys: set[tuple[int, bytes]] = set()
        lengths: tuple[object, ...] | None = None
        rows = 0
        for sample in self.running:
            conditioning = sample.conditioning
            if conditioning.is_ready or id(conditioning) in chosen or self.prompts.fill(conditioning):
                continue
            if (missing := self.prompts.keys(conditioning)) & keys:
                continue  # what it lacks is kept after this step, or encoded in the next
            sizes = [*map(len, conditioning.unencoded[0])]
            alike = (conditioning.max_sequence_length, *sizes)
            lengths = lengths or alike
            more = rows + 1 + conditioning.guided
            fits = more <= ENCODED_PROMPTS and more * sum(sizes) <= ENCODED_TOKENS
            if alike != lengths or (chosen and not fits):
                continue
            rows = more
            chosen[id(conditioning)] = sample, conditioning
            keys |= missing
        if not chosen:
            return None
        samples = self._limited([sample for sample, _ in chosen.values()], ENCODED_PROMPTS)
        return ImageBatch(kind="encode", samples=samples, prompts=[sample.conditioning for sample in samples])

    def _denoise(self) -> ImageBatch | None:
        buckets: dict[tuple[object, ...], list[ImageRequest]] = {}
        for sample in self.running:
            key = (sample.shape, sample.size, *sample.conditioning.bucket)
            buckets.setdefault(key, []).append(sample)
        if not buckets:
            return None
        self._served = {key: self._served.get(key, -1) for key in buckets}
        key = min(buckets, key=lambda each: self._served[each])
        self._steps += 1
        self._served[key] = self._steps
        return ImageBatch(kind="denoise", samples=self._limited(buckets[key], self._max_running), prompts=[])
