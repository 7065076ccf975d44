"""Prefix tree over pages of tokens. It never frees a page by itself: whatever it lets go of is returned.

- A node holds a run of whole pages: ``len(tokens) == len(pages) * page_size``; only a root's run is empty.
- Siblings differ in their first page of tokens, so a page-aligned prefix has at most one path.
- ``lock_ref`` counts a node's direct locks plus its locked children: a locked node's ancestors are all
  locked, an unlocked node's descendants are all unlocked, and every unlocked page can be evicted, leaves
  first.
- A node of an epoch below ``first_epoch`` exists only while locked, is never matched or extended, and its
  last unlock frees it.
- ``lease_ref`` counts leases in the same way, and protects from eviction only while other pages can be
  evicted. A lease of evicted pages is one of what is left above them.
- A lock pins a node's content and end: splitting keeps the *lower* part in the same object.
- The tree owns the arrays in its nodes; no array keeps more than twice its own size of memory alive.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .allocator import LedgerError

Salt = str | tuple[int, str]
"""Cache salt of a request; with an adapter, its epoch beside it."""
_NO_TOKENS = np.empty(0, dtype=np.int32)
NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages below ``parent``, written by the tree; a handle to lock and unlock."""

    parent: "Node | None"
    epoch: int
    salt: Salt
    tokens: np.ndarray
    """int32 [pages * page_size]"""
    pages: np.ndarray
    serial: int
    """Creation order, which decides between leaves of equal age: eviction is reproducible."""
    children: "dict[bytes, Node]" = field(default_factory=dict)
    lock_ref: int = 0
    lease_ref: int = 0
    last_access: int = 0
    """Time of the last use; -1: no use is expected."""
    entry: "tuple[bool, int, int, Node] | None" = None
    """Place in the order of eviction, or None."""
    evicted: bool = False


class Inserted(NamedTuple):
    node: Node
    num_existing: int
    """Leading pages that the tree already had; the caller keeps its duplicates."""
    existing: np.ndarray


