"""Differences between two versions of weights, and a copy of those that engines have.

Invariants:
- Elements are compared by their bits in the dtype in which they are sent, and values are absolute: the engine
  gets exactly the bits of the new version.
- A tensor is sent whole where that is not more than its positions and values.
- Digests are those of all compared tensors (``transfer/weight_digest.py``): an engine that has others, or
  further ones, refuses the delta before the first byte.
"""

import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...io_struct import DeltaBase, StoredTensor, TensorSpec
from ...io_struct.base import MAX_FRAME_BYTES
from ...transfer import words
from ...transfer.safetensors import (
    DTYPES,
    LENGTH_BYTES,
    SafetensorsError,
    header_length,
    parse_header,
)
from ...transfer.weight_delta import DELTA_FILE, DeltaMetadata, read_delta, sparse_nbytes, write_delta
from ...transfer.weight_digest import TensorDigest, tensor_digest, weights_digest
from ..exceptions import CheckpointError, InvalidRequest, WeightMismatch
from .buckets import DTYPE_NAMES, AnyTensor, NamedTensors, SparseTensor, as_frames, buckets, pairs

WHOLE_SHARE = {"ipc": 0.1}
WHOLE_SHARE_OF_WIRES = 0.3
"""Share of all bytes from which on everything is sent as an ordinary update, whose pause is not longer then:
over shared memory, where bytes cost little, and elsewhere (docs/explanation/performance.md, "Deltas")."""
Weights = NamedTensors | str | os.PathLike[str]
"""Tensors by checkpoint name, or a checkpoint folder."""
Digests = Mapping[str, TensorDigest]


