"""Directories of sockets: private, and removed when whoever made them was killed."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from caesura.process import private_directory
from caesura.process.private_directory import LOCK, SOCKET, STATE_FILE, STATE_LOCK


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left_by_the_dead(parent: Path, name: str = "caesura-dead", *files: str) -> Path:
    path = parent / name
    path.mkdir(mode=0o700)
    for file in files or (SOCKET, LOCK):
        (path / file).touch()
    return path


def test_directory_is_private_and_its_socket_path_fits(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    directory = private_directory.make()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(directory / SOCKET)) <= 107
    assert not list(deep.iterdir())
    private_directory.remove(directory)
    private_directory.remove(directory)
    assert not directory.exists()


def test_folders_of_dead_owners_are_removed(parent):
    dead = left_by_the_dead(parent)
    mine = private_directory.make()
    (mine / LOCK).touch()
    assert not dead.exists()
    other = private_directory.make()
    assert mine.exists(), "its maker lives"
    private_directory.remove(mine)
    private_directory.remove(other)


def test_a_living_engine_keeps_the_directory_of_a_launcher_that_was_killed(parent):
    orphan = left_by_the_dead(parent)
    with open(orphan / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        private_directory.remove_stale(str(parent))
        assert orphan.exists()
    private_directory.remove_stale(str(parent))
    assert not orphan.exists()


@pytest.mark.parametrize(
    "files",
    [
        (SOCKET, LOCK, STATE_FILE, STATE_LOCK),
        (STATE_FILE, STATE_LOCK, f".{STATE_FILE}.new"),  # its socket was elsewhere
        (SOCKET + ".full", LOCK),  # killed while nobody could connect
    ],
)
def test_everything_that_an_engine_makes_goes_with_it(parent, files):
    dead = left_by_the_dead(parent, "caesura-dead", *files)
    private_directory.remove_stale(str(parent))
    assert not dead.exists()


def test_a_living_engine_keeps_its_state_file(parent):
    orphan = left_by_the_dead(parent, "caesura-state", STATE_FILE, STATE_LOCK)
    with open(orphan / STATE_LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        private_directory.remove_stale(str(parent))
        assert (orphan / STATE_FILE).exists()


def test_a_path_that_is_no_text_is_avoided(parent, monkeypatch):
    odd = os.fsdecode(os.fsencode(parent) + b"/\xff")
    os.mkdir(odd)
    monkeypatch.setattr("tempfile.tempdir", odd)
    directory = private_directory.make()
    str(directory).encode()
    assert not os.listdir(odd)
    private_directory.remove(directory)


def test_a_launcher_that_was_killed_before_its_engine_came_leaves_nothing(parent):
    empty = parent / "caesura-empty"
    empty.mkdir(mode=0o700)
    private_directory.remove_stale(str(parent))
    assert not empty.exists()


def test_a_fresh_directory_that_is_taken_for_a_dead_ones_is_made_again(parent, monkeypatch):
    make, flock, made = private_directory._make_fresh, fcntl.flock, []

    def make_fresh() -> str:
        made.append(make())
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    def lock(descriptor: int, how: int) -> None:
        if len(made) == 2:
            raise BlockingIOError
        if len(made) == 3:
            os.rmdir(made[2])
        flock(descriptor, how)

    monkeypatch.setattr(private_directory, "_make_fresh", make_fresh)
    monkeypatch.setattr(fcntl, "flock", lock)
    directory = private_directory.make()
    assert str(directory) == made[3]
    monkeypatch.undo()
    private_directory.remove_stale(str(parent))
    assert directory.exists(), "it is locked"
    private_directory.remove(directory)


def test_only_our_own_kind_is_touched(parent):
    fresh = left_by_the_dead(parent, "caesura-fresh", SOCKET)  # no engine has been in it
    rich = left_by_the_dead(parent, "caesura-rich", LOCK, "precious")
    opened = left_by_the_dead(parent, "caesura-open")
    opened.chmod(0o755)
    foreign = left_by_the_dead(parent, "other-dead")
    left_by_the_dead(
        parent, "caesura-keys", "server.key_secret", "client.key"
    )  # by hand: no lock beside them
    another = parent / "caesura-fleet-ab12cd34"  # of something else of ours, before it has put anything in
    another.mkdir(mode=0o700)
    target = left_by_the_dead(parent, "target")
    (parent / "caesura-link").symlink_to(target)
    (parent / "caesura-file").touch()
    os.mkfifo(parent / "caesura-fifo")
    before = sorted(parent.rglob("*"))
    private_directory.remove_stale(str(parent))
    assert sorted(parent.rglob("*")) == before
    assert {fresh, rich, opened, foreign, another} <= set(before)


def test_a_lock_file_that_is_a_fifo_holds_nobody(parent):
    path = left_by_the_dead(parent, "caesura-fifo", SOCKET)
    os.mkfifo(path / LOCK)
    private_directory.remove_stale(str(parent))


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
def test_somebody_elses_stays(parent):
    path = left_by_the_dead(parent)
    os.chown(path, 12345, 12345)
    private_directory.remove_stale(str(parent))
    assert path.exists()


@pytest.mark.parametrize("made", ["p.make()", "p.make_with({'server.key_secret': 'x', 'fleet.key': 'y'})"])
def test_a_killed_process_leaves_it_to_the_next(parent, made):
    script = (
        "import tempfile, sys, time; from caesura.process import private_directory as p\n"
        f"tempfile.tempdir = {str(parent)!r}\n"
        f"d = {made}; print(d, flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        private_directory.remove_stale(str(parent))
        assert directory.exists()
        process.send_signal(signal.SIGKILL)
    assert directory.exists()
    private_directory.remove_stale(str(parent))
    assert not directory.exists()
