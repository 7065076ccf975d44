"""The store of answers: what is kept, what is forgotten, and that forgetting is never a second effect."""

import tracemalloc

import pytest
from support.clock import clock_of

from caesura.io_struct import (
    BatchTokenOutput,
    CaesuraError,
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqOutput,
)
from caesura.scheduler.messaging.stored_answers import (
    COMMAND_ANSWER_BYTES,
    REMEMBERED_IDS,
    STORED_ANSWERS,
    Answers,
    PlaceTable,
)

LIMIT = 100_000
SMALL = 100
"""Bytes of an answer that fits into the ring for commands."""


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["messaging.stored_answers"])


def filled(message_id: str, nbytes: int = SMALL) -> ErrorReply:
    return ErrorReply(id=message_id, code=ErrorCode.BUSY, message="x" * nbytes)


def answer(store: Answers, message_id: str, nbytes: int = SMALL) -> None:
    assert store.attach(b"C", message_id, b"frame") is None
    store.add(store.get(message_id), filled(message_id, nbytes))


def generate(
    store: Answers, message_id: str, *, rid: str = "", samples: int = 1, client: bytes = b"C"
) -> None:
    assert store.attach(client, message_id, b"frame") is None
    store.begin_generation(message_id, rid or message_id, b"body", samples=samples)


def result(rid: str, index: int = 0, nbytes: int = SMALL) -> BatchTokenOutput:
    finished = GenerateReqOutput(
        rid=rid,
        index=index,
        output_ids=bytes(nbytes),
        finish_reason=FinishReason(type="length"),
        weight_versions=[],
        prompt_tokens=1,
        cached_tokens=0,
        seed=0,
    )
    return BatchTokenOutput(step=1, finished=[finished])


def again(store: Answers, message_id: str) -> str:
    try:
        (found,) = store.attach(b"C", message_id, b"frame")
    except CaesuraError as error:
        return error.code
    return found.id


