"""Encoded prompts, kept for the requests that come with them again.

Invariants:
- An entry is found under all that its embeddings follow from: the token ids for each encoder, the request's
  length, and the epoch of the text encoders, which rises when an update has written one.
- Kept bytes never exceed the limit; what was used longest ago goes first. Nobody changes shared embeddings.
"""

import hashlib
from array import array
from collections import OrderedDict

from ...io_struct import PromptCacheStatus
from .image_request import Conditioning, Embeds

ENTRY_BYTES = 512
"""Estimated memory of an entry beside its tensors."""

_Key = tuple[int, bytes]


class PromptCache:
    """A cache of embeddings, those of prompts and of negative prompts alike, where they were computed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.hits = self.misses = 0
        """Prompts that were found, and prompts that were encoded."""
        self._epoch = 0
        self._entries: OrderedDict[_Key, tuple[Embeds, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self, conditioning: Conditioning) -> set[_Key]:
        longest = conditioning.max_sequence_length
        return {self._key(ids, longest) for ids in conditioning.unencoded}

    def fill(self, conditioning: Conditioning) -> bool:
        """Give ``conditioning`` what is kept; return True if it has all then."""
        for prompt in conditioning.prompts:
            if prompt.embeds is None:
                prompt.embeds = self._find(prompt.ids, conditioning.max_sequence_length)
        return conditioning.is_ready

    def keep(self, conditioning: Conditioning) -> None:
        for prompt in conditioning.prompts:
            if prompt.ids is None or prompt.embeds is None:
                continue
            key = self._key(prompt.ids, conditioning.max_sequence_length)
            if key not in self._entries:
                self.misses += 1
                self._add(key, prompt.embeds)

    def encoders_changed(self) -> None:
        self._epoch += 1
        self.clear()

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def status(self) -> PromptCacheStatus:
        return PromptCacheStatus(
            entries=len(self),
            nbytes=self.nbytes,
            limit_bytes=self.limit_bytes,
            hits=self.hits,
            misses=self.misses,
        )

    def _find(self, ids: list[list[int]] | None, longest: int) -> Embeds | None:
        if ids is None:
            return None
        key = self._key(ids, longest)
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return found[0]

    def _add(self, key: _Key, embeds: Embeds) -> None:
        size = ENTRY_BYTES + sum(each.nbytes for each in embeds.values())
        if size > self.limit_bytes:
            return
        self._entries[key] = embeds, size
        self.nbytes += size
        while self.nbytes > self.limit_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed

    def _key(self, ids: list[list[int]], longest: int) -> _Key:
        digest = hashlib.blake2b(digest_size=16)
        for row in (*ids, [longest]):
            digest.update(array("q", [len(row), *row]).tobytes())
        return self._epoch, digest.digest()