class RadixTree:
    """Page-aligned prefixes → pages, separate for each (weights epoch, cache salt).

    Array operations per node and O(tokens given); locks cost amortised O(1), evictions O(log nodes) a node.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.first_epoch = 0
        self.num_evictable_pages = 0
        self.num_locked_pages = 0
        self.num_leased_pages = 0
        self._roots: dict[tuple[int, Salt], Node] = {}
        self._clock = 0
        self._serial = 0
        # The entry (leased, last access when pushed, serial, node) of every unlocked leaf, and left-overs:
        # one whose node was used since is pushed again when it surfaces; one whose node is no unlocked leaf,
        # or has an earlier entry now, is dropped.
        self._heap: list[tuple[bool, int, int, Node]] = []
        self._outdated = 0  # entries with an earlier one of the same node

    def match(self, epoch: int, salt: Salt, tokens: np.ndarray) -> tuple[np.ndarray, Node | None]:
        """Return the longest stored prefix of ``tokens``: pages (int32) and node, which may be split."""
        root = self._roots.get((epoch, salt)) if epoch >= self.first_epoch else None
        if root is None:
            return NO_PAGES, None
        runs, node = self._descend(root, _int32(tokens))
        return (np.concatenate(runs), node) if runs else (NO_PAGES, None)

    def insert(
        self, epoch: int, salt: Salt, tokens: np.ndarray, pages: np.ndarray, after: Node | None = None
    ) -> Inserted:
        """Store ``pages`` (int32 [n], n ≥ 1) for ``tokens`` (``n * page_size``), unlocked; may split nodes.

        With ``after``, a locked node, the run continues that node's path, at the cost of what is new. Raises
        LedgerError if the epoch is over, ValueError if lengths do not agree.
        """
        if len(pages) == 0 or len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}")
        if epoch < self.first_epoch or (after is not None and after.epoch != epoch):
            raise LedgerError(f"insert under epoch {epoch}, first living epoch is {self.first_epoch}")
        tokens = _int32(tokens)
        start = after if after is not None else self._roots.get((epoch, salt))
        if start is None:
            start = self._new_node(None, epoch, salt, _NO_TOKENS, NO_PAGES)
            self._roots[epoch, salt] = start
        runs, node = self._descend(start, tokens)
        existing = np.concatenate(runs) if runs else NO_PAGES
        done = len(existing)
        if done < len(pages):
            rest = tokens[done * self.page_size :].copy()
            leaf = self._new_node(node, epoch, salt, rest, np.array(pages[done:], dtype=np.int32))
            leaf.last_access = self._clock
            node.children[self._key(rest, 0)] = leaf
            self.num_evictable_pages += len(leaf.pages)
            self._offer(leaf)
            node = leaf
        return Inserted(node, done, existing)

    def _descend(self, node: Node, tokens: np.ndarray) -> tuple[list[np.ndarray], Node]:
        self._clock += 1
        node.last_access = self._clock
        runs: list[np.ndarray] = []
        at = 0
        while len(tokens) - at >= self.page_size:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                break
            shared = self._shared_pages(child, tokens[at:])
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.last_access = self._clock
            runs.append(node.pages)
            at += shared * self.page_size
        return runs, node

    def _key(self, tokens: np.ndarray, at: int) -> bytes:
        return tokens[at : at + self.page_size].tobytes()

    def _shared_pages(self, node: Node, tokens: np.ndarray) -> int:
        n = min(len(node.tokens), len(tokens))
        differ = node.tokens[:n] != tokens[:n]
        first = int(differ.argmax())
        return (first if differ[first] else n) // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut ``node`` after ``num_pages``; return the upper part. ``node`` keeps its locks."""
        cut = num_pages * self.page_size
        parent = node.parent
        assert parent is not None
        upper = self._new_node(
            parent, node.epoch, node.salt, _owned(node.tokens[:cut]), _owned(node.pages[:num_pages])
        )
        upper.lock_ref = int(node.lock_ref > 0)
        upper.lease_ref = int(node.lease_ref > 0)
        parent.children[self._key(node.tokens, 0)] = upper
        node.parent = upper
        node.tokens = _owned(node.tokens[cut:])
        node.pages = _owned(node.pages[num_pages:])
        upper.children[self._key(node.tokens, 0)] = node
        return upper

    def _new_node(
        self, parent: Node | None, epoch: int, salt: Salt, tokens: np.ndarray, pages: np.ndarray
    ) -> Node:
        self._serial += 1
        return Node(parent, epoch, salt, tokens, pages, self._serial)

    def lock(self, node: Node) -> None:
        """Protect the path from the root to ``node`` from eviction; as many unlocks undo it."""
        if node.epoch < self.first_epoch:
            reason = f"lock of a node of epoch {node.epoch}, first living epoch is {self.first_epoch}"
            raise LedgerError(reason)
        step: Node | None = node
        while step is not None:
            step.lock_ref += 1
            if step.lock_ref > 1:
                return
            self.num_evictable_pages -= len(step.pages)
            self.num_locked_pages += len(step.pages)
            step = step.parent

    def unlock(self, node: Node) -> np.ndarray:
        """Undo one :meth:`lock`; return the pages of an epoch that is over, which went with it."""
        if node.lock_ref < 1:
            raise LedgerError("unlock of a node that is not locked")
        gone: list[np.ndarray] = []
        step: Node | None = node
        while step is not None:
            step.lock_ref -= 1
            if step.lock_ref > 0:
                break
            parent = step.parent
            self.num_locked_pages -= len(step.pages)
            if step.epoch < self.first_epoch:
                gone.append(step.pages)
                self._detach(step)
            else:
                self.num_evictable_pages += len(step.pages)
                self._offer(step)
            step = parent
        return np.concatenate(gone) if gone else NO_PAGES

    def lease(self, node: Node) -> None:
        """Evict the path from the root to ``node`` after all that is not leased, until :meth:`unlease`."""
        step: Node | None = node
        while step is not None:
            step.lease_ref += 1
            if step.lease_ref > 1:
                return
            self.num_leased_pages += len(step.pages)
            step = step.parent

    def unlease(self, node: Node, *, dead: bool = False) -> None:
        """Undo one :meth:`lease`; with ``dead``, what only this path has will be evicted before all else."""
        step: Node | None = _left_of(node)
        while step is not None:
            step.lease_ref -= 1
            if step.lease_ref > 0:
                break
            self.num_leased_pages -= len(step.pages)
            self._offer(step)
            step = step.parent
        step = _left_of(node) if dead else None
        while step is not None and step.parent is not None and not step.lock_ref and not step.lease_ref:
            if not all(child.last_access < 0 for child in step.children.values()):
                break
            step.last_access = -1
            self._offer(step)
            step = step.parent

    def evict(self, num_pages: int) -> np.ndarray:
        """Drop unlocked pages and return them (int32).

        Those without a lease come first, of these the least recently used leaves, each from its end.
        """
        gone: list[np.ndarray] = []
        missing = num_pages
        while missing > 0 and self._heap:
            entry = self._heap[0]
            leaf = entry[-1]
            if entry is not leaf.entry:
                heapq.heappop(self._heap)
                self._outdated -= 1
            elif not self._is_evictable(leaf):
                heapq.heappop(self._heap)
                leaf.entry = None
            elif entry != (now := self._place(leaf)):
                leaf.entry = now
                heapq.heapreplace(self._heap, now)
            elif len(leaf.pages) > missing:
                keep = len(leaf.pages) - missing
                gone.append(leaf.pages[keep:].copy())
                leaf.tokens = _owned(leaf.tokens[: keep * self.page_size])
                leaf.pages = _owned(leaf.pages[:keep])
                self.num_leased_pages -= missing if leaf.lease_ref else 0
                missing = 0
            else:
                heapq.heappop(self._heap)
                leaf.entry = None
                gone.append(leaf.pages)
                missing -= len(leaf.pages)
                parent = leaf.parent
                assert parent is not None
                self._detach(leaf)
                leaf.evicted = True
                if leaf.lease_ref:
                    self.num_leased_pages -= len(leaf.pages)
                    parent.lease_ref += leaf.lease_ref - 1
                leaf.tokens, leaf.pages = _NO_TOKENS, NO_PAGES
                # A continuation stored through `after` does not touch the nodes above: age is handed up.
                parent.last_access = max(parent.last_access, leaf.last_access)
                self._offer(parent)
        pages = np.concatenate(gone) if gone else NO_PAGES
        self.num_evictable_pages -= len(pages)
        return pages

    def drop_epochs_before(self, epoch: int) -> np.ndarray:
        """End all epochs before ``epoch``; return their unlocked pages. Locked ones stay until unlocked.

        Leases of these epochs must have ended, as all have before :meth:`clear`.
        """
        self.first_epoch = max(self.first_epoch, epoch)
        gone: list[np.ndarray] = []
        for root in [root for root in self._roots.values() if root.epoch < self.first_epoch]:
            stack = [root]
            while stack:
                node = stack.pop()
                if node.lock_ref:
                    stack.extend(node.children.values())
                else:
                    gone.extend(below.pages for below in _subtree(node))
                    self._detach(node)
        self._rebuild()
        pages = np.concatenate(gone) if gone else NO_PAGES
        self.num_evictable_pages -= len(pages)
        return pages

    def clear(self) -> np.ndarray:
        if self.num_locked_pages:
            raise LedgerError(f"clear of a tree with {self.num_locked_pages} locked pages")
        pages = np.concatenate([NO_PAGES, *(node.pages for node in self.nodes())])
        self._roots.clear()
        self._heap.clear()
        self._outdated = 0
        self.num_evictable_pages = 0
        return pages

    def nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            for node in _subtree(root):
                if node.parent is not None:
                    yield node

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and not node.lock_ref and not node.children

    def _place(self, node: Node) -> tuple[bool, int, int, Node]:
        return (node.lease_ref > 0, node.last_access, node.serial, node)

    def _offer(self, node: Node) -> None:
        place = self._place(node)
        if self._is_evictable(node) and (node.entry is None or place < node.entry):
            self._outdated += node.entry is not None
            node.entry = place
            heapq.heappush(self._heap, place)
            if 2 * self._outdated > len(self._heap):
                self._rebuild()

    def _rebuild(self) -> None:
        living = [each for each in self._heap if each[-1].epoch >= self.first_epoch]
        self._heap = [each for each in living if each is each[-1].entry]
        self._outdated = 0
        heapq.heapify(self._heap)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            self._roots.pop((node.epoch, node.salt), None)
            return
        del parent.children[self._key(node.tokens, 0)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.epoch, parent.salt]


def _subtree(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.children.values())


def _left_of(node: Node) -> Node:
    while node.evicted and node.parent is not None:
        node = node.parent
    return node


def _int32(tokens: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _owned(part: np.ndarray) -> np.ndarray:
    """Return ``part``, copied if at most half of the memory it keeps alive: log2(run) copies of a token."""
    base = part.base
    return part.copy() if isinstance(base, np.ndarray) and 2 * part.size <= base.size else part
