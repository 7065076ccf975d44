"""safetensors folders: what is read, in which pieces, and every way in which a file can be wrong."""

import contextlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.checkpoints import make_checkpoint
from support.pickles import pickled
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.memory.workspace import Workspace
from caesura.scheduler.models import config as model_config
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.runtime.files import MAX_REASON
from caesura.scheduler.weights.transports import disk
from caesura.scheduler.weights.transports.disk import Checkpoint, open_checkpoint

INDEX = "model.safetensors.index.json"
TENSORS = {
    "matrix": torch.arange(60, dtype=torch.float32).view(12, 5),
    "wide": torch.arange(300, dtype=torch.int64).view(2, 150),
    "vector": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "cube": torch.arange(24, dtype=torch.float16).view(4, 3, 2),
    "flags": torch.tensor([True, False, True]),
}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def read(checkpoint: Checkpoint, bucket_bytes: int = 1 << 16) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for piece in checkpoint.pieces(bucket_bytes):
        held = parts.setdefault(piece.name, [])
        assert piece.start_row == sum(len(rows) for rows in held)
        held.append(piece.rows.clone())
    return {name: torch.cat(rows) if rows[0].dim() else rows[0] for name, rows in parts.items()}


def reason(path: Path, act: Callable[[], Any] | None = None) -> str:
    with pytest.raises(CaesuraError) as caught:
        (act or (lambda: open_checkpoint(path)))()
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
    assert caught.value.detail["path"].startswith(str(path))
    assert len(caught.value.message) < 2 * MAX_REASON
    return caught.value.detail["reason"]


