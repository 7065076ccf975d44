"""Threads beside the loop: what they hand over, how far they run ahead, and how they wake the loop."""

import select
import threading
from collections.abc import Iterator

import pytest
from support.waiting import eventually

from caesura.scheduler.runtime.background import Feed, Wakeup, Worker


class Source:
    """An iterator that says how far it was asked, and blocks where told."""

    def __init__(self, count: int, blocks_at: int | None = None, fails_at: int | None = None) -> None:
        self.asked = 0
        self.unblock = threading.Event()
        self._count, self._blocks_at, self._fails_at = count, blocks_at, fails_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            self.asked = number + 1
            if number == self._blocks_at:
                self.unblock.wait()
            if number == self._fails_at:
                raise OSError("the line is down")
            yield number


def start(source: Source, ahead: int = 1) -> tuple[Feed[int], threading.Event]:
    woken = threading.Event()
    return Feed(iter(source), woken.set, ahead=ahead), woken


def take_all(feed: Feed[int]) -> list[int]:
    taken = []
    while not feed.ended:
        item = feed.take()
        if item is not None:
            taken.append(item)
            feed.release()
    return taken


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_everything_arrives_in_order(ahead):
    feed, _ = start(Source(200), ahead)
    assert take_all(feed) == list(range(200))
    assert feed.take() is None


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_never_further_ahead_than_allowed(ahead):
    source = Source(10)
    feed, woken = start(source, ahead)
    eventually(lambda: source.asked == ahead)
    for released in range(1, 4):
        assert woken.wait()
        assert eventually(lambda: (item := feed.take()) is not None and item + 1) == released
        assert source.asked == ahead + released - 1
        feed.release()
        eventually(lambda expected=ahead + released: source.asked == expected)
    feed.cancel()


def test_take_never_waits():
    source = Source(1, blocks_at=0)
    feed, woken = start(source)
    assert feed.take() is None
    assert not feed.ended
    assert not woken.is_set()
    source.unblock.set()
    assert woken.wait()
    assert feed.take() == 0


def test_an_error_comes_after_the_items_before_it():
    feed, _ = start(Source(5, fails_at=2), ahead=5)
    eventually(lambda: not feed.is_running)
    assert [feed.take(), feed.take()] == [0, 1]
    with pytest.raises(OSError, match="line is down"):
        feed.take()
    assert feed.ended
    assert feed.take() is None


@pytest.mark.parametrize("blocks_at", [0, None], ids=["waits for its source", "waits for room"])
def test_a_cancelled_thread_ends_and_asks_for_nothing_more(blocks_at):
    source = Source(5, blocks_at)
    feed, _ = start(source)
    eventually(lambda: source.asked == 1)
    feed.cancel()
    source.unblock.set()
    eventually(lambda: not feed.is_running)
    assert source.asked == 1
    assert blocks_at is None or feed.take() is None, "what comes too late is handed to nobody"


def readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.fd], [], [], 0)[0])


def test_interrupted_transfers_keep_nothing():
    let_go = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield 1
        finally:
            let_go.set()

    feed = Feed(items(), lambda: None)
    eventually(feed.take)
    feed.cancel()
    assert let_go.wait()


def test_wakeup_is_readable_from_set_to_clear():
    wakeup = Wakeup()
    assert not readable(wakeup)
    wakeup.clear()  # of nothing: does not wait
    threads = [threading.Thread(target=wakeup.set) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert readable(wakeup)
    wakeup.clear()
    assert not readable(wakeup)
    wakeup.close()


def test_wakeup_never_blocks_and_outlives_its_end():
    wakeup = Wakeup()
    for _ in range(100_000):  # more than the pipe holds
        wakeup.set()
    assert readable(wakeup)
    wakeup.close()
    wakeup.close()
    wakeup.set()


def test_a_worker_serves_feed_after_feed_in_one_thread():
    worker, seen = Worker(), []

    class Traced(Source):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                seen.append(threading.current_thread())
                yield item

    first = Feed(iter(Traced(3)), lambda: None, ahead=1, submit=worker.submit)
    second = Feed(iter(Traced(1)), lambda: None, ahead=1, submit=worker.submit)
    assert eventually(lambda: [first.take()] == [0])
    first.cancel()  # as when an update fails half-way: the next one is served all the same
    eventually(lambda: second.take() == 0)
    second.cancel()
    worker.close()
    eventually(lambda: not seen[0].is_alive())
    assert len(set(seen)) == 1
