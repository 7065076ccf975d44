"""A model of the collectives of one step over links of a given speed, by the way a model is divided.

Every rank has one link, which sends and receives at the same time, ``link`` bytes a second each way. A sum is
a ring's: each of its ``2 * (ranks - 1)`` hops carries a rank's part; a gather has half of them. An exchange,
which the engine does not have, sends to every other rank what it alone needs. ``hop_s`` is what a hop costs
beside its bytes. Products are not in it, nor is anything computed meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collective:
    kind: Literal["sum", "gather", "exchange"]
    nbytes: int
    """Bytes of the result, which every rank gets; those that a rank sends in an exchange."""

    def hops(self, ranks: int) -> int:
        return (ranks - 1) * (2 if self.kind == "sum" else 1)

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends."""
        return self.nbytes if self.kind == "exchange" else self.hops(ranks) * self.nbytes / ranks

    def seconds(self, ranks: int, link: float, hop_s: float) -> float:
        return self.sent(ranks) / link + self.hops(ranks) * hop_s


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
    exchanged: int | None = None
    """Experts of a token where ranks would exchange rows instead of gathering them; None as it is."""

    def collectives(self) -> Iterator[Collective]:
        """Yield embedding, attention and feed-forward of each layer, and the logits, in their order."""
        row = self.hidden * self.itemsize
        whole = Collective("sum", self.tokens * row)
        yield whole
        for _ in range(self.layers):
            if self.exchanged is not None and self.fullest is not None:
                copies = min(self.exchanged, self.ranks - 1)
                yield from [Collective("exchange", self.fullest * copies * row)] * 2
                continue
            yield whole if self.fullest is None else Collective("gather", self.ranks * self.fullest * row)
            yield whole
        columns = self.ranks * -(-self.vocab // self.ranks)
        yield Collective("gather", self.sampled * columns * self.itemsize)

    def sent(self) -> float:
        """Return the bytes that each rank sends."""
        return sum(each.sent(self.ranks) for each in self.collectives())

    def seconds(self, link: float, hop_s: float) -> float:
        return sum(each.seconds(self.ranks, link, hop_s) for each in self.collectives())
