"""Pause leases, owner tokens, kept results: what remains when a trainer or a client has died."""

import pytest
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of

from caesura.io_struct import (
    FetchResultReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    GetStatusReqInput,
    PauseGenerationReqInput,
    RenewPauseLeaseReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["control.engine_state"])


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


def pause(driver: EngineDriver, expiry: str, mode: str = "in_place"):
    return driver.pause(mode, owner="trainer", lease_s=10.0, on_lease_expiry=expiry)


def test_a_lease_needs_an_owner(driver):
    error = assert_error(driver.pause(lease_s=1.0), "invalid_request")
    assert error.detail["field"] == "owner"
    assert driver.status().generation == "running"


def test_expiry_continues(driver, clock):
    rid = driver.generate(PROMPT, 20)
    driver.tick(3)
    pause(driver, "continue")
    clock.now += 9.9
    driver.tick()
    status = driver.status()
    assert status.generation == "paused"
    assert status.lease_left_s == pytest.approx(0.1)
    clock.now += 0.2
    driver.run_until_idle()
    assert len(tokens_of(driver.result(rid))) == 20
    status = driver.status()
    assert (status.generation, status.pause_owner, status.lease_left_s) == ("running", None, None)


@pytest.mark.parametrize(
    "sign_of_life",
    [
        RenewPauseLeaseReqInput(owner="trainer"),
        GetStatusReqInput(owner="trainer"),
        PauseGenerationReqInput(mode="retract", owner="trainer"),
        FlushCacheReqInput(owner="trainer"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_any_command_of_the_owner_renews(driver, clock, sign_of_life):
    pause(driver, "continue", mode="abort")
    clock.now += 9
    driver.call(sign_of_life)
    clock.now += 9
    driver.tick()
    assert driver.status().generation == "paused"
    clock.now += 2
    driver.tick(2)
    assert driver.status().generation == "running"


def test_others_do_not_renew(driver, clock):
    pause(driver, "continue")
    clock.now += 9
    assert not driver.call(RenewPauseLeaseReqInput(owner="somebody")).renewed
    driver.flush()
    clock.now += 2
    driver.tick(2)
    assert driver.status().generation == "running"


def test_expiry_aborts(driver, clock):
    rid = driver.generate(PROMPT, 200)
    driver.tick(5)
    pause(driver, "abort")
    clock.now += 11
    driver.tick(2)
    assert driver.result(rid).finish_reason.type == "abort"
    assert len(tokens_of(driver.result(rid))) >= 3
    status = driver.status()
    assert (status.generation, status.pause_owner, status.kv.held) == ("paused", None, 0)
    driver.go_on()
    assert driver.status().generation == "running"


def test_expiry_stays(driver, clock):
    driver.generate(PROMPT, 200)
    driver.tick(5)
    pause(driver, "stay")
    clock.now += 11
    driver.tick(2)
    status = driver.status()
    assert (status.generation, status.pause_owner, status.running_requests) == ("paused", None, 1)


def test_expiry_with_an_open_session_aborts_it_first(driver, clock, other_model):
    pause(driver, "continue")
    driver.begin(owner="trainer")
    clock.now += 11
    driver.tick(2)
    status = driver.status()
    assert (status.generation, status.weights, status.session) == ("running", "valid", None)
    pause(driver, "continue")
    session_id = driver.begin(owner="trainer")
    driver.update(other_model, owner="trainer", session_id=session_id)
    clock.now += 11
    driver.tick(2)
    status = driver.status()
    assert (status.generation, status.weights) == ("paused", "poisoned"), (
        "half-committed weights must not serve"
    )


def test_a_long_command_of_the_owner_keeps_the_lease(driver, clock, other_model, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    pause(driver, "continue", mode="abort")
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model), owner="trainer"))
    driver.tick(2)
    clock.now += 60
    driver.tick(2)
    assert driver.status().generation == "paused"
    while update not in driver.replies:
        driver.tick()
    driver.tick()
    assert driver.status().generation == "paused", "the end of the command was a sign of life"


def test_continue_by_another_owner_needs_force(driver):
    pause(driver, "stay")
    error = assert_error(driver.go_on(owner="other"), "not_owner")
    assert error.detail["owner"] == "trainer"
    assert_error(driver.go_on(), "not_owner")
    assert driver.go_on(owner="other", force=True).was_paused
    pause(driver, "stay")
    assert driver.go_on(owner="trainer").was_paused


def test_second_pause_names_the_owner(driver):
    first, again = (
        driver.pause(mode, owner=owner, lease_s=60.0)
        for mode, owner in (("in_place", "trainer"), ("retract", "other"))
    )
    assert (first.mode, first.owner) == ("in_place", "trainer")
    assert (again.mode, again.owner) == ("retract", "trainer")
    assert driver.go_on(owner="trainer").was_paused
    assert driver.pause("in_place").owner is None


def request(rid: str, **fields: object) -> GenerateReqInput:
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    return GenerateReqInput(rid=rid, input_ids=PROMPT, sampling_params=params, **fields)


def vanish(driver: EngineDriver, name: str) -> None:
    driver.clients.pop(name).close(0)


def finish_unread(driver: EngineDriver, rid: str) -> None:
    driver.client("gone")
    driver.send(request(rid), "gone")
    driver.tick()
    (client,) = driver.engine.answers.awaited_by()
    driver.tick(8)
    vanish(driver, "gone")
    driver.results.clear()
    router = driver.engine.router
    for _ in range(5000):
        router.keepalive({client}, 0)
        if driver.call(FetchResultReqInput(rid=rid)).results:
            return
    raise AssertionError("the engine never noticed that the client is gone")


def test_results_of_a_client_that_is_gone_are_kept(driver):
    finish_unread(driver, "r1")
    reply = driver.call(FetchResultReqInput(rid="r1"))
    assert [len(tokens_of(r)) for r in reply.results] == [6]
    assert driver.call(FetchResultReqInput(rid="unknown")).results == []


def test_a_retry_gets_the_kept_result(driver):
    finish_unread(driver, "r1")
    kept = driver.call(FetchResultReqInput(rid="r1")).results[0]
    step = driver.status().step
    driver.send(request("r1"))
    driver.tick(3)
    driver.status()
    assert tokens_of(driver.result("r1")) == tokens_of(kept)
    assert driver.status().step == step, "nothing was computed again"


def test_kept_results_expire(driver, monkeypatch):
    clock = clock_of(monkeypatch, ["messaging.answers"])
    finish_unread(driver, "r1")
    clock.now += driver.config.result_ttl_s + 1
    assert driver.call(FetchResultReqInput(rid="r1")).results == []


def test_a_retry_with_the_same_rid_attaches_while_live(driver):
    driver.client("second")
    driver.send(request("r1"))
    driver.tick(3)
    driver.send(request("r1"), "second")
    assert driver.call(FetchResultReqInput(rid="r1")).live == 1
    other = GenerateReqInput(rid="r1", input_ids=[9], sampling_params=SamplingParams(max_new_tokens=6))
    assert_error(driver.call(other), "duplicate_rid")
    driver.run_until_idle()
    first, second = driver.results.pop(("r1", 0))
    assert tokens_of(first) == tokens_of(second)
    assert driver.abort("r1").aborted == 0


# -- the warning of a pause without a lease ------------------------------------------------------------------


@pytest.fixture
def time_of_all(monkeypatch, clock):
    for module in ("runtime.loop", "runtime.housekeeping"):
        monkeypatch.setattr(f"caesura.scheduler.{module}.monotonic", clock)
    return clock


def warned(caplog) -> list[str]:
    found = [message for message in caplog.messages if "no lease ends the pause" in message]
    caplog.clear()
    return found


def test_a_long_pause_without_a_lease_is_warned_of_once(driver, time_of_all, caplog):
    driver.pause("retract", owner="trainer 7")
    time_of_all.now += 59.9
    driver.tick(2)
    assert driver.sleep_s() == pytest.approx(0.1), "it is what the loop sleeps for"
    assert warned(caplog) == []
    time_of_all.now += 0.2
    driver.tick(3)
    (message,) = warned(caplog)
    assert message.startswith("paused (retract) since ")
    assert "by owner 'trainer 7', for 60 s" in message
    command = f"caesura continue --endpoint {driver.config.endpoint} --owner 'trainer 7'"
    assert message.endswith(command), "it can be pasted"
    driver.pause("in_place", owner="trainer 7")
    time_of_all.now += 3600
    driver.tick(3)
    assert warned(caplog) == [], "the mode changed, and it is the same pause"
    assert driver.sleep_s() is None, "nothing wakes it for this any more"


def test_each_pause_is_warned_of_and_an_ownerless_one_too(driver, time_of_all, caplog):
    for _ in range(2):
        driver.pause("abort")
        time_of_all.now += 61
        driver.tick(2)
        (message,) = warned(caplog)
        assert "by a client without an owner token" in message
        assert message.endswith(f"caesura continue --endpoint {driver.config.endpoint}")
        driver.go_on()
    time_of_all.now += 3600
    driver.tick(2)
    assert warned(caplog) == []


def test_the_warning_names_the_refusal_of_continue(driver, time_of_all, caplog):
    driver.pause("abort")
    driver.engine.updates.poison("a test")
    time_of_all.now += 61
    driver.tick(2)
    (message,) = warned(caplog)
    assert (
        ", with weights poisoned: a complete update must come first; to continue: caesura continue" in message
    )


def test_a_lease_makes_the_warning_needless_until_it_has_ended(driver, time_of_all, caplog):
    pause(driver, "stay")
    for _ in range(20):
        time_of_all.now += 9
        driver.call(RenewPauseLeaseReqInput(owner="trainer"))
    assert warned(caplog) == []
    time_of_all.now += 11
    driver.tick(2)
    assert driver.status().pause_owner is None, "the lease has expired"
    assert warned(caplog) == [], "that was a warning of its own"
    time_of_all.now += 61
    driver.tick(2)
    (message,) = warned(caplog)
    assert "by an owner whose lease has expired, for 252 s" in message
    assert "--owner" not in message
