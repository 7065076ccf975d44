"""Schedules the steps of images: prompts are encoded, latents denoised, images decoded, each as a step of its own.

One denoise step advances samples of one *bucket* (shape of the latents, shapes of the embeddings, guidance) by one place in
their own grids. They may be at different places, and join or leave between two steps. Buckets take turns.

Invariants:
- A step ends quickly: it is one call of the transformer, of the VAE for a few images, or of the text encoders for a few prompts. A pause
  waits for one of these.
- Decoding goes first, since it ends samples; then encoding, since samples wait for it; then the bucket that was served longest ago.
- A sample that was retracted or that waits keeps its place: first come, first served. What samples hold together is limited
  (``holding.py``), so some wait though more may run.
- If a call raises, every sample stays where it was.
- A prompt that is kept (``prompts.py``) is not encoded again, and of equal prompts that wait together one is.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from ...io_struct import ImageLoad
from .holding import Holding
from .prompts import EncodedPrompts
from .request import ImageRequest, Phase, Prompting

ENCODED_PROMPTS = 16
"""Most prompts of an encoding step, those of guidance included."""
ENCODED_TOKENS = 8192
"""Most tokens of an encoding step of several prompts, over all encoders: attention of long ones takes time and memory with their square."""
DECODED_IMAGES = 2
"""Most images of a decoding step: a VAE's activations are the largest of all, and a pause waits for no more of them than a denoising step
of as many samples takes."""

RAISE_AFTER = 32
"""Full steps after which a limit that memory has set is doubled."""

Kind = Literal["encode", "denoise", "decode"]


@dataclass(slots=True, kw_only=True)
class ImageBatch:
    """One step."""

    kind: Kind
    samples: list[ImageRequest]
    """Rows of a denoising or decoding step; of an encoding step, one for each prompt."""
    prompts: list[Prompting]
    """What an encoding step encodes."""

    @property
    def forward(self) -> "ImageBatch":
        """The runner takes all of it."""
        return self


class ImageQueue:
    """The samples that wait, in the order in which they will start."""

    def __init__(self) -> None:
        self._queue: deque[ImageRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[ImageRequest]:
        return iter(self._queue)

    def append(self, request: ImageRequest) -> None:
        """Add a new sample at the back."""
        self._queue.append(request)

    def push_front(self, requests: list[ImageRequest]) -> None:
        """Put retracted samples at the front, in the given order."""
        self._queue.extendleft(reversed(requests))

    def popleft(self) -> ImageRequest:
        """The sample that starts next."""
        return self._queue.popleft()

    def remove(self, request: ImageRequest) -> None:
        """A waiting sample has ended."""
        self._queue.remove(request)


class ImageBatcher:
    """Owns the running samples and builds steps from them and from the queue."""

    def __init__(
        self,
        waiting: ImageQueue,
        *,
        max_running: int,
        holding: Holding,
        prompts: EncodedPrompts,
        encoders_changed: Callable[[], bool],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            holding: says how many of the samples that wait may start.
            encoders_changed: says, at a commit, whether it has written a text encoder.
            on_idle: called when no sample is left.
        """
        self.waiting = waiting
        self.prompts = prompts
        self._on_idle = on_idle
        self.num_retractions = 0
        self.prompt_tokens = self.cached_tokens = self.prefilled_tokens = 0
        self.limit: int | None = None
        """Most samples of a step, after one ran out of memory. None: only those of the configuration."""
        self._full_steps = 0
        """At the limit, since it was set."""
        self._max_running = max_running
        self._holding = holding
        self._encoders_changed = encoders_changed
        self._running: list[ImageRequest] = []
        self._served: dict[tuple[object, ...], int] = {}
        """Bucket to the number of its last step."""
        self._steps = 0
        self._in_flight: ImageBatch | None = None

    @property
    def num_running(self) -> int:
        """Samples that have begun their steps."""
        return sum(1 for sample in self._running if sample.latent is not None)

    @property
    def num_prefilling(self) -> int:
        """Samples that run and have no latents yet."""
        return len(self._running) - self.num_running

    @property
    def images(self) -> ImageLoad:
        """Running samples by what each needs next."""
        decoding = sum(1 for sample in self._running if sample.is_denoised)
        encoding = sum(1 for sample in self._running if not sample.prompting.is_ready)
        return ImageLoad(
            encoding=encoding, denoising=len(self._running) - decoding - encoding, decoding=decoding
        )

    @property
    def num_holding(self) -> int:
        """Samples with latents."""
        return self.num_running

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is neither completed nor rolled back."""
        return self._in_flight is not None

    @property
    def has_work(self) -> bool:
        """Whether :meth:`schedule` may return a batch."""
        return bool(self._running) or len(self.waiting) > 0

    def schedule(self) -> ImageBatch | None:
        """Build the next step; None if there is nothing to run, or if a step is in flight."""
        if self.in_flight:
            return None
        self._start()
        self._in_flight = self._decode() or self._encode() or self._denoise()
        return self._in_flight

    def complete_step(self, batch: ImageBatch, seconds: float) -> None:
        """The output of ``batch`` has been recorded."""
        self._in_flight = None
        for sample in batch.samples:
            sample.failed_alone = False
        for prompting in batch.prompts:
            self.prompts.keep(prompting)
        if self.limit is None or len(batch.samples) < self.limit:
            return
        self._full_steps += 1
        if self._full_steps == RAISE_AFTER:  # memory that was short may be there again
            self._full_steps = 0
            self.limit = self.limit * 2 if self.limit * 2 < self._max_running else None

    def halve(self, samples: int) -> None:
        """A step of ``samples`` did not fit into memory."""
        self.limit, self._full_steps = max(1, samples // 2), 0

    def roll_back_step(self) -> None:
        """The results of the step in flight are lost; its samples are as before it."""
        self._in_flight = None

    def retire(self, sample: ImageRequest) -> None:
        """A sample has ended, wherever it was."""
        if sample.phase is Phase.WAITING:
            self.waiting.remove(sample)
        else:
            self._running.remove(sample)
        if not self.has_work:
            self._on_idle()

    def retract_all(self) -> int:
        """Every running sample begins again from its seed, in its order. No step may be in flight."""
        samples, self._running = self._running, []
        count = sum(1 for sample in samples if sample.latent is not None)
        for sample in samples:
            sample.begin_again()
        self.waiting.push_front(samples)
        self.num_retractions += count
        return count

    def restart_prefills(self) -> int:
        """After a commit that changed a text encoder: prompts none of whose samples is under way are encoded again."""
        if not self._encoders_changed():
            return 0
        self.prompts.encoders_changed()
        samples = [*self._running, *self.waiting]
        begun = {id(sample.prompting) for sample in samples if sample.latent is not None}
        again = {id(s.prompting): s.prompting for s in samples if id(s.prompting) not in begun}
        for prompting in again.values():
            prompting.forget()
        return len(again)

    def mark_stale(self) -> None:
        """Latents are part of the sample and not of the weights: spans say which weights made which step."""

    def needing(self, batch: ImageBatch) -> list[ImageRequest]:
        """The samples that cannot go on without ``batch``: its own, and those that wait for the prompts that it encodes."""
        prompts = {id(prompting) for prompting in batch.prompts}
        own = {id(sample) for sample in batch.samples}
        return [
            sample
            for sample in (*self._running, *self.waiting)
            if id(sample) in own or id(sample.prompting) in prompts
        ]

    def failure_candidates(self) -> list[ImageRequest]:
        """The samples to fail when :meth:`schedule` raises again and again."""
        return [*self._running]

    def _limited(self, samples: list[ImageRequest], most: int) -> list[ImageRequest]:
        return samples[: most if self.limit is None else min(most, self.limit)]

    def _start(self) -> None:
        most = self._max_running - len(self._running)
        if not most or not len(self.waiting):
            return
        for _ in range(self._holding.starting(self._running, self.waiting, most)):
            sample = self.waiting.popleft()
            sample.phase = Phase.RUNNING
            sample.first_scheduled = sample.first_scheduled or monotonic()
            self._running.append(sample)

    def _decode(self) -> ImageBatch | None:
        ready = [sample for sample in self._running if sample.is_denoised]
        if not ready:
            return None
        alike = [
            sample for sample in ready if sample.shape == ready[0].shape and sample.size == ready[0].size
        ]
        return ImageBatch(kind="decode", samples=self._limited(alike, DECODED_IMAGES), prompts=[])

    def _encode(self) -> ImageBatch | None:
        """Prompts whose ids have the lengths of the first one's, each once."""
        chosen: dict[int, tuple[ImageRequest, Prompting]] = {}
        keys: set[tuple[int, bytes]] = set()
        lengths: tuple[object, ...] | None = None
        rows = 0
        for sample in self._running:
            prompting = sample.prompting
            if prompting.is_ready or id(prompting) in chosen or self.prompts.fill(prompting):
                continue
            if (missing := self.prompts.keys(prompting)) & keys:
                continue  # what it lacks is kept after this step, or encoded in the next
            ids = prompting.ids if prompting.embeds is None else prompting.negative_ids
            alike = (prompting.max_sequence_length, *map(len, ids or ()))
            lengths = lengths or alike
            more = rows + 1 + prompting.guided
            fits = more <= ENCODED_PROMPTS and more * sum(map(len, ids or ())) <= ENCODED_TOKENS
            if alike != lengths or (chosen and not fits):
                continue
            rows = more
            chosen[id(prompting)] = sample, prompting
            keys |= missing
        if not chosen:
            return None
        samples = self._limited([sample for sample, _ in chosen.values()], ENCODED_PROMPTS)
        return ImageBatch(kind="encode", samples=samples, prompts=[sample.prompting for sample in samples])

    def _denoise(self) -> ImageBatch | None:
        buckets: dict[tuple[object, ...], list[ImageRequest]] = {}
        for sample in self._running:
            key = (sample.shape, sample.size, *sample.prompting.bucket)
            buckets.setdefault(key, []).append(sample)
        if not buckets:
            return None
        self._served = {key: self._served.get(key, -1) for key in buckets}
        key = min(buckets, key=lambda each: self._served[each])
        self._steps += 1
        self._served[key] = self._steps
        return ImageBatch(kind="denoise", samples=self._limited(buckets[key], self._max_running), prompts=[])