def test_answers_to_commands_outlive_what_is_generated(clock):
    store = Answers(0.0, LIMIT)
    for number in range(STORED_ANSWERS):
        clock.now += 1
        answer(store, f"m{number}", COMMAND_ANSWER_BYTES - 200)
        generate(store, f"g{number}")
        store.add(store.get(f"g{number}"), result(f"g{number}", nbytes=LIMIT // 10))
    assert again(store, "m0") == "m0"
    assert again(store, "g0") == ErrorCode.ANSWER_FORGOTTEN
    for number in range(STORED_ANSWERS):
        answer(store, f"later {number}", COMMAND_ANSWER_BYTES - 200)
    assert again(store, "later 0") == "later 0"
    assert again(store, "m0") == ErrorCode.ANSWER_FORGOTTEN


def test_an_answer_larger_than_the_ring_is_not_stored(clock):
    store = Answers(60.0, LIMIT)
    answer(store, "small", LIMIT // 2)
    answer(store, "large", LIMIT)
    assert [again(store, each) for each in ("large", "small")] == [ErrorCode.ANSWER_FORGOTTEN, "small"]


def test_storing_answers_takes_no_memory():
    store = Answers(60.0, LIMIT)

    def fill(name: str) -> None:
        for number in range(2 * STORED_ANSWERS):
            answer(store, f"{name} {number}", number % 3 * SMALL)
            generate(store, f"{name} g{number}", client=b"%d" % number)
            store.add(store.get(f"{name} g{number}"), result(f"{name} g{number}", nbytes=number))
            store.keep_for(b"%d" % number)

    tracemalloc.start()
    fill("first")
    before = tracemalloc.get_traced_memory()[0]
    fill("second")
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, "not even three bytes an answer"


def test_answers_under_way_are_never_forgotten(clock):
    store = Answers(0.0, LIMIT)
    assert store.attach(b"C", "slow", b"frame") is None
    for number in range(3 * STORED_ANSWERS):
        clock.now += 1
        answer(store, f"m{number}", LIMIT // 100)
    assert store.attach(b"D", "slow", b"frame") == []
    assert store.get("slow").clients == [b"C", b"D"]


def test_answers_under_way_take_no_more_than_the_limit(clock):
    """Answers of many samples, which would all be kept until the last one."""
    store = Answers(60.0, LIMIT)
    generate(store, "large", samples=12)
    generate(store, "other", samples=12)
    large = store.get("large")
    for number in range(11):
        store.add(large, result("large", number, LIMIT // 10))
    assert again(store, "large") == ErrorCode.ANSWER_FORGOTTEN
    assert store.attach(b"C", "joins", b"frame") is None
    with pytest.raises(CaesuraError) as refused:
        store.join(b"C", "joins", large)
    assert refused.value.code == ErrorCode.ANSWER_FORGOTTEN
    assert store.awaited_by() >= {b"C"}, "those who wait get the rest"
    store.add(large, result("large", 11))
    assert again(store, "large") == ErrorCode.ANSWER_FORGOTTEN
    assert store.get("large") is None
    assert store.attach(b"C", "other", b"frame") == []


def test_exchanges_under_way_are_bounded_together(clock):
    store = Answers(60.0, LIMIT)
    for number in range(4):
        generate(store, f"m{number}", samples=2)
        nbytes = LIMIT // (2 if number == 1 else 5)
        store.add(store.get(f"m{number}"), filled(f"{number}", nbytes))
    assert [again(store, f"m{n}") for n in range(4)] == ["0", ErrorCode.ANSWER_FORGOTTEN, "2", "3"]


def test_results_of_a_client_that_left_are_kept_for_a_while(clock):
    store = Answers(60.0, LIMIT)
    for rid in ("mine", "shared", "later"):
        generate(store, f"message of {rid}", rid=rid, samples=2)
    assert store.attach(b"D", "message of shared", b"frame") == []
    for rid in ("mine", "shared"):
        for index in (1, 0):
            store.add(store.get(f"message of {rid}"), result(rid, index))
    assert store.kept("mine") == [], "its client is there"
    clock.now += 100
    store.keep_for(b"C")
    clock.now += 59
    store.add(store.get("message of later"), result("later"))
    store.add(store.get("message of later"), result("later", 1))
    assert [each.index for each in store.kept("mine", b"body")] == [0, 1]
    assert store.kept("mine", b"another body") == store.kept("shared") == store.kept("later") == []
    generate(store, "again", rid="mine", client=b"D")
    assert store.kept("mine") == [], "a new generation has their place"


def test_messages_that_joined_are_forgotten_together(clock):
    store = Answers(60.0, LIMIT)
    store.attach(b"C", "first", b"frame")
    store.attach(b"D", "second", b"frame")
    assert store.join(b"D", "second", store.get("first")) == []
    store.add(store.get("first"), filled("x"))
    assert [again(store, each) for each in ("first", "second")] == ["x", "x"]
    for number in range(STORED_ANSWERS * COMMAND_ANSWER_BYTES // SMALL):
        answer(store, f"m{number}")
    assert [again(store, each) for each in ("first", "second")] == [ErrorCode.ANSWER_FORGOTTEN] * 2


def test_ids_are_remembered_long_and_no_others():
    table = PlaceTable(REMEMBERED_IDS)
    ids = [f"{number:032x}" for number in range(3 * REMEMBERED_IDS)]
    for place, each in enumerate(ids):
        table.set(each, place)
    recent = list(enumerate(ids))[-REMEMBERED_IDS:]
    missing = [each for place, each in recent if table.find(each) != place]
    assert len(missing) <= REMEMBERED_IDS // 10_000
    assert not any(table.find(f"other {number}") is not None for number in range(10_000))


def test_an_id_that_is_set_again_has_the_new_place():
    table = PlaceTable(REMEMBERED_IDS)
    for place in range(100):
        table.set("id", place)
    assert table.find("id") == 99
    table.discard("id")
    assert table.find("id") is None
