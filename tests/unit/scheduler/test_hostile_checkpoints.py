"""Checkpoint folders that are not what they seem: nothing waits for ever, nothing is read without bound."""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import make_checkpoint

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.models import config as model_config
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.runtime.files import MAX_REASON
from caesura.scheduler.weights.transports import disk
from caesura.scheduler.weights.transports.disk import open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", "qwen2", sharded=True)
    load(tmp_path / "model")
    return tmp_path / "model"


def load(path: Path) -> None:
    open_checkpoint(path)
    load_model_config(path)


def refused(path: Path) -> str:
    with pytest.raises(CaesuraError) as caught:
        load(path)
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
    reason = caught.value.detail["reason"]
    assert isinstance(reason, str)
    assert len(caught.value.message) < 2 * MAX_REASON
    return reason


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
def test_special_files_are_refused_without_waiting(
    folder: Path, name: str, kind: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = min(folder.glob("*.safetensors")) if name == "shard" else folder / name
    path.unlink(missing_ok=True)
    monkeypatch.chdir(folder)  # a socket's path is short
    kind(Path(path.name))
    said = refused(folder)
    assert "not a regular file" in said or "cannot be opened" in said


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (INDEX, disk.MAX_INDEX_BYTES),
        ("config.json", model_config.MAX_CONFIG_BYTES),
        ("generation_config.json", model_config.MAX_CONFIG_BYTES),
    ],
)
def test_json_is_bounded_before_it_is_read(folder: Path, name: str, limit: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(3 << 30)
    assert f"more than the limit of {limit}" in refused(folder)
    os.truncate(folder / name, limit + 1)
    assert "more than" in refused(folder)


def test_a_file_without_a_size_is_bounded_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/status")
    monkeypatch.setattr(model_config, "MAX_CONFIG_BYTES", 100)
    assert "grew beyond" in refused(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json"])
def test_deep_nesting_is_an_error(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"metadata":' + b"[" * 100_000)
    refused(folder)
    (folder / name).write_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    refused(folder)


def test_an_error_does_not_repeat_what_it_found(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "/" * 1_000_000}}))
    assert refused(folder).endswith("…")


def test_a_header_is_bounded_by_less_than_the_format_allows(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", disk.MAX_HEADER_BYTES + 1))
        file.truncate(1 << 30)
    with pytest.raises(CaesuraError, match="header would be"):
        open_checkpoint(tmp_path)


def test_all_headers_together_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_HEADERS_BYTES", 1000)
    assert "bytes of headers" in refused(folder)


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
def test_a_folder_that_vanishes_before_it_is_read(folder: Path, vanish: Callable[[Path], None]) -> None:
    checkpoint = open_checkpoint(folder)
    vanish(folder)
    with pytest.raises(CaesuraError, match="cannot be opened") as caught:
        list(checkpoint.pieces(1 << 20))
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
