"""A tier of KV behind the pool: host memory, then a file, for pages that leave the pool.

Invariants:
- A page's key names the weights that computed it, and a hash chained over the cache salt (with the adapter's
  version) and all tokens up to the page's end. So pages of other weights, adapters or salts are never found.
- Only pages of the prefix tree come here: full, computed, not stale.
- What is here is whole on every rank: pages whose copy failed on any rank are forgotten.
- The file has no name: no other process opens it, and none outlives the engine.
"""

import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from itertools import islice
from time import perf_counter
from typing import IO, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ...io_struct import CaesuraError, KVTierStatus
from .radix import Salt

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_EPOCH_BYTES = 8
_STAGED_ROWS = 16
"""Rows of the file that are read at a time."""


def first_key(epoch: int, salt: Salt) -> bytes:
    """Return what the first page's key follows, of weights that came with ``epoch``."""
    return epoch.to_bytes(_EPOCH_BYTES, "big") + _digest(repr(salt).encode())


def next_key(key: bytes, tokens: np.ndarray) -> bytes:
    """Return the key of a page with ``tokens`` (int32) behind the page of ``key``."""
    return key[:_EPOCH_BYTES] + _digest(key[_EPOCH_BYTES:] + tokens.tobytes())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


class PageStore:
    """Copies of pages of one rank: a row holds a page of every layer. Rows behind the last are the file's."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        nbytes: int,
        folder: str | None = None,
        file_bytes: int = 0,
        on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Each of ``tensors`` is indexed by page. Raises OSError if ``folder`` takes no file."""
        self._tensors, self._on_stream = tensors, on_stream
        self._starts, self.row_bytes = [], 0
        for tensor in tensors:
            self._starts.append(self.row_bytes)
            self.row_bytes += -(-tensor[0].nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_rows, self.file_rows = nbytes // self.row_bytes, file_bytes // self.row_bytes
        # No memory until written.
        self._rows = torch.empty((self.num_rows, self.row_bytes), dtype=torch.uint8)
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._checksums: dict[int, int] = {}
        """Checksums of the file's rows."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def save_pages(self, pages: list[int], rows: list[int]) -> None:
        index, to = torch.tensor(pages), torch.tensor(rows)
        with self._on_stream():
            for tensor, start in zip(self._tensors, self._starts, strict=True):
                taken = _bytes_of(tensor).index_select(0, index.to(tensor.device)).cpu()
                self._rows[:, start : start + taken.shape[1]].index_copy_(0, to, taken)

    def load_pages(self, rows: list[int], pages: list[int]) -> None:
        """Copy rows into pages that nobody reads. Raises OSError, with some pages undefined."""
        places = list(zip(rows, pages, strict=True))
        if here := [(row, page) for row, page in places if row < self.num_rows]:
            self._load(self._rows, [row for row, _ in here], [page for _, page in here])
        there = [(row - self.num_rows, page) for row, page in places if row >= self.num_rows]
        for at in range(0, len(there), _STAGED_ROWS):
            batch = there[at : at + _STAGED_ROWS]
            staged = torch.empty((len(batch), self.row_bytes), dtype=torch.uint8)
            for content, (row, _) in zip(staged.numpy(), batch, strict=True):
                self._require_all(os.preadv(self._descriptor, [content], row * self.row_bytes))
                if crc32(content) != self._checksums[row]:
                    raise OSError("a page of the file is not what was written")
            self._load(staged, list(range(len(batch))), [page for _, page in batch])

    def spill_rows(self, rows: list[int], file_rows: list[int]) -> None:
        """Write rows to the file. Raises OSError, with some of the file's rows undefined."""
        for row, place in zip(rows, file_rows, strict=True):
            content = self._rows[row].numpy().data
            self._require_all(os.pwrite(self._descriptor, content, place * self.row_bytes))
            self._checksums[place] = crc32(content)

    @property
    def _descriptor(self) -> int:
        assert self._file is not None, "there are no rows of a file without one"
        return self._file.fileno()

    def _require_all(self, transferred: int) -> None:
        if transferred != self.row_bytes:
            raise OSError(f"{transferred} of a page's {self.row_bytes} bytes were transferred")

    def _load(self, source: Tensor, rows: list[int], pages: list[int]) -> None:
        index, to = torch.tensor(rows), torch.tensor(pages)
        with self._on_stream():
            for tensor, start in zip(self._tensors, self._starts, strict=True):
                content = _bytes_of(tensor)
                taken = source[:, start : start + content.shape[1]].index_select(0, index)
                content.index_copy_(0, to.to(tensor.device), taken.to(tensor.device))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).view(torch.uint8)


