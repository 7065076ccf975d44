"""Checkpoints on disk: safetensors files, read with ``pread`` into one reusable bucket.

- Every header is checked against its file, and the files against the index, before a tensor is read. Each
  piece is checked to have arrived whole, from the very file whose header was read.
- Nothing is memory-mapped: a mapped file that someone truncates is SIGBUS, and its pages count as resident.
  The safetensors library offers no read at an offset, hence a parser of our own
  (``transfer/safetensors.py``).
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ....io_struct import CaesuraError, DeltaBase, ErrorCode
from ....transfer.safetensors import LENGTH_BYTES, SafetensorsError, TensorEntry, header_length, parse_header
from ....transfer.weight_delta import DELTA_FILE, read_delta
from ...memory.workspace import Workspace
from ...models.config import ModelBackend, ModelConfig, config_difference, load_model_config
from ...runtime.dtypes import DTYPES
from ...runtime.files import checkpoint_error, open_regular, read_small, require_folder
from ..loader import WeightLoader
from ..source import BufferSource, Filled, Pieces, Place
from ..upload import Fill, WriteStream, pieces_of

MAX_HEADER_BYTES = 16 << 20
"""Some 130,000 tensors; the format's own 100 MB would block the loop."""
MAX_HEADERS_BYTES = 64 << 20
MAX_INDEX_BYTES = 32 << 20
"""Twice the largest that is known."""
_STEMS = ("model", "diffusion_pytorch_model")
"""Names of a checkpoint's own files in transformers and diffusers; other safetensors are variants."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

Owned = Callable[[str], tuple[range, ...] | None]
"""Maps a tensor's name to the rows of it that are needed, ascending; None means all of them."""

OpenFolder = Callable[[str, str | None], "Checkpoint"]
"""Opens a folder whose config fits the model, or a component of it; raises as :func:`open_fitting`."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(slots=True, frozen=True)
class _File:
    path: Path
    identity: tuple[int, int, int, int]
    """Device, inode, size and modification time in ns of the file whose header was read."""
    header: bytes
    data_start: int
    changed_ns: int
    """Time of the last change of any kind, which nobody can set."""
    tensors: list[TensorEntry]


class Checkpoint:
    """A checked folder of safetensors files, the source of an update; holds no open file."""

    name = "disk"
    complete = True
    delta: DeltaBase | None = None

    def __init__(
        self, path: Path, files: list[_File], workspace: Workspace | None = None, owned: Owned | None = None
    ) -> None:
        self.path = path
        self.specs = [tensor for file in files for tensor in file.tensors]
        self.total_bytes = sum(tensor.nbytes for tensor in self.specs)
        self._files = files
        self._workspace = workspace or Workspace()
        self._owned = owned

    def into(self, workspace: Workspace, owned: Owned | None = None) -> "Checkpoint":
        """Return it to be read by way of ``workspace``, only the rows that are ``owned``.

        Fresh memory would cost a page fault for every 4 KB of it, each time.
        """
        return Checkpoint(self.path, self._files, workspace, owned)

    @property
    def digest(self) -> str:
        """Hexadecimal digest of names, sizes, times and headers of the files, wherever the folder is."""
        found = hashlib.sha256()
        for file in self._files:
            _, _, size, modified = file.identity
            found.update(f"{file.path.name}\0{size}\0{modified}\0".encode(errors="surrogateescape"))
            found.update(file.header)
        return found.hexdigest()

    @property
    def local_digest(self) -> str:
        """The :attr:`digest` with inodes and change times: differs for a copy, and for replaced files."""
        facts = [(file.identity[1], file.changed_ns) for file in self._files]
        return hashlib.sha256(f"{self.digest}{facts}".encode()).hexdigest()

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool] = lambda name: False) -> Pieces:
        """Read tensors in file order, large ones in ranges of rows; raises as :meth:`filled`."""
        for places, part in self.filled(bucket_bytes, skip):
            for place in places:
                yield place.piece(part)

    def filled(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Filled:
        """Read into one bucket of ``bucket_bytes``; yield the places of what it holds, and the bucket.

        A row that is larger is read into a temporary of its own. Raises CHECKPOINT_ERROR when a file changed
        since its header was read, or ends early.
        """
        bucket = self._workspace.take("disk", (bucket_bytes,), torch.uint8)
        for fill in self.fills(bucket_bytes, skip):
            part = bucket if fill.nbytes <= bucket_bytes else torch.empty(fill.nbytes, dtype=torch.uint8)
            fill.read(part[: fill.nbytes])
            yield fill.places, part

    def fills(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Iterator[Fill]:
        """Yield the reads that :meth:`pieces` does, of one row at least; its file stays open with a read."""
        for file in self._files:
            tensors = [tensor for tensor in file.tensors if not skip(tensor.name)]
            if not tensors:
                continue
            opened = _OpenFile(file)
            for run in _runs(tensors, bucket_bytes, self._rows):
                if len(run) == 1:
                    yield from _fills_of(opened, run[0], bucket_bytes, self._rows(run[0]))
                else:
                    yield _fill_of_run(opened, run)

    def _rows(self, tensor: TensorEntry) -> tuple[range, ...]:
        owned = None if self._owned is None else self._owned(tensor.name)
        return _all_rows(tensor) if owned is None else owned


def open_fitting(path: str, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint of an update; raises WEIGHT_MISMATCH if its config asks for another forward."""
    checkpoint = open_checkpoint(path)
    backend: ModelBackend = "native" if config.transformers_config is None else "transformers"
    differing = config_difference(config, load_model_config(path, backend))
    if differing:
        reason = f"{path}/config.json differs in what the forward reads: {', '.join(differing)}"
        raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, reason, config=differing)
    return checkpoint


