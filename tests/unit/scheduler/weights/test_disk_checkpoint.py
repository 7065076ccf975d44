"""safetensors folders: what is read, in which pieces, and every way in which a file can be wrong."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.properties import examples
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.memory.workspace import Workspace
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import Checkpoint, load_from_disk, open_checkpoint

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
    return caught.value.detail["reason"]


@settings(max_examples=examples(30))
@given(bucket_bytes=st.integers(1, 2000))
def test_any_bucket_gives_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, bucket_bytes: int
) -> None:
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
def test_neighbours_come_as_they_lie(
    tmp_path_factory: pytest.TempPathFactory, layout: list[tuple[str, int, bool]], bucket_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("neighbours")
    header, data, skipped = {}, b"", set()
    for number, (dtype, count, skip) in enumerate(layout):
        size = count * {"U8": 1, "BF16": 2, "F32": 4}[dtype]
        header[f"{number}"] = {
            "dtype": dtype,
            "shape": [count],
            "data_offsets": [len(data), len(data) + size],
        }
        data += bytes((number * 16 + byte) % 100 for byte in range(size))
        skipped |= {f"{number}"} if skip else set()
    write(folder / "model.safetensors", header, data)
    parts: dict[str, bytes] = {}
    for piece in open_checkpoint(folder).pieces(bucket_bytes, skipped.__contains__):
        assert piece.rows.data_ptr() % piece.rows.itemsize == 0
        held = piece.rows.contiguous().view(torch.uint8).numpy().tobytes()
        parts[piece.name] = parts.get(piece.name, b"") + held
    expected = {
        n: data[slice(*h["data_offsets"])]  # type: ignore[misc]
        for n, h in header.items()
        if n not in skipped
    }
    assert parts == expected


def test_tensors_that_fit_the_bucket_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(
        {f"{number}": torch.full((10, 4), float(number)) for number in range(10)},
        tmp_path / "model.safetensors",
    )
    checkpoint, sizes, preadv = open_checkpoint(tmp_path), [], os.preadv

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert len(read(checkpoint, 640)) == 10
    assert sizes == [640, 640, 320]


def test_skipped_tensors_are_asked_for_once_and_not_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    asked: list[str] = []

    def skip(name: str) -> bool:
        asked.append(name)
        return name in ("matrix", "wide")

    names = {p.name for p in open_checkpoint(tmp_path).pieces(64, skip)}
    assert names == TENSORS.keys() - {"matrix", "wide"}
    assert sorted(asked) == sorted(TENSORS)


def test_sharded_with_index(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", sharded=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path)
    expected = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    got = read(checkpoint)
    assert got.keys() == expected.keys() == model.state_dict().keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_any_safetensors_file_will_do(tmp_path: Path) -> None:
    save_file({"a": TENSORS["matrix"]}, tmp_path / "part2.safetensors")
    save_file({"b": TENSORS["vector"]}, tmp_path / "part1.safetensors")
    assert [spec.name for spec in open_checkpoint(tmp_path).specs] == ["b", "a"]


def test_a_single_file_is_preferred_to_a_stale_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["matrix"]}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "gone.safetensors"}}')
    assert [spec.name for spec in open_checkpoint(tmp_path).specs] == ["a"]


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    assert reason(tmp_path / "absent").startswith(
        "there is no such folder. Nothing is downloaded: `hf download ORG/NAME "
    )
    assert reason("Qwen/Qwen3-0.6B").startswith(
        "there is no such folder. Nothing is downloaded: `hf download Qwen/Qwen3-0.6B "
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert (
        reason(tmp_path / "model.gguf") == "is a file; a model is a folder with config.json and *.safetensors"
    )
    assert reason(tmp_path) == "has no *.safetensors file"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_named_and_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert "only safetensors is read" in reason(tmp_path)


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
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
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}',
            bytes(8),
            "header is not valid",
        ),
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


def test_a_good_file_by_hand_is_good(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors",
        {"__metadata__": {"format": "pt"}, **GOOD},
        struct.pack("<2f", 1.0, 2.0),
    )
    assert read(open_checkpoint(tmp_path))["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "truncated within its header"),
        (struct.pack("<Q", 100_000_001) + b"{}", "its header would be 100000001 bytes long"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "header would be 14064895815 bytes long"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "not safetensors"),
    ],
)
def test_files_that_are_not_safetensors(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert says in reason(tmp_path)


def test_a_header_length_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    assert "200000000 bytes long" in reason(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen2", sharded=True)
    return tmp_path


def edit_index(path: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    file = path / "model.safetensors.index.json"
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
    (sharded / "model.safetensors.index.json").write_bytes(content)
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


def test_a_file_truncated_between_two_pieces(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100, 100)}, file)
    pieces = open_checkpoint(tmp_path).pieces(4000)
    next(pieces)
    os.truncate(file, 5000)
    assert "changed" in reason(file, lambda: list(pieces))


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(39)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(40, dtype=torch.int32)}),
        lambda tensors: tensors.update({"model.norm.bias": torch.zeros(40)}),
        lambda tensors: tensors.pop("model.norm.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    spoil: Callable[[dict[str, Tensor]], Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    model = build_model(load_model_config(tmp_path), torch.float32, torch.device("cpu"))
    for _, tensor in model.named_storage():
        tensor.fill_(3.0)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CaesuraError) as caught:
        load_from_disk(WeightLoader(model), open_checkpoint(tmp_path), 1 << 16)
    assert caught.value.code == ErrorCode.WEIGHT_MISMATCH
    assert all((tensor == 3.0).all() for _, tensor in model.named_storage())