class KVTier:
    """The pages that are in the tier: rank 0's knowledge of all ranks' stores, which have the same rows."""

    def __init__(self, store: PageStore, elsewhere: Callable[..., Any]) -> None:
        """``elsewhere`` calls a method of the other ranks, and returns what waits for them."""
        self._store, self._elsewhere = store, elsewhere
        self._num_rows, self._file_rows = store.num_rows, store.file_rows
        self._free, self._free_in_file = [*range(self._num_rows)], [*range(self._file_rows)]
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._in_file: OrderedDict[bytes, int] = OrderedDict()
        self._seconds = {"save_pages": 0.0, "load_pages": 0.0, "spill_rows": 0.0}
        self._pages = dict.fromkeys(self._seconds, 0)
        self._failures = 0
        self.saved_s = 0.0
        """Estimated seconds that computing the loaded pages would have taken."""

        self.close = store.close

    @property
    def capacity(self) -> int:
        return self._num_rows + self._file_rows

    def save(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """Copy the pages that are not here yet; of all given, the last is the last to go."""
        new = {key: page for key, page in zip(keys, pages, strict=True) if not self._touch(key)}
        while new:
            batch = dict(islice(new.items(), self._num_rows))
            new = {key: page for key, page in new.items() if key not in batch}
            if len(batch) > len(self._free):
                self._spill(len(batch) - len(self._free))
            rows = [self._free.pop() for _ in batch]
            if self._copy("save_pages", list(batch.values()), rows):
                self._rows.update(zip(batch, rows, strict=True))
            else:
                self._free += rows

    def load(self, keys: Iterable[bytes], pages: Sequence[int]) -> int:
        """Copy the longest run of ``keys`` that is here into ``pages``; return its number of pages."""
        found: dict[bytes, int] = {}
        for key, _ in zip(keys, pages, strict=False):
            if (row := self._rows.get(key)) is None:
                if (row := self._in_file.get(key)) is None:
                    break
                row += self._num_rows
            found[key] = row
        if not found:
            return 0
        if not self._copy("load_pages", list(found.values()), list(pages[: len(found)])):
            self._forget(found)
            return 0
        for key in reversed(found):
            self._touch(key)
        return len(found)

    def keep(self, epochs: set[int]) -> None:
        """Forget the pages of all weights but those that came with ``epochs``."""
        keys = [*self._rows, *self._in_file]
        self._forget(key for key in keys if int.from_bytes(key[:_EPOCH_BYTES], "big") not in epochs)

    def status(self, page_size: int) -> KVTierStatus:
        row = self._store.row_bytes
        return KVTierStatus(
            host_bytes=len(self._rows) * row,
            file_bytes=len(self._in_file) * row,
            limit_bytes=self._num_rows * row,
            file_limit_bytes=self._file_rows * row,
            hit_tokens=self._pages["load_pages"] * page_size,
            stored_tokens=self._pages["save_pages"] * page_size,
            load_s=self._seconds["load_pages"],
            store_s=self._seconds["save_pages"] + self._seconds["spill_rows"],
            saved_prefill_s=self.saved_s,
            failures=self._failures,
        )

    def _touch(self, key: bytes) -> bool:
        entries = self._rows if key in self._rows else self._in_file
        if key not in entries:
            return False
        entries.move_to_end(key)
        return True

    def _spill(self, count: int) -> None:
        """Free the ``count`` longest unused rows: their pages go to the file, or are forgotten."""
        oldest = list(islice(self._rows.items(), count))
        moved = dict(oldest[-self._file_rows :] if self._file_rows else [])
        if len(moved) > len(self._free_in_file):
            self._forget(list(islice(self._in_file, len(moved) - len(self._free_in_file))))
        places = [self._free_in_file.pop() for _ in moved]
        if moved and self._copy("spill_rows", list(moved.values()), places):
            self._in_file.update(zip(moved, places, strict=True))
        else:
            self._free_in_file += places
        for key, row in oldest:
            del self._rows[key]
            self._free.append(row)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (row := self._rows.pop(key, None)) is not None:
                self._free.append(row)
            elif (row := self._in_file.pop(key, None)) is not None:
                self._free_in_file.append(row)

    def _copy(self, method: str, sources: list[int], targets: list[int]) -> bool:
        """Copy on all ranks; return False if one has failed."""
        started = perf_counter()
        elsewhere = self._elsewhere("copy_pages", method, sources, targets)
        try:
            getattr(self._store, method)(sources, targets)
            elsewhere.wait()
        except (CaesuraError, MemoryError, OSError, RuntimeError) as error:  # torch's are RuntimeErrors
            elsewhere.close()
            self._failures += 1
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            logger.log(level, "the KV tier has lost %d pages: %s", len(sources), error)
            return False
        self._seconds[method] += perf_counter() - started
        self._pages[method] += len(sources)
        return True