def open_delta(folder: str, base: DeltaBase | None) -> tuple[BufferSource, str | None] | None:
    """Read a delta's folder, and its label; None if it is not one. ``base`` comes before the file's own.

    The file's label of its base is compared only if nothing else tells the base.
    """
    path = Path(folder) / DELTA_FILE
    try:
        if not path.exists():
            return None
        with open(open_regular(path), "rb") as file:
            facts, specs, buffer = read_delta(file)
    except SafetensorsError as error:
        raise checkpoint_error(path, str(error)) from error
    except OSError as error:
        raise checkpoint_error(path, f"cannot be read: {error.strerror}") from error
    given = base or DeltaBase()
    merged = DeltaBase(
        base_epoch=given.base_epoch,
        base_digest=given.base_digest or facts.base_digest,
        base_version=given.base_version,
        digest=given.digest or facts.digest,
    )
    if (merged.base_epoch, merged.base_digest, merged.base_version) == (None, None, None):
        merged = msgspec.structs.replace(merged, base_version=facts.base_version)
    return BufferSource("disk", specs, [memoryview(buffer)], delta=merged), facts.weight_version


def open_checkpoint(path: str | Path, stems: Sequence[str] = _STEMS) -> Checkpoint:
    """Return the checkpoint in ``model.safetensors``, an index's files, or any; raises CHECKPOINT_ERROR.

    ``stems``: other names than ``model``, the first that is there counts.
    """
    folder = Path(path)
    try:
        return _open_folder(folder, stems)
    except OSError as error:  # from reading the names in the folder
        raise checkpoint_error(folder, f"cannot be read: {error.strerror}") from error


def _open_folder(folder: Path, stems: Sequence[str]) -> Checkpoint:
    require_folder(folder)
    index: dict[str, str] | None = None
    paths = sorted(folder.glob("*.safetensors"))
    for stem in stems:
        if (folder / f"{stem}.safetensors").exists():
            paths = [folder / f"{stem}.safetensors"]
            break
        if (folder / f"{stem}.safetensors.index.json").exists():
            index = _read_index(folder / f"{stem}.safetensors.index.json")
            paths = [folder / name for name in sorted(set(index.values()))]
            break
    if not paths:
        others = any(True for pattern in _OTHER_WEIGHTS for _ in folder.glob(pattern))
        reason = "has no *.safetensors file"
        raise checkpoint_error(
            folder, f"{reason}; only safetensors is read, never a pickle" if others else reason
        )
    files: list[_File] = []
    for file_path in paths:
        files.append(_read_file_header(file_path))
        if sum(file.data_start for file in files) > MAX_HEADERS_BYTES:
            raise checkpoint_error(folder, f"has more than {MAX_HEADERS_BYTES} bytes of headers")
    _check_names(folder, files, index)
    return Checkpoint(folder, files)


