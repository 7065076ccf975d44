"""A model of the collectives of one step over links of a given speed, by the way a model is divided.

Every rank has one link, which sends and receives at the same time, ``link`` bytes a second each way. A sum is
a ring's: each of its ``2 * (ranks - 1)`` hops carries a rank's part; a gather has half of them. ``hop_s`` is
what a hop costs beside its bytes. Products are not in it, nor is anything computed meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collective:
    kind: Literal["sum", "gather"]
    nbytes: int
    """Bytes of the result, which every rank gets."""

    def seconds(self, ranks: int, link: float, hop_s: float) -> float:
        hops = (ranks - 1) * (2 if self.kind == "sum" else 1)
        return hops * (self.nbytes / ranks / link + hop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a decoder over several ranks."""

    ranks: int
    layers: int
    hidden: int
    vocab: int
    itemsize: int
    tokens: int
    sampled: int
    fullest: int | None = None
    """Tokens of the rank with the most, with data-parallel attention; None if heads are divided."""

    def collectives(self) -> Iterator[Collective]:
        """Yield embedding, attention and feed-forward of each layer, and the logits, in their order."""
        row = self.hidden * self.itemsize
        whole = Collective("sum", self.tokens * row)
        yield whole
        for _ in range(self.layers):
            yield whole if self.fullest is None else Collective("gather", self.ranks * self.fullest * row)
            yield whole
        columns = self.ranks * -(-self.vocab // self.ranks)
        yield Collective("gather", self.sampled * columns * self.itemsize)

    def seconds(self, link: float, hop_s: float) -> float:
        return sum(each.seconds(self.ranks, link, hop_s) for each in self.collectives())