class WeightDelta(Mapping[str, AnyTensor]):
    """Tensors that changed, by checkpoint name: :class:`SparseTensor`, or whole where that is smaller."""

    def __init__(
        self,
        tensors: Mapping[str, AnyTensor],
        *,
        base_digest: str | None = None,
        digest: str | None = None,
        changed: int | None = None,
        after: Mapping[str, Tensor] | None = None,
        digests: Digests | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self.base_digest = base_digest
        """Digest of the old version, 32 hex digits, or None if it is not known."""
        self.digest = digest
        """Digest of the new version, or None."""
        self.changed = changed
        """Number of elements that changed, or None if it is not known."""
        self.after = after
        """All tensors of the new version, or None: a delta from a file has only what changed."""
        self.digests = digests
        """Digests of these tensors."""

    @classmethod
    def between(
        cls,
        old: Weights,
        new: Weights,
        *,
        like: Sequence[StoredTensor | TensorSpec] | None = None,
        digests: bool = True,
    ) -> "WeightDelta":
        """Compare two versions: tensors by name, or checkpoint folders.

        Args:
            like: ``client.weights_manifest().tensors``: tensors that the engine has not, such as a tied head,
                are left out, and the others compared and sent in the dtype that it stores, or as they are if
                it quantises them. None: all, as they are.
            digests: compute those of both versions, which engines compare with their own. Without them only
                ``base_epoch`` tells a wrong base.
        """
        return DeltaTracker(old, like=like, digests=digests, copy=False).delta(new)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(tensor.nbytes for tensor in self.values())

    @property
    def share(self) -> float | None:
        """Share of all elements that changed, or None if it is not known."""
        if self.changed is None or self.after is None:
            return None
        return self.changed / max(1, sum(tensor.numel() for tensor in self.after.values()))

    def is_small(self, transport: str) -> bool:
        """Return True if it pauses an engine for less time than all tensors, or these are not known."""
        if self.after is None:
            return True
        share = WHOLE_SHARE.get(transport, WHOLE_SHARE_OF_WIRES)
        return self.nbytes <= share * sum(tensor.nbytes for tensor in self.after.values())

    def base(self, base_epoch: int | None = None) -> DeltaBase:
        """Return what engines compare with their weights."""
        return DeltaBase(base_epoch=base_epoch, base_digest=self.base_digest, digest=self.digest)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        base_version: str | None = None,
        weight_version: str | None = None,
    ) -> Path:
        """Write ``delta.safetensors``, for ``update_weights_from_disk`` of ``folder``; return the file."""
        specs: list[TensorSpec] = []
        frames: list[memoryview] = []
        for name, tensor in self.items():
            (bucket,) = buckets([(name, tensor)], max(1, tensor.nbytes))
            (spec,), (frame,) = as_frames(bucket)
            specs.append(
                TensorSpec(
                    name=name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    nbytes=spec.nbytes,
                    count=spec.count,
                    buffer=len(frames),
                )
            )
            frames.append(frame)
        metadata = DeltaMetadata(
            base_digest=self.base_digest,
            digest=self.digest,
            base_version=base_version,
            weight_version=weight_version,
        )
        return write_delta(folder, specs, frames, metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "WeightDelta":
        """Read what :meth:`save` wrote; CheckpointError if it is torn or no delta."""
        path = Path(folder) / DELTA_FILE
        try:
            with open(path, "rb") as file:
                metadata, specs, buffer = read_delta(file)
        except (OSError, SafetensorsError) as error:
            raise CheckpointError(f"{path} {error}", path=str(path), reason=str(error)) from error
        data = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
        tensors: dict[str, AnyTensor] = {}
        for spec in specs:
            dtype = getattr(torch, DTYPES[spec.dtype].torch)
            own = data[spec.offset : spec.offset + spec.nbytes]
            if spec.count is None:
                tensors[spec.name] = own.view(dtype).view(spec.shape)
            else:
                tensors[spec.name] = SparseTensor(spec.shape, dtype, spec.count, own)
        return cls(tensors, base_digest=metadata.base_digest, digest=metadata.digest)

    def __getitem__(self, name: str) -> AnyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class DeltaTracker:
    """A copy of the weights that engines have, from which it makes deltas."""

    def __init__(
        self,
        tensors: Weights,
        *,
        like: Sequence[StoredTensor | TensorSpec] | None = None,
        digests: bool = True,
        copy: bool = True,
    ) -> None:
        """Copy the weights that engines have now; arguments are :meth:`WeightDelta.between`'s.

        ``copy`` False keeps references instead, to tensors that must not change; :meth:`sent` writes to them.
        """
        self._dtypes: dict[str, str | None] | None = None
        if like is not None:
            names = {tensor.name for tensor in like}
            self._dtypes = {
                tensor.name: None if f"{tensor.name}_scale_inv" in names else tensor.dtype for tensor in like
            }
        self._tensors: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}  # a head and the like, of which engines have one
        seen: dict[tuple[object, ...], tuple[str, Tensor]] = {}
        for name, given, tensor in self._each(tensors):
            if self._dtypes is None and tensor.numel():
                place = given.data_ptr(), given.dtype, given.shape, given.stride()
                first, _ = seen.setdefault(
                    place, (name, given)
                )  # its memory is not used again while it is here
                if first != name and _is_same(self._tensors[first], tensor):
                    self._tied[name] = first
                    continue
            self._tensors[name] = tensor.clone() if copy else tensor
        self._digests: Digests | None = None
        if digests:
            self._digests = {name: tensor_digest(tensor) for name, tensor in self._tensors.items()}
        self._undo: tuple[dict[str, AnyTensor], Digests | None] | None = None

    def delta(self, tensors: Weights) -> WeightDelta:
        """Return what ``tensors`` change; they must stay as they are until it has been sent.

        Tensors without a name here are unchanged. WeightMismatch if one is unknown or has another form.
        """
        found: dict[str, AnyTensor] = {}
        after, digests, changed = dict(self._tensors), dict(self._digests or {}), 0
        tied: dict[str, Tensor] = {}
        for name, _, new in self._each(tensors):
            if name in self._tied:
                tied[name] = new
                continue
            old = self._tensors.get(name)
            if old is None or old.shape != new.shape or old.dtype != new.dtype:
                was = "there was none" if old is None else f"it was {_form(old)}"
                raise WeightMismatch(f"{name!r} is {_form(new)}: {was} before", mismatched=[name])
            after[name] = new
            positions, before, values = words.changed(old, new)
            if not (count := positions.numel()):
                continue
            changed += count
            size = sparse_nbytes(list(new.shape), DTYPE_NAMES[new.dtype], count)
            as_whole = size >= min(new.nbytes, MAX_FRAME_BYTES)
            found[name] = new if as_whole else SparseTensor.of(new.shape, positions, values)
            if name in digests:
                digests[name] = digest = digests[name].copy()
                digest.change(positions, before, values)
        for name, new in tied.items():
            if not _is_same(after[self._tied[name]], new):
                reason = f"{name!r} was one tensor with {self._tied[name]!r} before, and has other values now"
                raise WeightMismatch(reason, mismatched=[name])
        return WeightDelta(
            found,
            base_digest=None if self._digests is None else weights_digest(self._digests),
            digest=None if self._digests is None else weights_digest(digests),
            changed=changed,
            after=after,
            digests=digests or None,
        )

    def sent(self, delta: WeightDelta) -> None:
        """Advance the copy, after every engine has replied that it has committed ``delta``.

        InvalidRequest if it is no delta of the copy, as after a call for it or another one.
        """
        if self._digests is not None and delta.base_digest != (own := weights_digest(self._digests)):
            raise InvalidRequest(f"the delta is of {delta.base_digest}, and the copy is {own}", field="delta")
        if not delta:  # engines keep what they would return to
            return
        before: dict[str, AnyTensor] = {}
        for name, tensor in delta.items():
            before[name] = self._overwrite(self._tensors[name], tensor)
        digests = delta.digests
        if digests is None and self._digests is not None:
            digests = {**self._digests, **{name: tensor_digest(self._tensors[name]) for name in delta}}
        self._undo, self._digests = (before, self._digests), digests

    def rolled_back(self) -> None:
        """Return to the copy before the last :meth:`sent`, after every engine has rolled back."""
        if self._undo is None:
            raise InvalidRequest("nothing to return to: the last delta is not known", field="tracker")
        before, self._digests = self._undo
        for name, tensor in before.items():
            self._overwrite(self._tensors[name], tensor)
        self._undo = None

    def _overwrite(self, own: Tensor, tensor: AnyTensor) -> AnyTensor:
        if isinstance(tensor, SparseTensor):
            return SparseTensor.of(
                own.shape, tensor.positions, words.scatter(own, tensor.positions, tensor.values)
            )
        before = own.clone()
        own.copy_(tensor)
        return before

    def _each(self, tensors: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield names, tensors as they are given, and those to compare."""
        for name, given in _folder(tensors) if isinstance(tensors, str | os.PathLike) else pairs(tensors):
            tensor = given
            if self._dtypes is not None:
                if name not in self._dtypes:
                    continue
                if (dtype := self._dtypes[name]) is not None:
                    tensor = tensor.to(getattr(torch, DTYPES[dtype].torch))
            yield name, given, tensor.detach().cpu().contiguous()


def _is_same(one: Tensor, other: Tensor) -> bool:
    return _form(one) == _form(other) and not words.changed(one, other)[0].numel()


def _form(tensor: Tensor) -> str:
    return f"{DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}"


def _folder(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint folder, mapped: pages that are written become private."""
    paths = sorted(path for path in Path(folder).glob("*.safetensors") if path.name != DELTA_FILE)
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors files", path=str(folder))
    for path in paths:
        yield from mapped_file(path)


def mapped_file(path: Path, mapping: mmap.mmap | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield a safetensors file's tensors, in ``mapping`` or a private one; CheckpointError if it is torn."""
    try:
        with open(path, "rb", opener=_regular) as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(LENGTH_BYTES), size)
            data = LENGTH_BYTES + length
            entries = parse_header(file.read(length), size - data)
            mapping = mapping or mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, SafetensorsError) as error:
        raise CheckpointError(f"{path} {error}", path=str(path), reason=str(error)) from error
    for entry in entries:
        dtype: Any = getattr(torch, DTYPES[entry.dtype].torch)
        if not entry.nbytes:
            yield entry.name, torch.empty(entry.shape, dtype=dtype)
            continue
        octets = torch.frombuffer(mapping, dtype=torch.uint8, count=entry.nbytes, offset=data + entry.offset)
        yield entry.name, octets.view(dtype).view(entry.shape)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # else a pipe would block for ever
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SafetensorsError("is not a regular file")
    return descriptor
