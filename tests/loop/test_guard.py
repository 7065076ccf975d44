"""The loop goes on and the sender hears, whatever a message, a command or a timer does."""

from collections.abc import Callable
from itertools import product
from time import monotonic

import msgspec
import pytest
from support.clock import clock_of
from support.faults import BUG, NO_MEMORY, Fault, check_everybody, check_nothing_is_left, submit
from support.scripted import EngineDriver, assert_error, ok, tokens_of
from support.waiting import eventually

from caesura.io_struct import (
    AbortReq,
    CaesuraError,
    ErrorCode,
    ErrorReply,
    FlushCacheReqInput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    HelloReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    RenewPauseLeaseReqInput,
    ResumeMemoryOccupationReqInput,
)
from caesura.scheduler.cache.manager import LedgerError
from caesura.scheduler.control.command_table import COMMANDS
from caesura.scheduler.messaging import message_dispatcher as dispatcher
from caesura.scheduler.messaging.command_queue import MAX_PENDING_COMMANDS
from caesura.scheduler.runtime import housekeeping


@pytest.fixture
def driver(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        yield driver


def one_lives(driver: EngineDriver) -> str:
    rid = driver.generate([5, 6, 7], 60)
    driver.tick(3)
    return rid


def check_it(driver: EngineDriver, rid: str) -> None:
    driver.run_until_idle()
    result = driver.check(rid)
    assert result.finish_reason.type == "length"
    check_everybody(driver, {})


# -- messages ------------------------------------------------------------------------------------------------


def test_memory_events_after_any_number(driver):
    reply = driver.call(GetMemoryHistoryReqInput(after=2**63 - 1))
    assert (reply.events, reply.more, reply.older) == ([], False, [])
    for after in (2**63, 2**64 - 1):
        assert_error(driver.call(GetMemoryHistoryReqInput(after=after)), "malformed_message")


HANDLERS = {
    "hello": (lambda d: (dispatcher, "answer_hello"), lambda: HelloReqInput(wire_major=1, wire_minor=0)),
    "status": (lambda d: (dispatcher, "status"), GetStatusReqInput),
    "history": (lambda d: (d.engine.history, "events"), GetMemoryHistoryReqInput),
    "abort": (lambda d: (d.engine.live, "samples"), lambda: AbortReq(rid="r")),
    "lease": (lambda d: (d.engine.state, "renew_lease"), lambda: RenewPauseLeaseReqInput(owner="o")),
    "flush": (lambda d: (d.engine.cache, "flush"), lambda: FlushCacheReqInput(timeout_s=100.0)),
    "pause": (lambda d: (d.engine.history, "note"), PauseGenerationReqInput),
    "attach": (lambda d: (d.engine.answers, "attach"), PauseGenerationReqInput),
}  # fmt: skip


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_that_fails_is_answered(driver, handler, caplog):
    find, make = HANDLERS[handler]
    for error, code in ((BUG, "internal"), (NO_MEMORY[2], "out_of_memory")):
        rid = one_lives(driver)
        if handler == "flush":
            driver.run_until_idle()
        with Fault(*find(driver), error) as fault:
            reply = assert_error(driver.call(make()), code)
        assert fault.raised == 1
        assert error is not BUG or type(BUG).__name__ in reply.detail["traceback"]
        assert handler != "flush" or "FlushCacheReqInput failed" in caplog.text
        driver.go_on()
        driver.run_until_idle()
        assert driver.result(rid).finish_reason.type in ("length", "abort")
        check_everybody(driver, {})


class Decoder:
    """A decoder of messages without memory."""

    def decode(self, frame):
        raise MemoryError


def test_a_message_without_memory_to_decode_it(driver, monkeypatch):
    rid = one_lives(driver)
    with Fault(dispatcher, "decode_request", MemoryError()):
        driver.send(GetStatusReqInput(id="unread"))
        driver.tick(2)
    assert_error(driver.replies.pop(""), "out_of_memory")
    with monkeypatch.context() as patch:
        patch.setattr("caesura.io_struct.codec._to_scheduler", Decoder())
        driver.send(PauseGenerationReqInput(id="known"))
        driver.tick(2)
    assert_error(driver.replies.pop("known"), "out_of_memory")
    check_it(driver, rid)


class Odd:
    """A value that cannot be encoded."""


def returns(value):
    def operation(engine, request, sender):
        yield from ()
        return value

    return operation


def raises(error):
    def operation(engine, request, sender):
        yield from ()
        raise error

    return operation


def refuses(what):
    return raises(CaesuraError(ErrorCode.NOT_IDLE, "no \udc80", what=what))


ANSWERS = [
    *(returns(value) for value in (None, "done", Odd())),
    *(refuses(value) for value in (Odd(), {1, 2, Odd()}, BUG)),
    lambda engine, request, sender: 5,
    lambda engine, request, sender: iter([3]),
]
"""Operations whose answers no wire holds; refusals with odd values become refusals with their texts."""
DETAILS = [2**64, -(2**70), {"n": [2**80]}, "\udc80", float("nan")]


def test_answers_that_no_wire_holds_become_errors(driver, monkeypatch):
    rid = one_lives(driver)
    operations = [
        *((each, "internal") for each in ANSWERS),
        *((refuses(each), "not_idle") for each in DETAILS),
    ]
    for operation, code in operations:
        monkeypatch.setitem(COMMANDS, FlushCacheReqInput, operation)
        message = FlushCacheReqInput()
        assert_error(driver.call(message), code)
        again = driver.call(message)
        assert (again.code, again.id) == (code, message.id)
        assert not driver.engine.commands.is_busy
    check_it(driver, rid)


def test_a_result_that_cannot_be_encoded_is_replaced(driver):
    results = driver.engine.outputs
    original = results._result

    def spoil(request, reason):
        results._result = original
        return msgspec.structs.replace(original(request, reason), seed=Odd())

    bad = driver.generate([5, 6, 7, 8], 6)
    results._result = spoil
    good = driver.generate([5, 6, 7], 7)
    driver.run_until_idle()
    driver.tick(5)
    reason = driver.result(bad).finish_reason
    assert (reason.type, reason.code) == ("error", "internal")
    assert driver.result(good).finish_reason.type == "length"
    check_nothing_is_left(driver)


def test_a_group_is_aborted_though_one_is_not_retired(driver):
    rid = driver.generate([5, 6, 7], 60, n=4)
    driver.tick(8)
    with Fault(driver.engine.answers, "add", BUG, {1}):
        assert driver.abort(rid).aborted == 4
    driver.run_until_idle()
    assert {driver.result(rid, index).finish_reason.type for index in range(4)} == {"abort"}


def test_commands_that_wait_are_limited(driver):
    rid = one_lives(driver)
    waiting = [driver.send(FlushCacheReqInput(timeout_s=86400.0)) for _ in range(MAX_PENDING_COMMANDS)]
    error = assert_error(driver.flush(timeout_s=86400.0), "queue_full")
    assert error.detail == {"waiting": MAX_PENDING_COMMANDS, "limit": MAX_PENDING_COMMANDS}
    driver.run_until_idle()
    eventually(lambda: driver.tick() or waiting[-1] in driver.replies)
    assert all(driver.replies.pop(message_id).freed_tokens >= 0 for message_id in waiting)
    assert driver.result(rid).finish_reason.type == "length"


# -- timers and what runs beside -----------------------------------------------------------------------------


TIMERS = {
    "keepalive": lambda d: (d.engine.router, "keepalive"),
    "collect": lambda d: (d.engine.updates, "collect"),
    "lease": lambda d: (housekeeping, "expire_lease"),
    "session": lambda d: (d.engine.updates, "expire"),
}


@pytest.mark.parametrize("timer", TIMERS)
def test_a_timer_that_fails_is_held_off_and_tried_again(driver, monkeypatch, timer):
    clock = clock_of(monkeypatch, ["runtime.loop", "runtime.housekeeping", "control.engine_state"])
    rid = one_lives(driver)
    keeping = driver.engine.housekeeping
    with Fault(*TIMERS[timer](driver), BUG, range(1000)) as fault:
        for entry in keeping.timers._timers:  # bound before the fault was
            if entry.what == "expiring the weight session":
                entry.act = lambda: driver.engine.updates.expire()
                entry.due = lambda: 0.0 if timer == "session" and fault.raised < 2 else None
        if timer == "lease":
            driver.pause("in_place", owner="o", lease_s=1.0, on_lease_expiry="stay")
            clock.now += 2.0
        keeping.next_keepalive = 0.0
        driver.tick(20)
        assert fault.raised == 1
        assert driver.sleep_s() >= 0
        assert keeping.timers.next_due() > 0.0, "nothing is due at once"
        clock.now += housekeeping.HOLD_OFF_S + 1
        keeping.next_keepalive = 0.0
        driver.tick(2)
        assert fault.raised == 2 or timer == "keepalive"
    driver.go_on(force=True)
    check_it(driver, rid)


@pytest.mark.parametrize(
    ("owner", "part"),
    [("commands", "advance"), ("dispatcher", "score"), ("dispatcher", "reap"), ("history", "sample")],
)
def test_a_part_of_the_tick_that_fails_does_not_end_it(driver, owner, part):
    rid = one_lives(driver)
    with Fault(getattr(driver.engine, owner), part, BUG, range(3)) as fault:
        driver.tick(5)
    assert fault.raised == 3
    check_it(driver, rid)


def test_the_emptying_of_an_idle_engine_may_fail(driver):
    with Fault(driver.engine.history, "note", BUG) as fault:
        driver.sleep_s()
        driver.engine.housekeeping.timers.fire(monotonic() + driver.config.idle_empty_s)
    assert fault.raised == 1
    assert driver.sleep_s() is None, "once per idle period"
    check_everybody(driver, submit(driver))


def test_a_wrong_ledger_ends_an_engine_that_checks_it(driver):
    driver.send(FlushCacheReqInput())
    with Fault(driver.engine.cache, "check", LedgerError("wrong")), pytest.raises(LedgerError):
        driver.tick(3)


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BUG, KeyboardInterrupt(), SystemExit(3), MemoryError()], ids=repr)
def test_a_loop_that_ends_tells_everybody(driver, error):
    runs, group = driver.generate([5, 6, 7], 60), driver.generate([3 + i % 80 for i in range(100)], 9, n=3)
    driver.tick(3)
    parked = driver.send(FlushCacheReqInput(timeout_s=86400.0))
    with Fault(driver.engine.scheduler, "tick", error, {3}), pytest.raises(type(error)):
        driver.engine.scheduler.run()
    driver.collect()
    assert_error(driver.replies.pop(parked), "engine_died")
    for key in [(runs, 0), *((group, index) for index in range(3))]:
        reason = driver.result(*key).finish_reason
        assert (reason.type, reason.code) == ("error", "engine_died")
        assert type(error).__name__ in reason.message
    assert len(tokens_of(driver.result(runs))) > 0, "what it had is not lost"


