"""The other ranks of an engine (``tp``), as replies show them (docs/explanation/parallelism.md)."""

from .base import ReplyRecord


class RankMemory(ReplyRecord, kw_only=True, frozen=True):
    """What one of an engine's other ranks had reserved around an emptying of its device cache, in bytes."""

    rank: int
    """From 1; the reply's own figures are those of rank 0."""
    reserved_before: int
    reserved_after: int


class RankStatus(ReplyRecord, kw_only=True, frozen=True):
    """Another rank of an engine (``tp``): its process, and its allocator's figures within the last second."""

    rank: int
    pid: int
    """Of its process, on its machine."""
    host: str
    """Name of its machine."""
    reserved: int
    allocated: int
    available: int | None
