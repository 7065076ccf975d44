"""The loop goes on and the sender hears, whatever a message or a timer does."""

from time import monotonic

import msgspec
import pytest
from support.faults import BUG, NO_MEMORY, Fault, check_everybody, check_nothing_is_left, submit
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import (
    AbortReq,
    CaesuraError,
    ErrorCode,
    FlushCacheReqInput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    HelloReqInput,
    PauseGenerationReqInput,
    RenewPauseLeaseReqInput,
)
from caesura.scheduler.cache.manager import LedgerError
from caesura.scheduler.control.commands import COMMANDS
from caesura.scheduler.messaging import command_queue, dispatcher
from caesura.scheduler.runtime import housekeeping, loop


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(tiny_model, request):
    with EngineDriver(str(tiny_model), pipeline_depth=request.param, chunked_prefill_size=32) as driver:
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


@pytest.mark.parametrize("after", [2**63 - 1, 2**63, 2**64 - 1])
def test_memory_events_after_any_number(driver, after):
    rid = one_lives(driver)
    reply = driver.call(GetMemoryHistoryReqInput(after=after))
    if after < 2**63:
        assert (reply.events, reply.more, reply.older) == ([], False, [])
    else:
        assert_error(reply, "malformed_message")
    check_it(driver, rid)


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


