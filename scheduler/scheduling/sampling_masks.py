"""The tokens that top-k, top-p and min-p left of the vocabulary at each position of a sample.

Invariants:
- The mask of an output position is overwritten when the position is sampled again, so a step that was rolled
  back leaves nothing, and masks outlive retractions with the tokens that were sampled from them.
- A mask is what the sampler drew from, not a computation beside it: the sampled token is in it.
"""

import numpy as np

from ...io_struct import GenerateReqInput, SamplingMask

MAX_MASK_BYTES = 16 << 20
"""Bytes of one sample's masks. A sample with more ends: its result would not fit into a message."""


class SamplingMaskRecord:
    def __init__(self) -> None:
        self.nbytes = 0
        self._positions: list[np.ndarray] = []

    @staticmethod
    def of(message: GenerateReqInput) -> "SamplingMaskRecord | None":
        return SamplingMaskRecord() if message.return_sampling_mask else None

    def put(self, at: int, kept: np.ndarray) -> None:
        """Record output token ``at``, from bool [V]; what was recorded behind it is forgotten."""
        for forgotten in self._positions[at:]:
            self.nbytes -= forgotten.nbytes
        del self._positions[at:]
        assert len(self._positions) == at, f"{len(self._positions)} masks before token {at}"
        ids = np.flatnonzero(kept).astype("<i4")
        self._positions.append(ids)
        self.nbytes += ids.nbytes

    def at(self, position: int) -> np.ndarray:
        """Return the token ids of one output position, int32, ascending."""
        return self._positions[position]

    def wire(self, count: int) -> SamplingMask:
        """Return the masks of the first ``count`` output tokens."""
        assert count <= len(self._positions), f"{len(self._positions)} masks, {count} tokens"
        return joined_masks(self._positions[:count])


def joined_masks(positions: list[np.ndarray]) -> SamplingMask:
    offsets = np.zeros(len(positions) + 1, "<i4")
    np.cumsum([len(ids) for ids in positions], out=offsets[1:])
    return SamplingMask(
        ids=np.concatenate([np.empty(0, "<i4"), *positions]).tobytes(), offsets=offsets.tobytes()
    )