def load_from_disk(
    loader: WeightLoader, checkpoint: Checkpoint, bucket_bytes: int, stream: WriteStream | None = None
) -> None:
    """Check and load a complete checkpoint without interruption, for a cold start."""
    loader.check(checkpoint.specs, complete=True)
    source = checkpoint.into(Workspace(), loader.owned)
    for piece in pieces_of(source, loader, stream, bucket_bytes):
        assert piece is not None, "files never say that nothing has come"
        loader.write(piece)


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = msgspec.json.decode(read_small(path, MAX_INDEX_BYTES), type=_Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise checkpoint_error(path, f"is not a safetensors index: {error}") from error
    for file in index.weight_map.values():
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise checkpoint_error(path, f"names {file!r}, which is not a safetensors file of this folder")
    return index.weight_map


def _read_file_header(path: Path) -> _File:
    descriptor = open_regular(path)
    try:
        identity, changed_ns = _identity(descriptor), os.fstat(descriptor).st_ctime_ns
        size = identity[2]
        length = header_length(os.pread(descriptor, LENGTH_BYTES, 0), size, MAX_HEADER_BYTES)
        header = os.pread(descriptor, length, LENGTH_BYTES)
        if len(header) < length or _identity(descriptor) != identity:
            raise checkpoint_error(path, "changed while its header was read")
        data_start = LENGTH_BYTES + length
        tensors = parse_header(header, size - data_start)
    except SafetensorsError as error:
        raise checkpoint_error(path, str(error)) from error
    except OSError as error:
        raise checkpoint_error(path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return _File(path, identity, hashlib.sha256(header).digest(), data_start, changed_ns, tensors)


def _check_names(folder: Path, files: list[_File], index: dict[str, str] | None) -> None:
    found: dict[str, str] = {}
    for name, file in ((tensor.name, each.path.name) for each in files for tensor in each.tensors):
        if name in found:
            raise checkpoint_error(folder, f"holds {name!r} twice, in {found[name]} and {file}")
        found[name] = file
    if index is None or index == found:
        return
    wrong = sorted(name for name in index.keys() | found.keys() if index.get(name) != found.get(name))
    name = wrong[0]
    says, has = index.get(name, "no file"), found.get(name, "no file")
    others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise checkpoint_error(folder, f"has an index that puts {name!r} in {says} while it is in {has}{others}")


def _all_rows(tensor: TensorEntry) -> tuple[range, ...]:
    return (range(tensor.shape[0] if tensor.shape else 1),)


def _runs(
    tensors: list[TensorEntry], limit: int, rows: Callable[[TensorEntry], tuple[range, ...]]
) -> Iterator[list[TensorEntry]]:
    """Yield runs of adjacent, aligned tensors within ``limit`` bytes; alone where rows are not needed."""
    run: list[TensorEntry] = []
    for tensor in tensors:
        if rows(tensor) != _all_rows(tensor):
            yield from ([run] if run else [])
            yield [tensor]
            run = []
            continue
        if run:
            place = tensor.offset - run[0].offset
            adjoins = run[-1].offset + run[-1].nbytes == tensor.offset
            if not adjoins or place + tensor.nbytes > limit or place % DTYPES[tensor.dtype].itemsize:
                yield run
                run = []
        run.append(tensor)
    if run:
        yield run


class _OpenFile:
    """An open file, closed with its last reference: reads of several buckets may be under way."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.descriptor = open_regular(file.path)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, part: Tensor, offset: int, name: str) -> None:
        """Fill ``part``, uint8, from ``offset`` in the data on; errors name the tensor ``name``."""
        # A file rewritten under us could be right in size and torn in content: compare around every read.
        self._require_unchanged()
        view = memoryview(part.numpy().data)
        done, offset = 0, self.file.data_start + offset
        while done < len(view):
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                reason = f"cannot be read in {name!r}: {error.strerror}"
                raise checkpoint_error(self.file.path, reason) from error
            if count == 0:
                reason = f"ends within {name!r}: {done} of {len(view)} bytes were there"
                raise checkpoint_error(self.file.path, reason)
            done += count
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        if _identity(self.descriptor) != self.file.identity:
            raise checkpoint_error(self.file.path, "changed while it was being read")


def _fill_of_run(opened: _OpenFile, run: list[TensorEntry]) -> Fill:
    """Return one read of several small tensors: a read for each takes longer than the bytes."""
    begin, end, name = run[0].offset, run[-1].offset + run[-1].nbytes, run[0].name
    places = [
        Place(t.name, tuple(t.shape), DTYPES[t.dtype], 0, tuple(t.shape), t.offset - begin) for t in run
    ]
    return Fill(end - begin, lambda part: opened.read(part, begin, name), places)


def _fills_of(
    opened: _OpenFile, tensor: TensorEntry, bucket_bytes: int, needed: tuple[range, ...]
) -> Iterator[Fill]:
    """Yield reads of the ``needed`` rows of a large tensor, of at most ``bucket_bytes`` or one row.

    If the last row is not among them, or there is none, a piece of no rows marks the end. All columns are
    read: a call for a slice of each row would take longer than the page cache takes for the rest.
    """
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    num_rows = shape[0] if shape else 1
    row_bytes = tensor.nbytes // num_rows if num_rows else 0
    step = max(1, bucket_bytes // row_bytes) if row_bytes else max(1, num_rows)
    stop = 0
    for part in needed:
        stop = min(part.stop, num_rows)
        for start in range(part.start, stop, step):
            rows = min(step, stop - start)
            place = Place(tensor.name, shape, dtype, start, (rows, *shape[1:]) if shape else (), 0)
            offset = tensor.offset + start * row_bytes
            yield Fill(rows * row_bytes, partial(opened.read, offset=offset, name=tensor.name), [place])
    if stop < num_rows or not num_rows:
        end = Place(tensor.name, shape, dtype, num_rows, (0, *shape[1:]), 0)
        yield Fill(0, partial(opened.read, offset=tensor.offset, name=tensor.name), [end])