@settings(max_examples=examples(30))
@given(bucket_bytes=st.integers(1, 2000))
def test_any_bucket_gives_the_same_tensors(tmp_path_factory, bucket_bytes):
    path = tmp_path_factory.mktemp("any")
    save_file(TENSORS, path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(path)
    got = read(checkpoint, bucket_bytes)
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert {spec.name: spec.shape for spec in checkpoint.specs} == {
        n: list(t.shape) for n, t in TENSORS.items()
    }


def test_pieces_are_made_within_the_bucket(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    workspace = Workspace()
    bucket = workspace.take("disk", (64,), torch.uint8)
    for piece in open_checkpoint(tmp_path).into(workspace).pieces(64):
        row_bytes = piece.rows[0].nbytes if piece.rows.dim() and len(piece.rows) else 0
        assert piece.rows.nbytes <= max(64, row_bytes)
        assert row_bytes > 64 or piece.rows.untyped_storage().data_ptr() == bucket.data_ptr()


@settings(max_examples=examples(50))
@given(
    layout=st.lists(
        st.tuples(st.sampled_from(["U8", "BF16", "F32"]), st.integers(0, 9), st.booleans()), max_size=12
    ),
    bucket_bytes=st.integers(1, 80),
)
def test_neighbours_come_as_they_lie(tmp_path_factory, layout, bucket_bytes):
    folder = tmp_path_factory.mktemp("neighbours")
    header, data, skipped, asked = {}, b"", set(), []
    for number, (dtype, count, is_skipped) in enumerate(layout):
        size = count * {"U8": 1, "BF16": 2, "F32": 4}[dtype]
        offsets = [len(data), len(data) + size]
        header[f"{number}"] = {"dtype": dtype, "shape": [count], "data_offsets": offsets}
        data += bytes((number * 16 + byte) % 100 for byte in range(size))
        skipped |= {f"{number}"} if is_skipped else set()
    write(folder / "model.safetensors", header, data)
    parts: dict[str, bytes] = {}

    def skip(name):
        asked.append(name)
        return name in skipped

    for piece in open_checkpoint(folder).pieces(bucket_bytes, skip):
        assert piece.rows.data_ptr() % piece.rows.itemsize == 0
        held = piece.rows.contiguous().view(torch.uint8).numpy().tobytes()
        parts[piece.name] = parts.get(piece.name, b"") + held
    expected = {n: data[slice(*h["data_offsets"])] for n, h in header.items() if n not in skipped}
    assert parts == expected
    assert sorted(asked) == sorted(header), "each is asked for once"


def test_tensors_that_fit_the_bucket_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{number}": torch.full((10, 4), float(number)) for number in range(10)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, sizes, preadv = open_checkpoint(tmp_path), [], os.preadv

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert len(read(checkpoint, 640)) == 10
    assert sizes == [640, 640, 320]


def test_a_single_file_is_preferred_to_a_stale_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["matrix"]}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"b": "gone.safetensors"}}')
    assert [spec.name for spec in open_checkpoint(tmp_path).specs] == ["a"]


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    absent = "there is no such folder. Nothing is downloaded: `hf download "
    assert reason(tmp_path / "absent").startswith(f"{absent}ORG/NAME ")
    assert reason("Qwen/Qwen3-0.6B").startswith(f"{absent}Qwen/Qwen3-0.6B ")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert reason(file) == "is a file; a model is a folder with config.json and *.safetensors"
    assert reason(tmp_path) == "has no *.safetensors file"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_named_and_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert "only safetensors is read" in reason(tmp_path)


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickled(value))])
def test_a_renamed_pickle_is_refused(save: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    save(Bomb(), tmp_path / "model.safetensors")
    assert "pickle" in reason(tmp_path)


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"not json", bytes(8), "header is not valid"),
        (b"[1, 2]", bytes(8), "header is not valid"),
        (b'{"a": 1}', bytes(8), "header is not valid"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', bytes(8), "header is not valid"),
        ({"a": {**GOOD["a"], "data_offsets": [0, 8, 9]}}, bytes(8), "header is not valid"),
        (b'{"\xff": {}}', bytes(8), "header is not valid"),
        ({"a": {**GOOD["a"], "code": "x"}}, bytes(8), "header is not valid"),
        ({"a": {**GOOD["a"], "dtype": "Q7"}}, bytes(8), "unknown dtype 'Q7'"),
        ({"a": {**GOOD["a"], "shape": [3]}}, bytes(8), "8 bytes for F32 [3]"),
        ({"a": {**GOOD["a"], "data_offsets": [8, 0]}}, bytes(8), "-8 bytes for F32 [2]"),
        ({**GOOD, "b": {**GOOD["a"], "data_offsets": [4, 12]}}, bytes(12), "a gap or an overlap"),
        ({**GOOD, "b": GOOD["a"]}, bytes(8), "a gap or an overlap"),
        ({**GOOD, "b": {**GOOD["a"], "data_offsets": [12, 20]}}, bytes(20), "a gap or an overlap"),
        ({"a": {**GOOD["a"], "data_offsets": [4, 12]}}, bytes(12), "a gap or an overlap"),
        (GOOD, bytes(7), "is truncated"),
        (GOOD, bytes(9), "trailing data"),
    ],
)
def test_bad_headers(header: dict[str, Any] | bytes, data: bytes, says: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header, data)
    assert says in reason(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "truncated within its header"),
        (struct.pack("<Q", disk.MAX_HEADER_BYTES + 1) + b"{}", f"would be {disk.MAX_HEADER_BYTES + 1} bytes"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "header would be 14064895815 bytes long"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "not safetensors"),
    ],
)
def test_files_that_are_not_safetensors(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert says in reason(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", "qwen2", sharded=True)
    return tmp_path / "model"


def edit_index(path: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    file = path / INDEX
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CaesuraError) as caught:
        open_checkpoint(sharded)
    assert caught.value.detail["path"] == str(shard)


@pytest.mark.parametrize(
    "edit",
    [
        lambda names: names.pop("model.norm.weight"),
        lambda names: names.update({"model.extra.weight": names["model.norm.weight"]}),
        lambda names: names.update({"model.embed_tokens.weight": names["lm_head.weight"]}),
    ],
)
def test_an_index_that_lies(sharded: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    edit_index(sharded, edit)
    assert "index that puts" in reason(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", ""])
def test_an_index_names_safetensors_files_of_its_own_folder(sharded: Path, name: str) -> None:
    edit_index(sharded, lambda names: names.update({"model.norm.weight": name}))
    assert "not a safetensors file of this folder" in reason(sharded)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": {"a": 1}}', b"{}"])
def test_a_broken_index(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    assert "not a safetensors index" in reason(sharded)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"a": TENSORS["matrix"]}, tmp_path / "one.safetensors")
    save_file({"a": TENSORS["matrix"]}, tmp_path / "two.safetensors")
    assert reason(tmp_path) == "holds 'a' twice, in one.safetensors and two.safetensors"


def grow(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"x")


def replace_by_another(file: Path) -> None:
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.rename(file)


def rewrite_in_place(file: Path) -> None:
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change", [grow, replace_by_another, rewrite_in_place, lambda f: os.truncate(f, 200)]
)
def test_a_file_that_changes_after_it_was_opened(change: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    checkpoint = open_checkpoint(tmp_path)
    change(file)
    assert "changed while it was being read" in reason(file, lambda: read(checkpoint))


def test_a_short_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    assert "ends within" in reason(tmp_path, lambda: read(checkpoint))


def test_reads_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint, preadv = open_checkpoint(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:13]], offset))
    got = read(checkpoint)
    assert all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())


