"""A model of the collectives of one step over links of a given speed, by the way a model is divided.

Every rank has one link, which sends and receives at the same time, ``link`` bytes a second each way. A sum is
a ring's: each of its ``2 * (ranks - 1)`` hops carries a rank's part; a gather has half of them, and so has a
scatter, a sum of which each rank gets its rows alone. In both every rank has as many rows as the one with the
most. An exchange sends to every other rank what it alone needs. ``hop_s`` is what a hop costs beside its
bytes. Products are not in it, nor is anything computed meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collective:
    kind: Literal["sum", "gather", "scatter", "exchange"]
    nbytes: int
    """Bytes of all ranks' rows; those that a rank sends to others in an exchange."""

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
    results: int = 2
    """Values of a sampled token that ranks tell each other: its number, and log-probabilities."""
    fullest: int | None = None
    """Tokens of the rank with the most, with data-parallel attention; None if heads are divided."""
    exchanged: int | None = None
    """Experts of a token, to whose ranks rows go; None if ranks gather all rows. Counted as if no two are of
    one rank, and all ranks get as many rows."""
    dense_layers: int = 0
    """Layers in front that have no experts."""

    def collectives(self) -> Iterator[Collective]:
        """Yield embedding, attention and feed-forward of each layer, and the logits, in their order."""
        row = self.hidden * self.itemsize
        part = -(-self.vocab // self.ranks) * self.itemsize
        if self.fullest is None:
            yield from [Collective("sum", self.tokens * row)] * (1 + 2 * self.layers)
            yield Collective("gather", self.ranks * self.sampled * part)
        else:
            yield from self._of_rows(self.ranks * self.fullest, row)
            yield Collective("exchange", (self.sampled - self.sampled // self.ranks) * part)
            yield Collective("gather", self.ranks * -(-self.sampled // self.ranks) * self.results * 4)

    def _of_rows(self, rows: int, row: int) -> Iterator[Collective]:
        scatter = Collective("scatter", rows * row)
        yield scatter
        for layer in range(self.layers):
            if self.exchanged is None or layer < self.dense_layers:
                yield from (Collective("gather", rows * row), scatter)
            else:
                yield Collective("gather", rows * self.exchanged * 8)  # numbers and weights
                yield from [Collective("exchange", rows // self.ranks * self.exchanged * row)] * 2
        yield Collective("sum", self.sampled * row)

    def sent(self) -> float:
        """Return the bytes that each rank sends."""
        return sum(each.sent(self.ranks) for each in self.collectives())

    def seconds(self, link: float, hop_s: float) -> float:
        return sum(each.seconds(self.ranks, link, hop_s) for each in self.collectives())
