"""Where weights may be loaded from: links inside a folder count by what they point at."""

import os
from pathlib import Path

import pytest

from caesura.client.exceptions import InvalidRequest
from caesura.client.serve.context import ServeOptions
from caesura.client.serve.sglang.updates import allowed_path

NAMES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00002-of-00002.safetensors",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("root/step-1", "root/shared", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    for name in NAMES:
        for folder in ("root/step-1", "root/shared", "outside"):
            (tmp_path / folder / name).write_bytes(b"{}")
    return tmp_path / "root"


def allowed(path: Path | str, root: Path) -> str:
    return allowed_path(str(path), ServeOptions(weights_root=str(root)))


def test_a_folder_and_links_within_the_root_are_taken(root):
    assert allowed(root / "step-1", root) == str(root / "step-1")
    (root / "step-1" / NAMES[1]).unlink()
    (root / "step-1" / NAMES[1]).symlink_to("../shared/model.safetensors")
    (root / "latest").symlink_to("step-1")
    assert allowed(root / "latest", root) == str(root / "step-1")
    assert allowed(root / "not there", root) == str(root / "not there")  # the engine says what is wrong


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_is_a_link_out_of_the_root_is_refused(root, name, deep):
    (root / "step-1" / name).unlink()
    target = root.parent / "outside" / name
    if deep:
        (root / "shared" / "hop").symlink_to(target)
        target = root / "shared" / "hop"
    (root / "step-1" / name).symlink_to(target)
    with pytest.raises(InvalidRequest, match="link out of"):
        allowed(root / "step-1", root)


def test_a_folder_that_leads_out_is_refused(root):
    (root / "away").symlink_to(root.parent / "outside")
    for path in (
        root / "away",
        root / ".." / "outside",
        root.parent / "outside",
        "/",
        os.path.relpath(root.parent),
    ):
        with pytest.raises(InvalidRequest, match="outside"):
            allowed(path, root)
    sibling = root.parent / "rooted"
    sibling.mkdir()
    with pytest.raises(InvalidRequest):
        allowed(sibling, root)


def test_names_in_messages_are_printable(root):
    (root / "step-1" / "\x1b[2J.safetensors").symlink_to(root.parent / "outside" / NAMES[0])
    with pytest.raises(InvalidRequest) as caught:
        allowed(root / "step-1", root)
    assert "\x1b" not in caught.value.message