def test_an_abandoned_read_closes_its_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    pieces = open_checkpoint(tmp_path).pieces(64)
    before = len(os.listdir("/proc/self/fd"))
    next(pieces)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pieces.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Folders that are not what they seem: nothing waits for ever, nothing is read without bound


def refused(path: Path) -> str:
    def load() -> None:
        open_checkpoint(path)
        load_model_config(path)

    return reason(path, load)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


NOT_FILES: list[Callable[[Path], None]] = [
    os.mkfifo,
    Path.mkdir,
    a_socket,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to("/dev/tty"),
]


@pytest.mark.parametrize("kind", NOT_FILES, ids=["fifo", "folder", "socket", "device", "terminal"])
@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json", "shard"])
def test_special_files_are_refused_without_waiting(sharded, name, kind):
    path = min(sharded.glob("*.safetensors")) if name == "shard" else sharded / name
    path.unlink(missing_ok=True)
    with contextlib.chdir(sharded):  # a socket's path is short
        kind(Path(path.name))
    said = refused(sharded)
    assert "not a regular file" in said or "cannot be opened" in said


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (INDEX, disk.MAX_INDEX_BYTES),
        ("config.json", model_config.MAX_CONFIG_BYTES),
        ("generation_config.json", model_config.MAX_CONFIG_BYTES),
    ],
)
def test_json_is_bounded_before_it_is_read(sharded: Path, name: str, limit: int) -> None:
    with (sharded / name).open("wb") as file:
        file.truncate(3 << 30)
    assert f"more than the limit of {limit}" in refused(sharded)
    os.truncate(sharded / name, limit + 1)
    assert "more than" in refused(sharded)


def test_a_file_without_a_size_is_bounded_while_it_is_read(sharded, monkeypatch):
    (sharded / "config.json").unlink()
    (sharded / "config.json").symlink_to("/proc/self/status")
    monkeypatch.setattr(model_config, "MAX_CONFIG_BYTES", 100)
    assert "grew beyond" in refused(sharded)


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json"])
def test_deep_nesting_is_an_error(sharded: Path, name: str) -> None:
    (sharded / name).write_bytes(b'{"metadata":' + b"[" * 100_000)
    refused(sharded)
    (sharded / name).write_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    refused(sharded)


def test_an_error_does_not_repeat_what_it_found(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "/" * 1_000_000}}))
    assert refused(sharded).endswith("…")


def test_all_headers_together_are_bounded(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_HEADERS_BYTES", 1000)
    assert "bytes of headers" in refused(sharded)


def test_a_header_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    pread = os.pread

    def slow(descriptor: int, length: int, offset: int) -> bytes:
        data = pread(descriptor, length, offset)
        if offset:
            with (tmp_path / "model.safetensors").open("ab") as file:
                file.write(b"x")
        return data

    monkeypatch.setattr(os, "pread", slow)
    with pytest.raises(CaesuraError, match="changed while its header"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("vanish", [shutil.rmtree, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_folder_that_vanishes_before_it_is_read(sharded: Path, vanish: Callable[[Path], None]) -> None:
    checkpoint = open_checkpoint(sharded)
    vanish(sharded)
    with pytest.raises(CaesuraError, match="cannot be opened") as caught:
        list(checkpoint.pieces(1 << 20))
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
