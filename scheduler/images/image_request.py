"""The state of one image from arrival to its terminal result, and what the samples of a request share.

Invariants:
- A sample is in exactly one :class:`Phase`: WAITING in the queue, PREFILL while it runs.
- ``step`` counts the steps made and recorded; ``latent`` is the state before it, None before the first.
- What a sample keeps of its trajectory is what its request asked for, on the host.
- A sample that begins again forgets all but its seed, so it makes the same trajectory under the same weights.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from ...io_struct import GenerateImagesReqInput, SdeParams, WeightVersionSpan
from ..scheduling.request import Phase, WeightStamp, fields_of

Embeds = dict[str, Tensor]
"""Embeddings by name, of one prompt without a batch dimension, or of several with one."""
Kind = Literal["encode", "denoise", "decode"]


@dataclass(slots=True, eq=False)
class Prompt:
    ids: list[list[int]] | None
    """Token ids for each text encoder, or None if the embeddings were given."""
    embeds: Embeds | None = None
    """Without a batch dimension, or None if not computed yet."""


@dataclass(slots=True, eq=False)
class Conditioning:
    """Conditioning that the samples of one request share."""

    prompt: Prompt
    negative: Prompt | None = None
    """Prompt that guidance leads away from, computed as a second row. None without guidance."""
    max_sequence_length: int = 0
    nbytes: int = 0
    """Bytes of all embeddings, about, once they are there."""
    sent_bytes: int = 0
    """Bytes of the embeddings that came with the request."""

    @property
    def guided(self) -> bool:
        return self.negative is not None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt,) if self.negative is None else (self.prompt, self.negative)

    @property
    def unencoded(self) -> list[list[list[int]]]:
        """Token ids whose embeddings are still to be computed."""
        return [each.ids for each in self.prompts if each.embeds is None and each.ids is not None]

    @property
    def is_ready(self) -> bool:
        return all(each.embeds is not None for each in self.prompts)

    def forget(self) -> None:
        """Drop what can be computed again."""
        for each in self.prompts:
            if each.ids is not None:
                each.embeds = None

    @property
    def bucket(self) -> tuple[object, ...]:
        """Properties that samples of one batch share: shapes of embeddings, and guidance."""
        assert self.prompt.embeds is not None
        return (self.guided, *(tuple(each.shape) for each in self.prompt.embeds.values()))


@dataclass(slots=True, eq=False, kw_only=True)
class ImageRequest:
    # Written at admission, then constant, except that ``client`` changes when a retry attaches from another
    # socket.
    message_id: str
    rid: str
    index: int
    client: bytes
    message: GenerateImagesReqInput
    conditioning: Conditioning
    sigmas: np.ndarray
    """float32 [steps + 1]"""
    shape: tuple[int, ...]
    """Shape of a latent."""
    seed: int
    kept_steps: frozenset[int]
    """Steps whose latents and log-probabilities are returned."""
    arrival: float
    latent_bytes: int = 0
    kept_bytes: int = 0
    """Bytes on the host of all that the request keeps: latents, and the image."""

    # Written by image_batcher.py and image_outputs.py.
    phase: Phase = Phase.WAITING
    step: int = 0
    latent: Tensor | None = None
    latents: dict[int, np.ndarray] = field(default_factory=dict)
    """Latents by place in the grid, float32."""
    log_probs: dict[int, float] = field(default_factory=dict)
    stds: dict[int, float] = field(default_factory=dict)
    image: np.ndarray | None = None
    """uint8 [height, width, 3]"""
    spans: list[tuple[WeightStamp, int]] = field(default_factory=list)
    """(stamp, first step)"""
    first_scheduled: float | None = None
    num_retractions: int = 0
    failed_alone: bool = False
    """A step of this sample alone ran out of memory, and none has been made since."""

    @property
    def key(self) -> tuple[str, int]:
        """``(rid, sample index)``, unique among live samples."""
        return (self.rid, self.index)

    @property
    def sde(self) -> SdeParams:
        return self.message.sde

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def is_denoised(self) -> bool:
        return self.step == self.steps

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.message.height, self.message.width

    def begin_again(self) -> None:
        self.step, self.latent, self.image = 0, None, None
        for kept in (self.latents, self.log_probs, self.stds, self.spans):
            kept.clear()
        self.num_retractions += 1

    def open_span(self, stamp: WeightStamp) -> None:
        """Note that the weights of ``stamp`` made the step about to be recorded."""
        if not self.spans or self.spans[-1][0] != stamp:
            self.spans.append((stamp, self.step))

    def version_spans(self) -> list[WeightVersionSpan]:
        ends = [*(start for _, start in self.spans), self.step][1:]
        return [
            WeightVersionSpan(**fields_of(stamp), start=start, end=end)
            for (stamp, start), end in zip(self.spans, ends, strict=True)
        ]


@dataclass(slots=True, kw_only=True)
class ImageBatch:
    kind: Kind
    samples: list[ImageRequest]
    """Rows of a denoising or decoding step; of an encoding step, one for each prompt."""
    prompts: list[Conditioning]

    @property
    def forward(self) -> "ImageBatch":
        return self
