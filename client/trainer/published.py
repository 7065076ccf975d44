"""Versions of a checkpoint that a trainer publishes as folders, applied to a copy of it on this host.

slime's folders ``weight_v000007`` and SkyRL's ``v00000007`` hold, for each tensor that changed, zstd of the
xor with the version before, or of the bytes that are new, and a checksum of the new state.

Invariants:
- Nothing is written before every tensor of a version is there and has its checksum. What changes is saved
  first (``delta.safetensors``), so that the next pull completes what a process that died has begun to write.
- A version is applied to the one that it names. One that is no delta replaces the copy, after all of it has
  been read and written beside it. A folder with files that no pull has made is left alone.
- A copy belongs to one process at a time, by a lock on its host.
"""

import fcntl
import hashlib
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from ...transfer import words
from ...transfer.safetensors import LENGTH_BYTES
from ...transfer.weight_delta import sparse_nbytes
from ..exceptions import CheckpointError, InvalidRequest, Unsupported
from .buckets import DTYPE_NAMES, AnyTensor, SparseTensor
from .sparse_updates import WeightDelta, mapped_file

STATE_FOLDER = ".weight_sync"
_INDEX = "model.safetensors.index.json"
Bytes = bytes | memoryview
_Digits = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")]


@dataclass(frozen=True, slots=True)
class Patch:
    name: str
    data: Bytes
    """Compressed."""
    checksum: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class Version:
    folder: Path
    base: int | None
    """Version that it changes. None: the folder is a whole checkpoint."""
    encoding: Literal["xor", "overwrite"] = "xor"
    patches: Callable[[], Iterator[Patch]] = lambda: iter(())


class _State(msgspec.Struct, omit_defaults=True):
    version: _Digits | None = None
    """Version that the files have. None: they are of several."""
    applying: _Digits | None = None
    """Version whose delta is saved, and perhaps written in part."""


class _SlimeIndex(msgspec.Struct):
    metadata: dict[str, Any] = {}
    weight_map: dict[str, str] = {}


class _SafetensorsHeader(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default={})


class _SkyRecord(msgspec.Struct):
    name: str
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str = "xxh3-128"


class _SkyManifest(msgspec.Struct):
    version: int
    base_version: int
    tensors: list[_SkyRecord] = []


def slime_version(source: Path, number: int) -> Version:
    """Return version ``number`` of slime's folder; CheckpointError if it is not there, or not whole."""
    folder = source / f"weight_v{number:06d}"
    if not folder.is_dir():
        raise _wrong(folder, "is not there: the version has not been published, or not as a whole")
    index = _json(folder / _INDEX, _SlimeIndex) if (folder / _INDEX).is_file() else _SlimeIndex()
    metadata = index.metadata
    encoding = metadata.get("delta_encoding")
    if encoding is None:
        return Version(folder, None)
    if encoding not in ("xor", "overwrite"):
        raise Unsupported(f"{folder}: the encoding {encoding!r} is not known", field="delta_encoding")
    if metadata.get("compression_format") != "zstd":
        raise Unsupported(f"{folder}: the compression must be zstd", field="compression_format")
    if _number(metadata.get("version")) != number:
        raise _wrong(folder, f"says that it is version {metadata.get('version')}")
    algorithm = str(metadata.get("checksum_format"))

    def patches() -> Iterator[Patch]:
        files = set(index.weight_map.values()) | {path.name for path in folder.glob("*.safetensors")}
        for file in sorted(files):
            tensors = list(mapped_file(_inside(folder, file)))  # a torn one is refused here
            checksums = _file_metadata(folder / file)
            for name, tensor in tensors:
                yield Patch(name, _data(tensor), checksums.get(name, ""), algorithm)

    return Version(folder, _number(metadata.get("base_version")), encoding, patches)


def skyrl_version(folder: Path, number: int) -> Version:
    """Return the version in a folder of SkyRL's. Raises as :func:`slime_version`."""
    if not (folder / "manifest.json").is_file():
        raise _wrong(folder, "has no manifest.json: the version has not been published")
    manifest = _json(folder / "manifest.json", _SkyManifest)
    if manifest.version != number:
        raise _wrong(folder, f"says that it is version {manifest.version}")

    def patches() -> Iterator[Patch]:
        held: tuple[str, dict[str, Tensor]] = ("", {})
        for record in manifest.tensors:
            if record.payload_file != held[0]:
                held = record.payload_file, dict(mapped_file(_inside(folder, record.payload_file)))
            if record.payload_key not in held[1]:
                raise _wrong(folder, f"lacks {record.payload_key!r} in {record.payload_file}")
            data = _data(held[1][record.payload_key])
            yield Patch(record.name, data, record.checksum, record.checksum_algorithm)

    return Version(folder, manifest.base_version, "xor", patches)