@pytest.mark.parametrize("stage", ["finish", "refuse_rest", "deliver"])
def test_an_end_that_fails_in_part_tells_the_others(driver, stage):
    rids = [driver.generate([5, 6, 7 + number], 60) for number in range(3)]
    driver.tick(4)
    engine = driver.engine
    owners = {"finish": engine.outputs, "refuse_rest": engine.dispatcher, "deliver": engine.outbox}
    engine.shutdown.request("the test", drain=False)
    with Fault(owners[stage], stage, BUG):
        engine.scheduler.run()
    driver.collect()
    ended = [rid for rid in rids if (rid, 0) in driver.results]
    assert len(ended) >= 2
    assert stage == "finish" or len(ended) == 3


UPDATE_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "open": lambda driver: (driver.engine, "open_folder"),
    "check": lambda driver: (driver.engine.loader, "check"),
    "write": lambda driver: (driver.engine.loader, "write"),
    "derive": lambda driver: (driver.engine.model, "finalize_weights"),
    "synchronize": lambda driver: (driver.runner, "synchronize"),
    "retract": lambda driver: (driver.engine.batcher, "retract_all"),
    "commit": lambda driver: (driver.engine.state, "commit_weights"),
    "epoch": lambda driver: (driver.engine.cache, "commit_epoch"),
    "restart": lambda driver: (driver.engine.batcher, "restart_prefills"),
    "flush": lambda driver: (driver.engine.cache, "flush"),
}
BEFORE_THE_FIRST_BYTE = ("open", "check", "synchronize", "retract")
"""Stages of an update before its first write, on a running engine, whose steps it stops first."""


