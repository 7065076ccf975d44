"""A model of an update over links of a given speed, by the route that the weights take.

Every host has one link, which sends and receives at the same time, ``link`` bytes a second each way. A host
passes a bucket on when it has all of it; ``hop_s`` is what each bucket costs on each hop beside its bytes.
Times are in seconds, from the first byte sent to the last engine's last byte.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FanOut:
    """One update of ``engines`` hosts, each by one link."""

    weights: float
    """Bytes of one copy of the weights."""
    engines: int
    link: float
    """Bytes a second, each way."""
    bucket: float
    hop_s: float

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.weights / self.bucket))

    @property
    def bucket_s(self) -> float:
        """Seconds of one bucket over one link; all are equal."""
        return self.weights / self.buckets / self.link + self.hop_s

    def one_by_one(self) -> float:
        """Return the seconds if the trainer sends to each engine."""
        return self.engines * self.buckets * self.bucket_s

    def binomial(self) -> float:
        """Return the seconds by a binomial tree: in each round all that have a bucket send it."""
        return self.buckets * math.ceil(math.log2(self.engines + 1)) * self.bucket_s

    def chain(self) -> float:
        """Return the seconds if each engine passes a bucket on while it receives the next."""
        return (self.buckets + self.engines - 1) * self.bucket_s

    def tree(self) -> float:
        """Return the seconds with two engines behind each, over one link, which every bucket takes twice."""
        depth = math.ceil(math.log2(self.engines + 1))
        return (2 * self.buckets + 2 * (depth - 1) - 1) * self.bucket_s if depth > 1 else self.chain()

    def trainer_sends(self, road: str) -> float:
        """Return the bytes that leave the trainer."""
        copies = {
            "one by one": self.engines,
            "binomial": math.ceil(math.log2(self.engines + 1)),
            "chain": 1,
            "tree": 1,
        }
        return copies[road] * self.weights

    def seconds(self, road: str) -> float:
        """Return the seconds of the route of that name."""
        by_name = {
            "one by one": self.one_by_one,
            "binomial": self.binomial,
            "chain": self.chain,
            "tree": self.tree,
        }
        return by_name[road]()


ROADS = ("one by one", "binomial", "tree", "chain")


def best_bucket(weights: float, engines: int, link: float, hop_s: float) -> float:
    """Return the bytes of a chain's best bucket: the root of ``weights * link * hop_s / (engines - 1)``."""
    if engines < 2 or hop_s <= 0:
        return weights
    return min(weights, math.sqrt(weights * link * hop_s / (engines - 1)))
