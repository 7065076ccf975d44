"""The standard error of servers: never waited for, bounded, and nothing lost that somebody reads."""

import fcntl
import logging
import os
import sys
import threading
from collections.abc import Iterator

import click
import pytest
from support.waiting import eventually

from caesura.client.launch import stderr
from caesura.client.launch.stderr import REPEATS, QueuedStream, Repeats, queued_stderr
from caesura.process.queued_writer import MAX_QUEUED


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def read_all(reader: int, text: str) -> str:
    """What comes, up to and including ``text``."""
    found = b""
    while text.encode() not in found:
        found += os.read(reader, 1 << 20)
    return found.decode()


def test_what_is_written_arrives_in_order(pipe):
    stream = QueuedStream(pipe[1])
    for number in range(100):
        print(number, file=stream, flush=True)
    assert stream.settle(20)
    assert read_all(pipe[0], "99\n").split() == [str(number) for number in range(100)]
    assert (stream.fileno(), stream.isatty(), stream.writable()) == (pipe[1], False, True)


def test_a_pipe_that_nobody_reads_stops_nobody_and_its_loss_is_told(pipe):
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
    dropped = int(lines[-1].split()[0])
    assert dropped + 1024 * (len(lines) - 1) == 1024 * (3 * MAX_QUEUED // 1024)
    stream.write("afterwards\n")
    assert read_all(pipe[0], "afterwards\n")


def test_a_reader_that_is_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    stream = QueuedStream(writer)
    stream.write("nobody")
    assert stream.settle(20)
    os.close(writer)


def test_it_takes_the_place_of_stderr_for_a_while(pipe, monkeypatch):
    with open(pipe[1], "w", closefd=False) as before:
        monkeypatch.setattr(sys, "stderr", before)
        print("first ", end="", file=sys.stderr)
        with queued_stderr():
            assert isinstance(sys.stderr, QueuedStream)
            print("second", file=sys.stderr)
            click.echo("third", err=True)
        assert sys.stderr is before
    assert read_all(pipe[0], "third\n") == "first second\nthird\n"


def test_a_stream_without_a_descriptor_stays(capsys):
    before = sys.stderr
    with queued_stderr():
        assert sys.stderr is before


def test_what_repeats_is_counted_instead(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(stderr, "monotonic", lambda: now[0])
    logger = logging.getLogger("test.repeats")
    caplog.handler.addFilter(repeats := Repeats())
    try:
        for second in (0.0, 11.0):
            now[0] = second
            for number in range(REPEATS + 30):
                logger.warning("number %d", number)
        logger.warning("elsewhere")
    finally:
        caplog.handler.removeFilter(repeats)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 * REPEATS + 1
    assert messages[REPEATS] == "number 0 (and 30 before it that were not written)"
    assert messages[-1] == "elsewhere"


def test_a_thread_that_logs_is_no_trouble(pipe):
    stream = QueuedStream(pipe[1])
    threads = [threading.Thread(target=lambda: [stream.write("line\n") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: stream.settle(0.0))
    assert os.read(pipe[0], 1 << 16) == b"line\n" * 200