def pull(local: Path, base: Path | None, target: int, read: Callable[[int], Version]) -> Path | None:
    """Bring the copy in ``local`` to version ``target``; ``base`` is the checkpoint that is version 0.

    Return the folder of a delta from the version before ``target``, or None where it is a whole checkpoint,
    or the copy has passed several versions: engines that had the one before the call have not its base.
    Raises CheckpointError, with the copy at the last version that was whole.
    """
    if target < 0:
        raise InvalidRequest(f"target_version = {target} must not be negative", field="target_version")
    _require_own(local, base)
    with _locked(local):
        have = _completed(local)
        have = None if have is None or have > target else have
        chain: list[tuple[int, Version]] = []
        for number in count(target, -1):
            start = number
            if number == 0 or number == have:
                break
            version = read(number)
            if version.base is None:
                break
            if version.base != number - 1:
                raise _wrong(version.folder, f"changes version {version.base}, not {number - 1}")
            chain.append((number, version))
        if start != have:
            seed = base if start == 0 else version.folder
            if seed is None:
                raise CheckpointError(
                    f"{local} is empty, and the server knows no checkpoint to begin with", path=str(local)
                )
            _copy(seed, local, start)
        for number, version in reversed(chain):
            _apply(local, number, version)
        delta = _delta_folder(local, target)
        if len(chain) > 1:
            shutil.rmtree(delta, ignore_errors=True)
        return delta if delta.exists() else None


def _completed(local: Path) -> int | None:
    """Return the version of the copy, after completing one interrupted; None: begin anew."""
    path = _state_file(local)
    if not path.exists():
        return None
    state: _State = _json(path, _State)
    if state.applying is not None:
        try:
            delta = WeightDelta.load(_delta_folder(local, int(state.applying)))
        except CheckpointError:  # it is lost, and with it what else is to be written
            return None
        _write(local, delta)
        state = _State(state.applying)
        _remember(local, state)
    return None if state.version is None else int(state.version)


def _apply(local: Path, number: int, version: Version) -> None:
    own = {name: tensor for path in _files(local) for name, tensor in mapped_file(path)}
    found: dict[str, AnyTensor] = {}
    for patch in version.patches():
        old = own.get(patch.name)
        if old is None:
            raise _wrong(version.folder, f"changes {patch.name!r}, which {local} has not")
        before = old.reshape(-1).view(torch.uint8)
        after = _patched(before, patch, version)
        if checksum(patch.algorithm, _data(after)) != patch.checksum.lower():
            raise _wrong(version.folder, f"is torn, or of another base: {patch.name!r} has another checksum")
        new = after.view(old.dtype).view(old.shape)
        positions, _, values = words.changed(old, new)
        if not positions.numel():
            continue
        size = sparse_nbytes(list(old.shape), DTYPE_NAMES[old.dtype], positions.numel())
        found[patch.name] = new if size >= new.nbytes else SparseTensor.of(old.shape, positions, values)
    folder = _delta_folder(local, number)
    for earlier in folder.parent.glob("delta_v*"):
        shutil.rmtree(earlier, ignore_errors=True)
    delta = WeightDelta(found)
    delta.save(folder, base_version=str(number - 1), weight_version=str(number))
    _sync(folder)
    _remember(local, _State(f"{number - 1:06d}", f"{number:06d}"))
    _write(local, delta)
    _remember(local, _State(f"{number:06d}"))


def _patched(before: Tensor, patch: Patch, version: Version) -> Tensor:
    limit = before.numel() if version.encoding == "xor" else 4 + 5 * before.numel()
    content = _decompressed(patch, limit, version.folder)
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if version.encoding == "xor":
        if data.numel() != before.numel():
            raise _wrong(version.folder, f"has {data.numel()} bytes for {before.numel()} of {patch.name!r}")
        return before ^ data
    number = int(data[:4].view(torch.int32)) if data.numel() >= 4 else -1
    if number < 0 or data.numel() != 4 + 5 * number:
        raise _wrong(version.folder, f"has {data.numel()} bytes for {number} positions of {patch.name!r}")
    positions = data[4 : 4 + 4 * number].clone().view(torch.int32).long() & 0xFFFFFFFF
    if number and int(positions.max()) >= before.numel():
        raise _wrong(version.folder, f"has positions beyond the end of {patch.name!r}")
    after = before.clone()
    after[positions] = data[4 + 4 * number :]
    return after


