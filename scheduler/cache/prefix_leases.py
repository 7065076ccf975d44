"""Leases on cached prefixes, by name: pages that are expected to be used again are evicted last.

Invariants: a lease ends by its time, by name, or as the oldest of those that protect more than a share of the
pool; none hinders an allocation. Each new prefix of a name replaces those that it extends.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from .radix import Node, RadixTree

MAX_LEASES = 1 << 16
MAX_PREFIXES = 64
"""Most prefixes of a name: the branches of a conversation."""


@dataclass(slots=True)
class _Lease:
    deadline: float = 0.0
    nodes: dict[Node, None] = field(default_factory=dict)


class PrefixLeases:
    def __init__(self, tree: RadixTree, max_pages: int, clock: Callable[[], float] = monotonic) -> None:
        self._tree = tree
        self._max_pages = max_pages
        self._clock = clock
        self._leases: OrderedDict[str, _Lease] = OrderedDict()  # the longest unused first
        self._next = float("inf")  # no lease ends before

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, name: str, node: Node, seconds: float) -> None:
        """Lease the path to ``node`` under ``name``, whose lease lasts for ``seconds`` from now on."""
        lease = self._leases.setdefault(name, _Lease())
        self._leases.move_to_end(name)
        lease.deadline = self._clock() + seconds
        self._next = min(self._next, lease.deadline)
        if node not in lease.nodes:
            self._tree.lease(node)
            step = node.parent
            while step is not None:
                if step in lease.nodes:
                    del lease.nodes[step]
                    self._tree.unlease(step)
                step = step.parent
            lease.nodes[node] = None
            if len(lease.nodes) > MAX_PREFIXES:
                oldest = next(iter(lease.nodes))
                del lease.nodes[oldest]
                self._tree.unlease(oldest)
        while len(self._leases) > MAX_LEASES or self._tree.num_leased_pages > self._max_pages:
            self._end(next(iter(self._leases)))

    def end(self, name: str) -> bool:
        """End a lease whose prefixes will not be used again; False if there is none."""
        found = name in self._leases
        if found:
            self._end(name, dead=True)
        return found

    def expire(self) -> None:
        now = self._clock()
        if now >= self._next:
            for name in [name for name, lease in self._leases.items() if lease.deadline <= now]:
                self._end(name, dead=True)
            self._next = min((each.deadline for each in self._leases.values()), default=float("inf"))

    def clear(self) -> None:
        """End all leases, before their epoch ends or the tree is emptied."""
        while self._leases:
            self._end(next(iter(self._leases)))

    def _end(self, name: str, *, dead: bool = False) -> None:
        for node in self._leases.pop(name).nodes:
            self._tree.unlease(node, dead=dead)