@pytest.mark.parametrize("error", [BUG, NO_MEMORY[2]], ids=["bug", "memory"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_that_fails_is_answered(driver, monkeypatch, handler, error):
    find, make = HANDLERS[handler]
    rid = one_lives(driver)
    if handler == "flush":
        driver.run_until_idle()
    fault = Fault(monkeypatch, *find(driver), error, {0})
    reply = driver.call(make())
    assert fault.raised == 1
    assert_error(reply, "internal" if error is BUG else "out_of_memory")
    driver.go_on()
    driver.run_until_idle()
    assert driver.result(rid).finish_reason.type in ("length", "abort")
    check_everybody(driver, {})


def test_a_message_that_there_is_no_memory_to_decode(driver, monkeypatch):
    rid = one_lives(driver)
    Fault(monkeypatch, dispatcher, "decode_request", MemoryError(), {0})
    driver.send(GetStatusReqInput(id="unread"))
    driver.tick(2)
    assert_error(driver.replies.pop(""), "out_of_memory")
    check_it(driver, rid)


def test_a_decoder_without_memory_answers_by_id(driver, monkeypatch):
    class Decoder:
        def decode(self, frame):
            raise MemoryError

    rid = one_lives(driver)
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


@pytest.mark.parametrize("operation", [
    returns(None),
    returns("done"),
    returns(Odd()),
    raises(CaesuraError(ErrorCode.NOT_IDLE, "no", what=Odd())),
    raises(CaesuraError(ErrorCode.NOT_IDLE, "no", what={1, 2, Odd()})),
    raises(CaesuraError(ErrorCode.NOT_IDLE, "no", what=BUG)),
    lambda engine, request, sender: 5,
    lambda engine, request, sender: iter([3]),
], ids=[
    "none", "text", "odd", "odd-detail", "odd-set", "exception-detail", "no-generator", "odd-iterator",
])  # fmt: skip
def test_unanswerable_requests_get_an_error(driver, operation, monkeypatch):
    rid = one_lives(driver)
    monkeypatch.setitem(COMMANDS, FlushCacheReqInput, operation)
    message = FlushCacheReqInput()
    assert_error(driver.call(message), "internal")
    again = driver.call(message)
    assert (again.code, again.id) == ("internal", message.id)
    assert not driver.engine.commands.is_busy
    check_it(driver, rid)


@pytest.mark.parametrize("detail", [2**64, -(2**70), {"n": [2**80]}, "\udc80", float("nan")], ids=str)
def test_numbers_and_text_that_no_wire_holds_reach_the_client(driver, detail, monkeypatch):
    error = CaesuraError(ErrorCode.NOT_IDLE, "no \udc80", value=detail)
    monkeypatch.setitem(COMMANDS, FlushCacheReqInput, raises(error))
    assert_error(driver.flush(), "not_idle")


def test_a_result_that_cannot_be_encoded_is_replaced(driver, monkeypatch):
    results = driver.engine.outputs
    original = results._result
    spoiled = []

    def result(request, reason):
        made = original(request, reason)
        if len(request.prompt) == 4 and not spoiled:
            spoiled.append(request.rid)
            return msgspec.structs.replace(made, seed=Odd())
        return made

    monkeypatch.setattr(results, "_result", result)
    bad, good = driver.generate([5, 6, 7, 8], 6), driver.generate([5, 6, 7], 6)
    driver.run_until_idle()
    driver.tick(5)
    reason = driver.result(bad).finish_reason
    assert (reason.type, reason.code) == ("error", "internal")
    assert driver.result(good).finish_reason.type == "length"
    check_nothing_is_left(driver)


def test_a_group_is_aborted_though_one_of_it_cannot_be_retired(driver, monkeypatch):
    rid = driver.generate([5, 6, 7], 60, n=4)
    driver.tick(8)
    with monkeypatch.context() as patch:
        Fault(patch, driver.engine.answers, "add", BUG, {1})
        assert driver.abort(rid).aborted == 4
    driver.run_until_idle()
    assert {driver.result(rid, index).finish_reason.type for index in range(4)} == {"abort"}


def test_commands_that_wait_are_limited(driver, monkeypatch):
    monkeypatch.setattr(command_queue, "MAX_PENDING_COMMANDS", 4)
    rid = one_lives(driver)
    waiting = [driver.send(FlushCacheReqInput(timeout_s=86400.0)) for _ in range(4)]
    error = assert_error(driver.flush(timeout_s=86400.0), "queue_full")
    assert error.detail == {"waiting": 4, "limit": 4}
    driver.run_until_idle()
    driver.tick(2)
    assert all(driver.replies.pop(message_id).freed_tokens >= 0 for message_id in waiting)
    assert driver.result(rid).finish_reason.type == "length"


# -- timers and what runs beside -----------------------------------------------------------------------------


def lease(driver: EngineDriver, action: str) -> None:
    driver.pause("in_place", owner="o", lease_s=1e-6, on_lease_expiry=action)


TIMERS = {
    "keepalive": lambda d: (d.engine.router, "keepalive"),
    "collect": lambda d: (d.engine.updates, "collect"),
    "lease": lambda d: (housekeeping, "expire_lease"),
    "session": lambda d: (d.engine.updates, "expire"),
}


@pytest.mark.parametrize("timer", TIMERS)
def test_a_timer_that_fails_is_held_off_and_tried_again(driver, monkeypatch, timer):
    clock = Clock()
    rid = one_lives(driver)
    monkeypatch.setattr(loop, "monotonic", clock)
    monkeypatch.setattr(housekeeping, "monotonic", clock)
    keeping = driver.engine.housekeeping
    with monkeypatch.context() as patch:
        owner, name = TIMERS[timer](driver)
        table = keeping.timers._timers
        fault = Fault(patch, owner, name, BUG, range(1000))
        for entry in table:  # bound before the fault was
            if entry.what == "expiring the weight session":
                patch.setattr(entry, "act", lambda: driver.engine.updates.expire())
                patch.setattr(entry, "due", lambda: 0.0 if timer == "session" else None)
        if timer == "lease":
            lease(driver, "stay")
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


class Clock:
    """Ahead of the monotonic clock by ``now``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return monotonic() + self.now


@pytest.mark.parametrize("part", ["advance", "score", "reap"])
def test_a_part_of_the_tick_that_fails_does_not_end_it(driver, monkeypatch, part):
    rid = one_lives(driver)
    owner = driver.engine.commands if part == "advance" else driver.engine.dispatcher
    fault = Fault(monkeypatch, owner, part, BUG, range(3))
    driver.tick(5)
    assert fault.raised == 3
    check_it(driver, rid)


def test_the_emptying_of_an_idle_engine_may_fail(driver, monkeypatch):
    keeping = driver.engine.housekeeping
    fault = Fault(monkeypatch, driver.engine.history, "note", BUG, {0})
    driver.sleep_s()
    keeping.timers.fire(monotonic() + driver.config.idle_empty_s)
    assert fault.raised == 1
    assert driver.sleep_s() is None, "once per idle period"
    check_everybody(driver, submit(driver))


def test_looking_at_the_memory_may_fail(driver, monkeypatch):
    rid = one_lives(driver)
    fault = Fault(monkeypatch, driver.engine.history, "sample", BUG, range(5))
    driver.tick(8)
    assert fault.raised == 5
    check_it(driver, rid)


def test_a_ledger_that_is_wrong_ends_an_engine_that_checks_it(driver, monkeypatch):
    Fault(monkeypatch, driver.engine.cache, "check", LedgerError("wrong"), {0})
    driver.send(FlushCacheReqInput())
    with pytest.raises(LedgerError):
        driver.tick(3)


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BUG, KeyboardInterrupt(), SystemExit(3), MemoryError()], ids=repr)
def test_a_loop_that_ends_tells_everybody(driver, monkeypatch, error):
    runs, group = driver.generate([5, 6, 7], 60), driver.generate([3 + i % 80 for i in range(100)], 9, n=3)
    driver.tick(3)
    parked = driver.send(FlushCacheReqInput(timeout_s=86400.0))
    scheduler, calls = driver.engine.scheduler, []

    def tick(ongoing, tick=scheduler.tick):
        calls.append(ongoing)
        if len(calls) == 4:
            raise error
        return tick(ongoing)

    monkeypatch.setattr(scheduler, "tick", tick)
    with pytest.raises(type(error)):
        scheduler.run()
    driver.collect()
    assert_error(driver.replies.pop(parked), "engine_died")
    for key in [(runs, 0), *((group, index) for index in range(3))]:
        reason = driver.result(*key).finish_reason
        assert (reason.type, reason.code) == ("error", "engine_died")
        assert type(error).__name__ in reason.message
    assert len(tokens_of(driver.result(runs))) > 0, "what it had is not lost"


@pytest.mark.parametrize("stage", ["finish", "refuse_rest", "deliver"])
def test_an_end_that_fails_in_part_tells_the_others(driver, monkeypatch, stage):
    rids = [driver.generate([5, 6, 7 + number], 60) for number in range(3)]
    driver.tick(4)
    scheduler = driver.engine.scheduler
    owners = {
        "finish": driver.engine.outputs,
        "refuse_rest": driver.engine.dispatcher,
        "deliver": driver.engine.outbox,
    }
    owner = owners[stage]
    Fault(monkeypatch, owner, stage, BUG, {0})
    driver.engine.shutdown.request("the test", drain=False)
    scheduler.run()
    driver.collect()
    ended = [rid for rid in rids if (rid, 0) in driver.results]
    assert len(ended) >= 2
    assert stage == "finish" or len(ended) == 3
