"""How many threads a step computes with.

Every parallel region of a step ends when its last thread is done. Where a step is a hundred small operations, handing them out
takes as long as sharing them saves; and whoever else wants a core meanwhile, a client that waits for its images say, holds up
every one of them.

Invariants:
- The number follows from the size of the step alone: the same step is computed alike whenever it is made.
- Outside a step it is what the engine was started with, also after a step that failed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from .batcher import ImageBatch
from .family import Family

ALONE = 1 << 15
"""Elements between two operations up to which one thread computes a step: torch itself shares no elementwise operation of fewer."""


class StepThreads:
    """Sets torch's number of threads for a step on the CPU."""

    def __init__(self, family: Family) -> None:
        self._family = family

    @contextmanager
    def of(self, batch: ImageBatch) -> Iterator[None]:
        """Inside, torch computes with one thread if ``batch`` is small."""
        threads = torch.get_num_threads()
        if threads == 1 or self.elements(batch) > ALONE:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def elements(self, batch: ImageBatch) -> int:
        """What one operation hands to the next at the widest, about: of the transformer's image tokens, or of the VAE's last block.

        Of an encoding step more than any limit: nobody has looked at those, and prompts are kept.
        """
        if batch.kind == "encode":
            return 2 * ALONE
        family, first = self._family, batch.samples[0]
        rows = len(batch.samples)
        if batch.kind == "decode":
            return rows * prod(first.size) * family.vae_channels
        config = family.transformer.config
        width: int = config.num_attention_heads * config.attention_head_dim
        return rows * (1 + first.prompting.guided) * family.image_tokens(first.shape) * width
