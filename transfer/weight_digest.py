"""A digest of weights that follows changes of single elements, so that holders can compare what they have.

- Linear: a change of some elements changes it without a look at the rest, and parts of a tensor add up. So it
  does not depend on the order in which elements come, on how they are cut, or on who holds which.
- A change within one word always changes it; others stay unseen about once in 2**128. It is made for errors,
  not against forgers: whoever wants two different tensors with one digest can compute them.
- The bytes of a tensor in checkpoint layout are little-endian signed 16-bit words ``x[i]``. With ``i`` =
  4096 k + j, lane ``l`` is the sum over k of B[l, k] times the sum over j of A[l, j] x[i], modulo 2**32: A is
  a fixed table of odd 16-bit numbers, B an odd 32-bit number of a counter.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from . import words
from .safetensors import NAMES_BY_TORCH

LANES = 4
_BLOCK = 4096
_CHUNK = 64  # blocks: 2 MiB of float64
_SHARED = 1 << 19
"""Fewest words that a thread of several looks at."""
_PANEL = 32
"""Rows of packed storage that threads must not share."""
_MODULUS = 1 << 32
_LANES = Struct(f"<{LANES}I")
_GAMMA = 0x9E3779B97F4A7C15


class Copy(NamedTuple):
    """Place that rows are copied to while they are digested."""

    target: Tensor
    """Storage, whose rows have as many bytes as those that are copied; or what ``pack`` takes."""
    row: int
    """First row there."""
    pack: int | None = None
    """Address of a function of the type ``Pack`` (``weight_digest.cpp``) that writes rows, or None."""
    equal: int | None = None
    """Address of the one that compares them, or None with ``pack``."""


@dataclass(slots=True)
class TensorDigest:
    """Lanes of one tensor, or of a part of it; those of parts add up."""

    dtype: str
    """Safetensors name of the type of the elements."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    lanes: tuple[int, ...] = (0,) * LANES
    _waiting: Tensor | None = field(default=None, repr=False, compare=False)
    """Sums that the device still computes, int64 [LANES]."""

    def add(self, start: int, values: Tensor) -> None:
        """Add ``values``, of ``dtype``, that are at flat element ``start`` and after it, in order."""
        flat = values.reshape(-1)
        self._add(_lanes_of_run(_bits(flat), start * max(1, flat.itemsize // 2)))

    def add_copied(self, start: int, rows: Tensor, copy: Copy) -> None:
        """Add ``rows`` [n, width], contiguous, on the CPU, and copy them; needs :func:`words.library`."""
        compiled = words.library()
        assert compiled is not None, "nobody copies without it"
        count, row_words = len(rows), rows[0].nbytes // 2
        word, threads = start * rows.itemsize // 2, torch.get_num_threads()
        share = -(-max(_SHARED // row_words, -(-count // threads)) // _PANEL) * _PANEL

        def take(first: int) -> list[int]:
            lanes = (ctypes.c_uint32 * LANES)()
            compiled.caesura_words_digest_copied(
                rows.data_ptr() + 2 * first * row_words, min(share, count - first), row_words,
                word + first * row_words, lanes, copy.pack, copy.target.data_ptr(), copy.row + first,
            )  # fmt: skip
            return list(lanes)

        starts = range(0, count, share)
        for lanes in words.threads().map(take, starts) if len(starts) > 1 else map(take, starts):
            self.merge(lanes)

    def change(self, positions: Tensor, old: Tensor, new: Tensor) -> None:
        """Replace the elements at flat ``positions``, each of which is there once; all three are 1-D."""
        for at, before, after in zip(*(each.split(_CHUNK * _BLOCK) for each in (positions, old, new))):
            self._add(_lanes_of_change(at.to(torch.int64).contiguous(), _bits(before), _bits(after)))

    def merge(self, lanes: Sequence[int]) -> None:
        """Add the lanes of another part of the tensor."""
        self.lanes = tuple((mine + other) % _MODULUS for mine, other in zip(self.settle(), lanes))

    def settle(self) -> tuple[int, ...]:
        """Return the lanes, after waiting for those that a device computes."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting.tolist(), None
            self.merge(waiting)
        return self.lanes

    def copy(self) -> "TensorDigest":
        return TensorDigest(self.dtype, self.shape, self.settle())

    def _add(self, sums: Tensor) -> None:
        if sums.device.type == "cpu":
            self.merge(sums.tolist())
        else:
            self._waiting = sums if self._waiting is None else self._waiting + sums


def weights_digest(digests: Mapping[str, TensorDigest]) -> str:
    """Return the digest of whole weights, 32 hex digits, from those of their tensors by checkpoint name."""
    total = 0
    for name, digest in digests.items():
        hashed = _begun(name, digest.dtype, digest.shape).copy()
        hashed.update(_LANES.pack(*digest.settle()))
        total += int.from_bytes(hashed.digest(), "little")
    return f"{total % (1 << 128):032x}"


@lru_cache(1 << 15)
def _begun(name: str, dtype: str, shape: tuple[int, ...]) -> blake2b:
    """Return the hash of all that does not change of a tensor with its values."""
    return blake2b(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode(), digest_size=16)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of weights, given in checkpoint layout and in the dtypes that an engine stores."""
    return weights_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})


def tensor_digest(tensor: Tensor) -> TensorDigest:
    dtype = NAMES_BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
    digest = TensorDigest(dtype, tuple(tensor.shape))
    digest.add(0, tensor)
    return digest


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8 if values.itemsize == 1 else torch.int16)


@cache
def _table(device: torch.device) -> Tensor:
    """Return A as int64 [LANES, _BLOCK]."""
    numbers = _mixed(torch.arange(LANES * _BLOCK, dtype=torch.int64)).bitwise_and(0xFFFF).bitwise_or(1)
    return (numbers - (numbers >> 15) * 0x10000).view(LANES, _BLOCK).to(device)


@cache
def _factors(device: torch.device) -> Tensor:
    """Return A as float64 [_BLOCK, LANES]: sums of 4096 products of 16-bit numbers are exact in it."""
    return _table(device).to(torch.float64).T.contiguous()


def _of_blocks(blocks: Tensor) -> Tensor:
    """Return B for numbers of blocks, as int64 [LANES, …]."""
    lanes = torch.arange(1, LANES + 1, device=blocks.device).view(LANES, *[1] * blocks.dim())
    return _mixed(~(blocks * LANES + lanes)).bitwise_and(0xFFFFFFFF).bitwise_or(1)


def _mixed(counters: Tensor) -> Tensor:
    """Return the outputs of SplitMix64 (Steele, Lea and Flood, 2014) for counters, modulo 2**64."""
    state = counters * _signed(_GAMMA)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64)


def _lanes_of_run(bits: Tensor, start: int) -> Tensor:
    """Return the lanes, int64 and not reduced, of bytes or words from number ``start`` on."""
    word, sums = start, torch.zeros(LANES, dtype=torch.int64, device=bits.device)
    if bits.dtype == torch.uint8:
        word, before = divmod(start, 2)
        if before or len(bits) % 2 or bits.storage_offset() % 2:
            bits = torch.nn.functional.pad(bits, (before, (before + len(bits)) % 2))
        bits = bits.view(torch.int16)
    if bits.device.type == "cpu" and (compiled := words.library()) is not None:
        share = max(_SHARED, -(-len(bits) // torch.get_num_threads()))

        def look(first: int) -> list[int]:
            lanes = (ctypes.c_uint32 * LANES)()
            count = min(share, len(bits) - first)
            compiled.caesura_words_digest(bits.data_ptr() + 2 * first, count, word + first, lanes)
            return list(lanes)

        starts = range(0, len(bits), share)
        found = words.threads().map(look, starts) if len(starts) > 1 else map(look, starts)
        return torch.tensor([[0] * LANES, *found]).sum(0)
    done = 0
    while done < len(bits):
        block, first = divmod(word + done, _BLOCK)
        part = bits[done : done + _CHUNK * _BLOCK - first]
        padded = torch.zeros(
            -(-(first + len(part)) // _BLOCK), _BLOCK, dtype=torch.float64, device=bits.device
        )
        padded.view(-1)[first : first + len(part)] = part
        of_blocks = _of_blocks(torch.arange(block, block + len(padded), device=bits.device))
        sums += ((padded @ _factors(bits.device)).to(torch.int64) * of_blocks.T).sum(0)
        done += len(part)
    return sums


def _lanes_of_change(positions: Tensor, old: Tensor, new: Tensor) -> Tensor:
    is_plain = new.dtype == torch.int16 and len(new) == len(positions) and new.device.type == "cpu"
    if is_plain and (compiled := words.library()) is not None:
        lanes = (ctypes.c_uint32 * LANES)()
        compiled.caesura_words_digest_change(
            positions.data_ptr(), 1, old.data_ptr(), new.data_ptr(), len(new), lanes
        )
        return torch.tensor(list(lanes))
    if new.dtype == torch.uint8:  # the second byte of a word is the one with the sign
        second = positions % 2 == 1
        less, more = (
            torch.where(second, bits.view(torch.int8).to(torch.int64) * 256, bits.to(torch.int64))
            for bits in (old, new)
        )
        places = positions // 2
    else:
        each = len(new) // max(1, len(positions))
        less, more = old.to(torch.int64), new.to(torch.int64)
        places = (positions[:, None] * each + torch.arange(each, device=positions.device)).view(-1)
    factors = _table(places.device)[:, places % _BLOCK] * _of_blocks(places // _BLOCK)
    return (factors * (more - less)).sum(1)
