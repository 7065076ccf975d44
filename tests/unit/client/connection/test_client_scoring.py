"""What ``score`` sends and how it reads the answer, blocking and from coroutines."""

import asyncio

import pytest
from support.fake_scheduler import FakeScheduler, floats

from caesura.client import AsyncSchedulerClient, InvalidRequest, SchedulerClient
from caesura.client.exceptions import InternalError
from caesura.io_struct import ScoreReqInput, ScoreReqOutput


def by_position(request: ScoreReqInput):
    yield ScoreReqOutput(
        id=request.id,
        logprobs=[
            floats(-float(i) for i in range(start, len(ids)))
            for ids, start in zip(request.input_ids, request.start, strict=True)
        ],
    )


def score(endpoint, handler, *args, **options):
    async def ask():
        async with AsyncSchedulerClient(endpoint) as client:
            return await client.score(*args, **options)

    with FakeScheduler(endpoint, handler) as fake:
        with SchedulerClient(endpoint) as client:
            found = client.score(*args, **options)
        assert asyncio.run(ask()) == found
        sent = [fake.next_request(ScoreReqInput) for _ in range(2)]
        assert sent[0].input_ids == sent[1].input_ids
    return found, sent[0]


def test_one_sequence_gives_one_list(endpoint):
    found, sent = score(endpoint, by_position, (7, 8, 9), start=1, temperature=0.5)
    assert found == [-1.0, -2.0]
    assert (sent.input_ids, sent.start, sent.temperature) == ([[7, 8, 9]], [1], 0.5)


def test_many_give_many_and_one_start_serves_all(endpoint):
    found, sent = score(endpoint, by_position, [[7, 8, 9], [5, 6]], start=2, message_id="m")
    assert found == [[-2.0], []]
    assert (sent.id, sent.start, sent.temperature) == ("m", [2, 2], 1.0)
    found, _ = score(endpoint, by_position, [[7, 8, 9], [5, 6]], start=[2, 1])
    assert found == [[-2.0], [-1.0]]


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1, 1], [2], []])
def test_an_answer_of_other_lengths_is_refused(endpoint, lengths):
    def wrong(request):
        yield ScoreReqOutput(id=request.id, logprobs=[floats([0.0] * length) for length in lengths])

    with pytest.raises(InternalError, match=r"for \[2, 1\] tokens"):
        score(endpoint, wrong, [[7, 8, 9], [5, 6]], start=1)


@pytest.mark.parametrize(
    ("ids", "start"), [([[1, 2]], [1, 1]), ([[1, 2], [3, 4]], [1]), (["a"], 1), ([[1.5]], 1), ([[1]], [1.5])]
)
def test_invalid_scores_are_refused_before_sending(endpoint, ids, start):
    with (
        FakeScheduler(endpoint, by_position),
        SchedulerClient(endpoint) as client,
        pytest.raises(InvalidRequest),
    ):
        client.score(ids, start=start)
