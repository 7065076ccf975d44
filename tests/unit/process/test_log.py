"""Log lines: their format, and a stderr that is bounded and never waited for."""

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.waiting import eventually

from caesura.process import log, private_directory
from caesura.process.log import MAX_QUEUED, QueuedStream, queued_stderr
from caesura.process.private_directory import LOCK, SOCKET, STATE_FILE, STATE_LOCK


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def read_all(reader: int, text: str) -> str:
    found = b""
    while text.encode() not in found:
        found += os.read(reader, 1 << 20)
    return found.decode()


def test_text_arrives_in_order(pipe):
    stream = QueuedStream(pipe[1])
    for number in range(100):
        print(number, file=stream, flush=True)
    assert stream.settle(20)
    assert read_all(pipe[0], "99\n").split() == [str(number) for number in range(100)]
    assert (stream.fileno(), stream.isatty(), stream.writable()) == (pipe[1], False, True)


def test_an_unread_pipe_blocks_no_writer(pipe):
    stream = QueuedStream(pipe[1])
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    line = "x" * 1023 + "\n"
    writing = threading.Thread(
        target=lambda: [stream.write(line) for _ in range(3 * MAX_QUEUED // 1024)], daemon=True
    )
    writing.start()
    writing.join()
    assert not writing.is_alive()
    assert not stream.settle(0.0)
    kept = read_all(pipe[0], "not read in time\n")
    lines = kept.splitlines()
    assert set(lines[:-1]) == {line.strip()}
    dropped = int(re.fullmatch(r".* WARNING log: (\d+) characters dropped: .*", lines[-1])[1])
    assert dropped + 1024 * (len(lines) - 1) == 1024 * (3 * MAX_QUEUED // 1024)
    stream.write("afterwards\n")
    assert read_all(pipe[0], "afterwards\n")


def test_a_closed_reader_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    stream = QueuedStream(writer)
    stream.write("nobody")
    assert stream.settle(20)
    os.close(writer)


def test_queued_stderr_replaces_stderr_within_its_block(pipe):
    with open(pipe[1], "w", closefd=False) as before, contextlib.redirect_stderr(before):
        print("first ", end="", file=sys.stderr)
        with queued_stderr():
            assert isinstance(sys.stderr, QueuedStream)
            print("second", file=sys.stderr)
            click.echo("third", err=True)
        assert sys.stderr is before
    assert read_all(pipe[0], "third\n") == "first second\nthird\n"


def test_a_stderr_without_a_descriptor_stays(capsys):
    before = sys.stderr
    with queued_stderr():
        assert sys.stderr is before


def test_lines_of_several_threads_all_arrive(pipe):
    stream = QueuedStream(pipe[1])
    threads = [threading.Thread(target=lambda: [stream.write("line\n") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: stream.settle(0.0))
    assert os.read(pipe[0], 1 << 16) == b"line\n" * 200


@pytest.fixture
def stream():
    logger = logging.getLogger("caesura")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield io.StringIO()
    for handler in set(logger.handlers) - set(before[1]):
        handler.close()
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1], before[2]


def test_a_record_is_one_line_with_time_level_and_module(stream):
    log.configure("info", stream=stream)
    logging.getLogger("caesura.scheduler.runtime.loop").info("held %d\nERROR forged", 3)
    logging.getLogger("caesura.scheduler.runtime.loop").debug("below the level")
    log.flush()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO scheduler\.runtime\.loop: held 3\\nERROR forged\n",
        stream.getvalue(),
    )


@pytest.mark.parametrize(("name", "shown"), [("", "rank3"), ("replica-0 100%", "replica-0 100% rank3")])
def test_name_and_rank_of_an_engine_are_shown(stream, name, shown):
    log.configure("INFO", rank=3, stream=stream, name=name)
    logging.getLogger("caesura.x").warning("hello")
    log.flush()
    assert f" WARNING {shown} x: hello\n" in stream.getvalue()


def test_every_json_line_has_time_level_and_replica(stream, capsys):
    log.configure("INFO", rank=1, stream=stream, log_format="json", name="replica-0")
    logger = logging.getLogger("caesura.scheduler.runtime.loop")
    logger.info("held %d\n\x1b\ud800", 3)
    try:
        int("x")
    except ValueError:
        logger.exception("failed")
    logger.info("%d", "no number")
    for _ in range(log.REPEATS + 2):
        logger.warning("again")
    log.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert (line["process"], line["replica"], line["rank"]) == ("scheduler", "replica-0", 1)
    first, second, third, *repeated = lines
    assert (first["level"], first["logger"], first["message"]) == (
        "INFO", "scheduler.runtime.loop", r"held 3\n\x1b\ud800"
    )  # fmt: skip
    assert second["traceback"][0].startswith("Traceback")
    assert "could not be formatted" in third["message"]
    assert repeated[-1]["message"].startswith("2 more like these")
    assert capsys.readouterr().err == ""  # of the record that could not be formatted


def test_a_traceback_is_indented(stream):
    log.configure(logging.INFO, stream=stream)
    try:
        int("first\nsecond")
    except ValueError:
        logging.getLogger("caesura.x").exception("failed")
    log.flush()
    head, *rest = stream.getvalue().splitlines()
    assert head.endswith("ERROR x: failed")
    assert rest[0] == "\tTraceback (most recent call last):"
    assert all(line.startswith("\t") for line in rest)


def test_configuring_twice_prints_once(stream):
    root_handlers = list(logging.getLogger().handlers)
    log.configure("INFO", stream=io.StringIO())
    log.configure("INFO", stream=stream)
    logging.getLogger("caesura.x").info("once")
    log.flush()
    assert stream.getvalue().count("once") == 1
    assert logging.getLogger().handlers == root_handlers


def test_text_from_clients_is_escaped(stream):
    log.configure("INFO", stream=stream)
    hostile = "rid \x1b]0;title\x07\x9b31m\r\u202egnp.exe \ud800 é"
    logging.getLogger("caesura.x").warning("aborted %s", hostile)
    try:
        pytest.fail(hostile)
    except pytest.fail.Exception:
        logging.getLogger("caesura.x").exception("failed")
    log.flush()
    text = stream.getvalue()
    assert all(char.isprintable() or char in "\n\t" for char in text)
    assert r"aborted rid \x1b]0;title\x07\x9b31m\r\u202egnp.exe \ud800 é" in text
    assert r"Failed: rid \x1b" in text


def test_a_line_is_bounded(stream):
    log.configure("info", stream=stream)
    try:
        pytest.fail("\1" * 1_000_000)
    except pytest.fail.Exception:
        logging.getLogger("caesura.scheduler.x").exception("it sent %s", "\1" * 1_000_000)
    log.flush()
    written = stream.getvalue()
    assert "it sent " in written
    assert "(1000008 characters)" in written
    assert max(map(len, written.split("\n"))) < 4 * log.MAX_LINE + 200


def test_repeated_warnings_of_a_call_site_are_counted(stream, monkeypatch):
    monkeypatch.setattr(log, "REPEAT_WINDOW_S", 0.2)
    log.configure("INFO", stream=stream)
    logger = logging.getLogger("caesura.x")
    for number in range(1000):
        logger.warning("malformed %d", number)
    logger.warning("another")
    for number in range(100):
        logger.info("said %d", number)
    eventually(lambda: "more like these" in stream.getvalue())  # without a further record
    text = stream.getvalue()
    assert text.count("said ") == 100
    assert "another" in text
    written = text.count("malformed")
    held = sum(int(count) for count in re.findall(" ([0-9]+) more like these from x line", text))
    assert (written % log.REPEATS, written + held) == (0, 1000)


@pytest.fixture
def parent(tmp_path, request, monkeypatch):
    """The folder for temporary ones; a test may name one below it, in bytes."""
    path = os.fsencode(tmp_path) + getattr(request, "param", b"")
    os.makedirs(path, exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", os.fsdecode(path))
    return Path(os.fsdecode(path))


def left_by_the_dead(parent, name="caesura-dead", files=(SOCKET, LOCK)) -> Path:
    path = parent / name
    path.mkdir(mode=0o700)
    for file in files:
        (path / file).touch()
    return path


@pytest.mark.parametrize("parent", [b"/" + b"d" * 90, b"/\xff"], ids=["too long", "no text"], indirect=True)
def test_directory_is_private_and_its_socket_path_fits(parent):
    directory = private_directory.make()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(str(directory / SOCKET).encode()) <= 107
    assert not list(parent.iterdir())
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


@pytest.mark.parametrize(
    "files",
    [
        (SOCKET, LOCK, STATE_FILE, STATE_LOCK),
        (STATE_FILE, STATE_LOCK, f".{STATE_FILE}.new"),  # its socket was elsewhere
        (SOCKET + ".full", LOCK),  # killed while nobody could connect
        (),  # its launcher was killed before it came
    ],
)
def test_everything_that_an_engine_makes_goes_with_it(parent, files):
    dead = left_by_the_dead(parent, files=files)
    private_directory.remove_stale(str(parent))
    assert not dead.exists()


@pytest.mark.parametrize(("files", "lock"), [((SOCKET, LOCK), LOCK), ((STATE_FILE, STATE_LOCK), STATE_LOCK)])
def test_a_living_engine_keeps_its_directory(parent, files, lock):
    orphan = left_by_the_dead(parent, files=files)
    with open(orphan / lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        private_directory.remove_stale(str(parent))
        assert {path.name for path in orphan.iterdir()} == {*files}
    private_directory.remove_stale(str(parent))
    assert not orphan.exists()


def test_a_fresh_directory_that_is_lost_is_made_again(parent, monkeypatch):
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

    with monkeypatch.context() as patch:
        patch.setattr(private_directory, "_make_fresh", make_fresh)
        patch.setattr(fcntl, "flock", lock)
        directory = private_directory.make()
    assert str(directory) == made[3]
    private_directory.remove_stale(str(parent))
    assert directory.exists(), "it is locked"
    private_directory.remove(directory)


def test_only_our_own_kind_is_touched(parent):
    fresh = left_by_the_dead(parent, "caesura-fresh", (SOCKET,))  # no engine has been in it
    rich = left_by_the_dead(parent, "caesura-rich", (LOCK, "precious"))
    opened = left_by_the_dead(parent, "caesura-open")
    opened.chmod(0o755)
    foreign = left_by_the_dead(parent, "other-dead")
    # by hand: no lock beside them
    left_by_the_dead(parent, "caesura-keys", ("server.key_secret", "client.key"))
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
    path = left_by_the_dead(parent, "caesura-fifo", (SOCKET,))
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
