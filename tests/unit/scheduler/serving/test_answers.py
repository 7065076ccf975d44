"""The store of answers: what is kept, what is forgotten, and that forgetting is never a second effect."""

import tracemalloc

import pytest
from support.clock import clock_of

from caesura.io_struct import AbortReqOutput, CaesuraError, ErrorCode
from caesura.scheduler.serving.answers import (
    REMEMBERED_IDS,
    STORED_ANSWERS,
    Answers,
    ForgottenIds,
)

LIMIT = 10_000_000


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["serving.answers"])


def answer(store: Answers, message_id: str, nbytes: int = 100) -> None:
    assert store.attach(b"C", message_id, b"frame") is None
    store.add(store.get(message_id), AbortReqOutput(id=message_id, aborted=1), nbytes)


def again(store: Answers, message_id: str) -> str:
    """What a retry gets: the id of its answer, or a code."""
    try:
        (found,) = store.attach(b"C", message_id, b"frame")
    except CaesuraError as error:
        return error.code
    return found.id


def test_young_answers_are_stored_however_many_they_are(clock):
    store = Answers(60.0, LIMIT)
    for number in range(5 * STORED_ANSWERS):
        answer(store, f"m{number}")
    assert again(store, "m0") == "m0"
    clock.now += 61
    answer(store, "late")
    assert again(store, f"m{5 * STORED_ANSWERS - 1}") == f"m{5 * STORED_ANSWERS - 1}"
    assert again(store, f"m{4 * STORED_ANSWERS + 1}") == f"m{4 * STORED_ANSWERS + 1}"
    assert again(store, f"m{4 * STORED_ANSWERS}") == ErrorCode.ANSWER_FORGOTTEN
    assert again(store, "m0") == ErrorCode.ANSWER_FORGOTTEN


def test_bytes_are_bounded_at_any_age(clock):
    store = Answers(60.0, LIMIT)
    for number in range(20):
        answer(store, f"m{number}", LIMIT // 10)
        assert store.stored_bytes <= LIMIT
    assert [again(store, f"m{n}") for n in (0, 9)] == [ErrorCode.ANSWER_FORGOTTEN] * 2
    assert again(store, "m10") == "m10"


def test_what_is_under_way_is_never_forgotten(clock):
    store = Answers(0.0, LIMIT)
    assert store.attach(b"C", "slow", b"frame") is None
    for number in range(3 * STORED_ANSWERS):
        clock.now += 1
        answer(store, f"m{number}", LIMIT // 100)
    assert store.attach(b"D", "slow", b"frame") == []
    assert store.get("slow").clients == [b"C", b"D"]


def test_what_is_under_way_takes_no_more_than_what_is_stored(clock):
    """Answers of many samples, which would all be kept until the last one."""
    store = Answers(60.0, LIMIT)
    for name in ("large", "other"):
        assert store.attach(b"C", name, b"frame") is None
        store.begin_generation(name, f"rid of {name}", b"body", samples=12)
    large, share = store.get("large"), LIMIT // 10
    for number in range(11):
        store.add(large, AbortReqOutput(id=f"{number}", aborted=1), share)
        assert store.stored_bytes <= LIMIT
    answer(store, "small")
    assert again(store, "small") == "small"
    assert again(store, "large") == ErrorCode.ANSWER_FORGOTTEN
    assert store.attach(b"C", "joins", b"frame") is None
    with pytest.raises(CaesuraError) as refused:
        store.join(b"C", "joins", large)
    assert refused.value.code == ErrorCode.ANSWER_FORGOTTEN
    assert store.awaited_by() >= {b"C"}, "those who wait get the rest"
    store.add(large, AbortReqOutput(id="last", aborted=1), share)
    assert store.stored_bytes == 100
    assert again(store, "large") == ErrorCode.ANSWER_FORGOTTEN
    assert store.get("large") is None
    assert store.attach(b"C", "other", b"frame") == []


def test_exchanges_under_way_are_bounded_together(clock):
    store = Answers(60.0, LIMIT)
    for number in range(4):
        store.attach(b"C", f"m{number}", b"frame")
        store.begin_generation(f"m{number}", f"r{number}", b"body", samples=2)
        nbytes = LIMIT // (2 if number == 1 else 4)
        store.add(store.get(f"m{number}"), AbortReqOutput(id=f"{number}", aborted=1), nbytes)
        assert store.stored_bytes <= LIMIT
    assert [again(store, f"m{n}") for n in range(4)] == ["0", ErrorCode.ANSWER_FORGOTTEN, "2", "3"]


def test_another_frame_is_a_conflict_while_it_is_known():
    store = Answers(60.0, LIMIT)
    answer(store, "m")
    with pytest.raises(CaesuraError) as refused:
        store.attach(b"C", "m", b"another")
    assert refused.value.code == ErrorCode.ID_CONFLICT
    assert store.attach(b"C", "with", b"frame", [memoryview(b"tensor")]) is None
    assert store.attach(b"C", "with", b"frame", [memoryview(b"tensor")]) == []
    with pytest.raises(CaesuraError) as refused:
        store.attach(b"C", "with", b"frame", [memoryview(b"other")])
    assert refused.value.code == ErrorCode.ID_CONFLICT


def test_messages_that_joined_are_forgotten_together(clock):
    store = Answers(60.0, LIMIT)
    store.attach(b"C", "first", b"frame")
    store.attach(b"D", "second", b"frame")
    assert store.join(b"D", "second", store.get("first")) == []
    store.add(store.get("first"), AbortReqOutput(id="x", aborted=1), 100)
    assert again(store, "second") == "x"
    clock.now += 61
    for number in range(STORED_ANSWERS):
        answer(store, f"m{number}")
    assert [again(store, each) for each in ("first", "second")] == [ErrorCode.ANSWER_FORGOTTEN] * 2
    assert store.stored_bytes == 100 * STORED_ANSWERS


def test_forgotten_ids_are_remembered_long_and_no_others():
    forgotten = ForgottenIds()
    ids = [f"{number:032x}" for number in range(3 * REMEMBERED_IDS)]
    for each in ids:
        forgotten.add(each)
    missing = [each for each in ids[-REMEMBERED_IDS:] if each not in forgotten]
    assert len(missing) <= REMEMBERED_IDS // 10_000
    assert not any(f"other {number}" in forgotten for number in range(10_000))


def test_forgetting_takes_no_memory():
    forgotten = ForgottenIds()
    forgotten.add("first")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(50_000):
        forgotten.add(str(number))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 10_000
