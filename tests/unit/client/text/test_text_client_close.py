"""A text client that is closed while other threads use it leaves none of them waiting."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_scheduler import FakeScheduler
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura.client import EngineDied
from caesura.client.text import TextClient

THREADS = 6


@pytest.fixture
def tokenizer(tmp_path):
    make_byte_level(tmp_path, vocab_size=400)
    return tmp_path


def test_calls_of_other_threads_end_with_the_client(tokenizer):
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(20):
            with FakeScheduler(f"ipc://{tokenizer}/s{number}", lambda request: []) as fake:
                client = TextClient(fake.endpoint, str(tokenizer))
                waiting = [pool.submit(lambda c=client: next(c.stream("abc"))) for _ in range(THREADS)]
                eventually(lambda f=fake: f.requests.qsize() >= THREADS)
                client.close()
                for each in waiting:
                    with pytest.raises(EngineDied):
                        each.result()


def test_a_stream_that_the_loops_own_thread_collects_holds_up_nothing(tokenizer):
    with (
        FakeScheduler(f"ipc://{tokenizer}/s") as fake,
        TextClient(fake.endpoint, str(tokenizer)) as client,
    ):
        stream = client.stream("abc")
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        client._loop.call_soon_threadsafe(gc.collect)
        assert client.generate("abc").output.output_ids
