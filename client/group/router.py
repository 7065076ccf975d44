"""Choice of the engine for a request: by routing key, else by cached prefix, else the least loaded.

Invariants:
- A choice is a function of the candidates, the request and earlier choices: no clock, no randomness.
- A routing key decides alone, by rendezvous hashing (Thaler and Ravishankar, 1998): only the keys of an
  engine that leaves move, and several routers agree.
- At most :data:`MAX_PREFIXES` prefixes are remembered, the most recently used ones.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
    """Chooses members, and remembers which of them has seen which prefix."""

    def __init__(self) -> None:
        self.seen: OrderedDict[bytes, str] = OrderedDict()

    def choose(
        self,
        candidates: Sequence["Member"],
        prompt: Sequence[int],
        *,
        key: str | None = None,
        salt: str = "",
    ) -> "Member":
        """Return one of ``candidates``, at least one. ``salt`` separates prompts that share no cache."""
        if key is not None:
            return max(
                candidates, key=lambda each: _digest(key.encode("utf-8", "surrogatepass"), each.name.encode())
            )
        blocks = _blocks(prompt, salt)
        chosen = self._by_prefix(candidates, blocks, len(prompt))
        if chosen is None:
            chosen = min(candidates, key=lambda each: each.load)
        for block in blocks:
            self.seen[block] = chosen.name
            self.seen.move_to_end(block)
        while len(self.seen) > MAX_PREFIXES:
            self.seen.popitem(last=False)
        return chosen

    def forget(self, name: str | None = None) -> None:
        if name is None:
            self.seen.clear()
            return
        for block in [block for block, owner in self.seen.items() if owner == name]:
            del self.seen[block]

    def _by_prefix(
        self, candidates: Sequence["Member"], blocks: Sequence[bytes], length: int
    ) -> "Member | None":
        limit = LOAD_RATIO * min(each.load for each in candidates) + LOAD_MARGIN
        by_name = {each.name: each for each in candidates if each.load <= limit}
        for count in range(len(blocks), 0, -1):
            if count * PREFIX_BLOCK < LEAST_SHARE * min(length, MAX_BLOCKS * PREFIX_BLOCK):
                return None
            owner = by_name.get(self.seen.get(blocks[count - 1], ""))
            if owner is not None:
                return owner
        return None


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