def _decompressed(patch: Patch, limit: int, folder: Path) -> bytearray:
    try:
        import zstandard
    except ImportError as error:
        raise _needs("zstandard") from error
    try:
        size = zstandard.frame_content_size(patch.data)
        if size > limit:  # else a few bytes would make terabytes
            raise _wrong(folder, f"holds {size} bytes for {patch.name!r}, of at most {limit}")
        return bytearray(zstandard.ZstdDecompressor().decompress(patch.data, max_output_size=limit))
    except zstandard.ZstdError as error:
        raise _wrong(folder, f"is torn: {patch.name!r} does not decompress ({error})") from error


def checksum(algorithm: str, data: Bytes) -> str:
    """Return a checksum in hex; Unsupported if it is unknown, or its package is missing."""
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    if algorithm == "sha256":
        return hashlib.sha256(data).hexdigest()
    package = {"xxh3-128": "xxhash", "blake3": "blake3"}.get(algorithm)
    if package is None:
        raise Unsupported(f"the checksum {algorithm!r} is not known", field="checksum_format")
    try:
        module = __import__(package)
    except ImportError as error:
        raise _needs(package) from error
    hasher = module.xxh3_128() if package == "xxhash" else module.blake3()
    hasher.update(data)
    return str(hasher.hexdigest())


def _write(local: Path, delta: WeightDelta) -> None:
    """Overwrite what a delta changes in the files of the copy; again: no change."""
    for path in _files(local):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            for name, tensor in mapped_file(path, mapping):
                change = delta.get(name)
                if isinstance(change, SparseTensor):
                    words.scatter(tensor, change.positions, change.values)
                elif change is not None:
                    tensor.copy_(change)
                del tensor  # the mapping is closed with the last view of it
            mapping.flush()


def _copy(source: Path, local: Path, number: int) -> None:
    _require_whole(source)
    new = local / STATE_FOLDER / "copy"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        for path in source.iterdir():
            if path.is_file():
                shutil.copyfile(path, new / path.name)
                _sync(new / path.name)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    names = {path.name for path in new.iterdir()}
    _remember(local, _State())
    for name in names:
        os.replace(new / name, local / name)
    for old in (*_files(local), *_indexes(local)):
        if old.name not in names:
            old.unlink()
    _sync(local)
    for folder in (new, *new.parent.glob("delta_v*")):
        shutil.rmtree(folder, ignore_errors=True)
    _remember(local, _State(f"{number:06d}"))


def _require_own(local: Path, base: Path | None) -> None:
    """Raise CheckpointError unless ``local`` is a copy that :func:`pull` has made, or empty."""
    if not local.exists():
        return
    if base is not None and base.exists() and base.samefile(local):
        raise _wrong(local, "is the checkpoint to begin with: its copy needs a folder of its own")
    if not _state_file(local).exists() and any(path.name != STATE_FOLDER for path in local.iterdir()):
        raise _wrong(local, "holds files that no pull has made: name an empty folder")


def _require_whole(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` has weights, those of its index, and none that are torn."""
    names = {path.name for path in _files(folder)}
    for index in _indexes(folder):
        names |= set(_json(index, _SlimeIndex).weight_map.values())
    if not names:
        raise _wrong(folder, "has no *.safetensors files")
    for name in sorted(names):
        for _ in mapped_file(_inside(folder, name)):
            pass


def _remember(local: Path, state: _State) -> None:
    path = _state_file(local)
    unfinished = path.with_suffix(".new")
    with open(unfinished, "wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(local: Path) -> Iterator[None]:
    try:
        (local / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        with open(local / STATE_FOLDER / "lock", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise _wrong(local, f"cannot be written: {error}") from error


def _delta_folder(local: Path, number: int) -> Path:
    return local / STATE_FOLDER / f"delta_v{number:06d}"


def _state_file(local: Path) -> Path:
    return local / STATE_FOLDER / "state.json"


def _indexes(local: Path) -> list[Path]:
    return sorted(local.glob("*.safetensors.index.json"))


def _files(local: Path) -> list[Path]:
    return sorted(local.glob("*.safetensors"))


def _file_metadata(path: Path) -> dict[str, str]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return msgspec.json.decode(file.read(length).rstrip(), type=_SafetensorsHeader).metadata


def _json(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name or "\0" in name:
        raise _wrong(folder, f"names a file outside: {name!r}")
    return folder / name


def _number(value: object) -> int:
    """Return a version as slime writes it, "000007" or 7; -1 if it is none."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) <= 18 else -1


def _data(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def _wrong(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} {reason}", path=str(path), reason=reason)


def _needs(package: str) -> Unsupported:
    return Unsupported(f'published deltas need {package}: pip install "caesura[deltas]"', field=package)