@pytest.mark.parametrize("stage", UPDATE_STAGES)
def test_an_update_that_fails(driver, tiny_model, other_model, stage):
    for error, code in ((BUG, "internal"), (NO_MEMORY[1], "out_of_memory")):
        rids = submit(driver, new_tokens=25)
        driver.tick(5)
        with Fault(*UPDATE_STAGES[stage](driver), error) as fault:
            assert_error(driver.update(other_model), code)
        assert fault.raised == 1
        status = driver.status()
        assert status.session is None
        assert status.weights == ("valid" if stage in BEFORE_THE_FIRST_BYTE else "poisoned")
        if status.weights == "poisoned":
            driver.tick(3)
            assert driver.status().step == status.step, "poisoned weights serve nobody"
            assert driver.update(tiny_model).committed
        results = check_everybody(driver, rids)
        assert {result.finish_reason.type for result in results} == {"length"}
        driver.flush(torch_empty_cache=False)


OCCUPATION_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "flush": lambda driver: (driver.engine.cache, "flush"),
    "forget": lambda driver: (driver.engine.updates, "forget"),
    "release": lambda driver: (driver.engine.residency, "release"),
    "resume": lambda driver: (driver.engine.residency, "resume"),
    "synchronize": lambda driver: (driver.runner, "synchronize"),
}


@pytest.mark.parametrize("stage", OCCUPATION_STAGES)
def test_a_release_or_a_resume_that_fails(driver, tiny_model, stage):
    """No step is launched on memory that may not be there, and the same command sent again repairs it."""
    for number, (error, code) in product((0, 1), ((BUG, "internal"), (NO_MEMORY[0], "out_of_memory"))):
        rids = submit(driver, new_tokens=25)
        driver.tick(5)
        driver.pause("retract")
        with Fault(*OCCUPATION_STAGES[stage](driver), error, {number}) as fault:
            for command in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
                reply = driver.call(command())
                if isinstance(reply, ErrorReply):
                    assert reply.code == code
                    driver.tick(3)
                    assert not driver.engine.batcher.in_flight
                    ok(driver.call(command()))
            assert fault.raised or number == 1, "the stage was not reached"
        driver.assert_status(memory="resident", weights="invalid")
        assert driver.update(tiny_model).committed
        driver.go_on(torch_empty_cache=False)
        results = check_everybody(driver, rids)
        assert {result.finish_reason.type for result in results} == {"length"}
        driver.flush(torch_empty_cache=False)
