"""Choice of the engine for a request: by routing key, else by cached prefix, else the least loaded.

Invariants:
- A choice is a function of the members, their loads, the request and earlier choices: no clock, no
  randomness.
- A routing key decides alone, by consistent hashing (Karger et al., 1997): only the keys of an engine that
  leaves move, and several routers agree.
- The least loaded engine is the one that has had its load for longest. A choice does not look at every
  engine: those that fit the request are found in the order of their loads, or along the ring.
- At most :data:`MAX_PREFIXES` prefixes are remembered, the most recently used ones.
"""

import bisect
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .members import Member

PREFIX_BLOCK = 32
MAX_BLOCKS = 64
MAX_PREFIXES = 1 << 16
LEAST_SHARE = 0.3
"""Least share of the prompt for a remembered prefix to count."""
LOAD_MARGIN = 16
LOAD_RATIO = 1.5
"""Maximum load of an engine with a prefix: this times that of the least loaded one, plus the margin."""

POINTS = 128
"""Points of an engine on the ring of keys: a share of the keys is within some 9 % of the mean."""
_AT = struct.Struct("<8Q")

_routing_key: ContextVar[str | None] = ContextVar("caesura_routing_key", default=None)


@contextmanager
def routed_by(key: str | None) -> Iterator[None]:
    """Send generations of this block, and of tasks made in it, to the engine of ``key`` while it serves."""
    token = _routing_key.set(key)
    try:
        yield
    finally:
        _routing_key.reset(token)


def route_by(key: str) -> None:
    """Send further generations of this task to the engine of ``key``, unless a block says where they go."""
    if _routing_key.get() is None:
        _routing_key.set(key)


def current_routing_key() -> str | None:
    return _routing_key.get()


class Router:
    """The members that serve: chooses among them, and remembers which of them has seen which prefix."""

    def __init__(self) -> None:
        self.seen: OrderedDict[bytes, str] = OrderedDict()
        self._members: dict[str, Member] = {}
        self._by_load: dict[int, dict[str, Member]] = {}
        self._points: dict[str, list[int]] = {}
        self._ring: list[tuple[int, str]] = []
        """Points of all members in order; empty: to be made from :attr:`_points`."""

    def add(self, member: "Member") -> None:
        """Let ``member`` be chosen from now on."""
        if member.name not in self._members:
            self._members[member.name] = member
            self._by_load.setdefault(member.load, {})[member.name] = member
            self._ring.clear()

    def remove(self, member: "Member") -> None:
        """Choose ``member`` no more, and forget its prefixes."""
        if self._members.pop(member.name, None) is not None:
            self._leave(member)
            self._points.pop(member.name, None)
            self._ring.clear()
            self.forget(member.name)

    def charge(self, member: "Member", work: int) -> None:
        """Add ``work`` samples to the load of ``member``, which need not serve."""
        if member.name in self._members:
            self._leave(member)
            self._by_load.setdefault(member.load + work, {})[member.name] = member
        member.load += work

    def choose(
        self,
        prompt: Sequence[int],
        fits: "Callable[[Member], bool]" = lambda _: True,
        *,
        key: str | None = None,
        salt: str = "",
    ) -> "Member | None":
        """Return a member that ``fits``, or None. ``salt`` separates prompts that share no cache."""
        if key is not None:
            return self._by_key(key, fits)
        least = self.least_loaded(fits)
        if least is None:
            return None
        blocks = _blocks(prompt, salt)
        chosen = self._by_prefix(blocks, len(prompt), fits, LOAD_RATIO * least.load + LOAD_MARGIN) or least
        for block in blocks:
            self.seen[block] = chosen.name
            self.seen.move_to_end(block)
        while len(self.seen) > MAX_PREFIXES:
            self.seen.popitem(last=False)
        return chosen

    def least_loaded(self, fits: "Callable[[Member], bool]" = lambda _: True) -> "Member | None":
        for load in sorted(self._by_load):
            for member in self._by_load[load].values():
                if fits(member):
                    return member
        return None

    def forget(self, name: str | None = None) -> None:
        if name is None:
            self.seen.clear()
            return
        for block in [block for block, owner in self.seen.items() if owner == name]:
            del self.seen[block]

    def _leave(self, member: "Member") -> None:
        same = self._by_load[member.load]
        del same[member.name]
        if not same:
            del self._by_load[member.load]

    def _by_key(self, key: str, fits: "Callable[[Member], bool]") -> "Member | None":
        if not self._ring:
            for name in self._members.keys() - self._points.keys():
                self._points[name] = _points(name)
            self._ring = sorted((at, name) for name, points in self._points.items() for at in points)
        (place,) = struct.unpack("<Q", _digest(key.encode("utf-8", "surrogatepass"))[:8])
        first, asked = bisect.bisect(self._ring, (place, "")), set[str]()
        for number in range(len(self._ring)):
            name = self._ring[(first + number) % len(self._ring)][1]
            if name not in asked and fits(self._members[name]):
                return self._members[name]
            asked.add(name)
            if len(asked) == len(self._members):
                break
        return None

    def _by_prefix(
        self, blocks: Sequence[bytes], length: int, fits: "Callable[[Member], bool]", limit: float
    ) -> "Member | None":
        for count in range(len(blocks), 0, -1):
            if count * PREFIX_BLOCK < LEAST_SHARE * min(length, MAX_BLOCKS * PREFIX_BLOCK):
                return None
            owner = self._members.get(self.seen.get(blocks[count - 1], ""))
            if owner is not None and owner.load <= limit and fits(owner):
                return owner
        return None


def _points(name: str) -> list[int]:
    digests = (
        hashlib.blake2b(name.encode(), salt=number.to_bytes(8, "little")).digest()
        for number in range(POINTS // 8)
    )
    return [point for digest in digests for point in _AT.unpack(digest)]


def _blocks(prompt: Sequence[int], salt: str) -> list[bytes]:
    """Return a digest of every prefix of whole blocks, the shortest first."""
    found: list[bytes] = []
    digest = salt.encode()
    for start in range(0, min(len(prompt), MAX_BLOCKS * PREFIX_BLOCK) - PREFIX_BLOCK + 1, PREFIX_BLOCK):
        block = ",".join(map(str, prompt[start : start + PREFIX_BLOCK]))
        digest = _digest(digest, block.encode())
        found.append(digest)
    return found


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
