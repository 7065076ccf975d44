"""Sessions, leases and results of clients that are gone, silent or refused. Who may send what to whose
session and pause is in test_protocol.py.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of

from caesura.client.trainer import manifest
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    FetchResultReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    GetStatusReqInput,
    InitWeightsUpdateGroupReqInput,
    Keepalive,
    Message,
    PauseGenerationReqInput,
    RenewPauseLeaseReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    decode_reply,
)


def test_an_end_must_name_the_explicit_session(driver):
    session_id = driver.begin()
    assert_error(driver.end(commit=False), "session_open")
    assert_error(driver.end(session_id="x"), "no_session")
    assert driver.end(session_id=session_id).committed


@pytest.mark.parametrize(("own", "foreign"), [
    ({}, {"client": "other"}),
    ({"owner": "a"}, {"owner": "b"}),
    ({"weight_version": "A"}, {"weight_version": "B"}),
    ({}, None),
], ids=["client", "owner", "label", "transport"])  # fmt: skip
def test_an_implicit_session_takes_no_foreign_piece(driver, tiny_model, other_model, own, foreign):
    driver.pause()
    pieces = Sender(driver, other_model, **own)
    pieces.send(0)
    reply = driver.update(tiny_model) if foreign is None else Sender(driver, tiny_model, **foreign).send(1)
    assert_error(reply, "session_open")
    assert pieces.send_all(1, weight_version=None)[-1].committed
    driver.assert_status(weights="valid", weight_version=own.get("weight_version", "default"))


def test_an_implicit_session_is_ended_by_its_sender_alone(driver, other_model):
    driver.pause()
    Sender(driver, other_model, owner="a").send(0)
    for command in (driver.end, driver.flush, driver.go_on):
        for owner in (None, "b"):
            assert_error(command("other", owner=owner), "session_open")
    assert not Sender(driver, other_model, owner="a", client="other").send(1).committed
    assert driver.end("other", owner="a").committed
    driver.go_on()
    driver.pause(owner="pauser")
    for epoch, settles in ((2, {"owner": "pauser"}), (3, {"client": "third", "force": True})):
        Sender(driver, other_model, client="other").send(0)
        driver.flush(**settles)
        driver.assert_status(session=None, weights_epoch=epoch)


# -- those who are gone --------------------------------------------------------------------------------------


def orphan(driver: EngineDriver, name: str) -> None:
    driver.clients.pop(name).close(0)
    sessions = driver.engine.sessions
    for _ in range(5000):
        if sessions.current is None or sessions.current.orphaned_at is not None:
            return
        driver.engine.housekeeping.next_keepalive = 0.0
        driver.tick()
    raise AssertionError("the engine never noticed that the client is gone")


@pytest.mark.parametrize(("kind", "written"), [("explicit", False), ("explicit", True), ("implicit", True)])
def test_a_session_whose_client_is_gone_is_abandoned(tiny_model, other_model, kind, written):
    with EngineDriver(str(tiny_model), session_orphan_s=0.0) as driver:
        fields = {}
        if kind == "explicit":
            fields = {"session_id": driver.begin(client="gone")}
        else:
            driver.pause()
        if written:
            Sender(driver, other_model, client="gone", **fields).send(0)
        assert driver.status().session is not None
        orphan(driver, "gone")
        driver.tick(2)
        driver.assert_status(session=None, weights="poisoned" if written else "valid")
        assert driver.begin()


def test_a_message_that_names_the_session_keeps_it(tiny_model, other_model):
    with EngineDriver(str(tiny_model), session_orphan_s=3600.0) as driver:
        session_id = driver.begin(client="gone")
        orphan(driver, "gone")
        sessions = driver.engine.sessions
        assert sessions.current.orphaned_at is not None
        pieces = Sender(driver, other_model, session_id=session_id)
        pieces.send_all()
        assert sessions.current.orphaned_at is None
        assert driver.end(session_id=session_id).committed


# -- leases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parked", "owner"), [("flush", None), ("join", None), ("join", "trainer")])
def test_a_parked_command_of_the_owner_is_a_sign_of_life(driver, clock, parked, owner):
    driver.generate([5, 6, 7], 200)
    driver.tick(3)
    driver.pause("in_place", owner="trainer", lease_s=5.0)
    join = InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2, owner=owner
    )
    driver.send(FlushCacheReqInput(timeout_s=3600.0) if parked == "flush" else join, "other")
    driver.tick(2)
    assert driver.engine.commands.is_busy
    clock.advance(6.0, driver, 3)
    assert driver.status().generation == ("running" if owner is None else "paused")


def test_a_lease_ends_only_sessions_of_its_owner(driver, other_model, clock):
    driver.pause(owner="trainer", lease_s=5.0)
    opened = driver.call(BeginWeightUpdateReqInput(), "other")
    pieces = Sender(driver, other_model, client="other", session_id=opened.session_id)
    pieces.send(0)
    clock.advance(6.0, driver, 2)
    driver.assert_status(generation="paused", weights="updating", pause_owner=None)
    pieces.send_all(1)
    assert driver.end(session_id=opened.session_id, client="other").committed


# -- refused before the first byte ---------------------------------------------------------------------------


def one_tensor(driver: EngineDriver, other_model: Path, **fields: object) -> Message:
    tensors = load_file(other_model / "model.safetensors")
    tensor = tensors["model.embed_tokens.weight"]
    row = tensor[0].nbytes
    spec = manifest([("model.embed_tokens.weight", tensor)])[0]
    start, rows = fields.pop("start_row", 0), fields.pop("rows", tensor.shape[0])
    fixed = type(spec)(name=spec.name, dtype=spec.dtype, shape=spec.shape, nbytes=rows * row, start_row=start)
    message = UpdateWeightsFromTensorReqInput(specs=[fixed], **fields)
    frame = tensor[start : start + rows].contiguous().numpy().tobytes()
    return driver.call(message, buffers=[frame])


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("part", ["from its midst", "without its end"])
def test_rows_that_cannot_be_taken_are_refused(driver, other_model, part, paused):
    if paused:
        driver.pause()
    before = driver.checksum()
    fields = {"start_row": 3, "rows": 2} if part == "from its midst" else {"rows": 3}
    reply = one_tensor(driver, other_model, abort_all_requests=True, **fields)
    if paused and part == "without its end":  # the rest may come
        assert not reply.committed
        assert_error(driver.end(), "weight_mismatch")
        assert driver.status().session is not None
        return
    assert_error(reply, "weight_mismatch")
    driver.assert_status(weights="valid", session=None, weights_epoch=0)
    assert driver.checksum() == before


@pytest.mark.parametrize("refusal", ["mismatch", "session_open", "no_session"])
def test_a_refused_update_aborts_no_request(driver, tiny_model, other_model, refusal):
    rid = driver.generate([5, 6, 7, 8], 50)
    driver.tick(3)
    if refusal == "session_open":
        driver.call(BeginWeightUpdateReqInput())
    pieces = Sender(driver, other_model, abort_all_requests=True)
    session_id = "x" if refusal == "no_session" else None
    reply = (
        one_tensor(driver, other_model, abort_all_requests=True, start_row=1, rows=1)
        if refusal == "mismatch"
        else pieces.send(0, session_id=session_id)
    )
    assert_error(reply, {"mismatch": "weight_mismatch"}.get(refusal, refusal))
    driver.run_until_idle()
    assert driver.result(rid).finish_reason.type == "length"


# -- leases --------------------------------------------------------------------------------------------------


PROMPT = [5, 6, 7, 8]


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["control.engine_state", "runtime.loop", "runtime.housekeeping"])


def pause(driver: EngineDriver, expiry: str, mode: str = "in_place"):
    return driver.pause(mode, owner="trainer", lease_s=10.0, on_lease_expiry=expiry)


def test_expiry_continues(driver, clock):
    rid = driver.generate(PROMPT, 20)
    driver.tick(3)
    pause(driver, "continue")
    clock.advance(9.9, driver)
    status = driver.status()
    assert status.generation == "paused"
    assert status.lease_left_s == pytest.approx(0.1)
    clock.now += 0.2
    driver.run_until_idle()
    assert len(tokens_of(driver.result(rid))) == 20
    driver.assert_status(generation="running", pause_owner=None, lease_left_s=None)


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
    clock.advance(9, driver)
    assert driver.status().generation == "paused"
    clock.advance(2, driver, 2)
    assert driver.status().generation == "running"


def test_others_do_not_renew(driver, clock):
    pause(driver, "continue")
    clock.now += 9
    assert not driver.call(RenewPauseLeaseReqInput(owner="somebody")).renewed
    driver.flush()
    clock.advance(2, driver, 2)
    assert driver.status().generation == "running"


@pytest.mark.parametrize(("action", "left"), [("abort", 0), ("stay", 1)])
def test_expiry_keeps_the_pause_and_may_end_requests(driver, clock, action, left):
    rid = driver.generate(PROMPT, 200)
    driver.tick(5)
    pause(driver, action)
    clock.advance(11, driver, 2)
    driver.assert_status(generation="paused", pause_owner=None, running_requests=left)
    if action == "abort":
        assert driver.result(rid).finish_reason.type == "abort"
        assert len(tokens_of(driver.result(rid))) >= 3
        assert driver.status().kv.held == 0
    driver.go_on()
    assert driver.status().generation == "running"


def test_expiry_with_an_open_session_aborts_it_first(driver, clock, other_model):
    pause(driver, "continue")
    driver.begin(owner="trainer")
    clock.advance(11, driver, 2)
    driver.assert_status(generation="running", weights="valid", session=None)
    pause(driver, "continue")
    session_id = driver.begin(owner="trainer")
    driver.update(other_model, owner="trainer", session_id=session_id)
    clock.advance(11, driver, 2)
    status = driver.status()
    assert (status.generation, status.weights) == ("paused", "poisoned"), (
        "half-committed weights must not serve"
    )


def test_a_long_command_of_the_owner_keeps_the_lease(driver, clock, other_model, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    pause(driver, "continue", mode="abort")
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model), owner="trainer"))
    driver.tick(2)
    clock.advance(60, driver, 2)
    assert driver.status().generation == "paused"
    while update not in driver.replies:
        driver.tick()
    driver.tick()
    assert driver.status().generation == "paused", "the end of the command was a sign of life"


def request(rid: str, **fields: object) -> GenerateReqInput:
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    return GenerateReqInput(rid=rid, input_ids=PROMPT, sampling_params=params, **fields)


def finish_unread(driver: EngineDriver, rid: str) -> None:
    driver.client("gone")
    driver.send(request(rid), "gone")
    driver.tick()
    (client,) = driver.engine.answers.awaited_by()
    driver.tick(8)
    driver.clients.pop("gone").close(0)
    driver.results.clear()
    router = driver.engine.router
    for _ in range(5000):
        router.keepalive({client}, 0)
        if driver.call(FetchResultReqInput(rid=rid)).results:
            return
    raise AssertionError("the engine never noticed that the client is gone")


def test_results_of_a_client_that_is_gone_are_kept(driver, monkeypatch):
    clock = clock_of(monkeypatch, ["messaging.stored_answers"])
    finish_unread(driver, "r1")
    (kept,) = driver.call(FetchResultReqInput(rid="r1")).results
    assert len(tokens_of(kept)) == 6
    assert driver.call(FetchResultReqInput(rid="unknown")).results == []
    step = driver.status().step
    driver.send(request("r1"))
    driver.tick(3)
    assert tokens_of(driver.result("r1")) == tokens_of(kept)
    assert driver.status().step == step, "nothing was computed again"
    assert driver.call(FetchResultReqInput(rid="r1")).results == [kept]
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


def warned(caplog) -> list[str]:
    found = [message for message in caplog.messages if "no lease ends the pause" in message]
    caplog.clear()
    return found


def test_a_long_pause_without_a_lease_is_warned_of_once(driver, clock, caplog):
    driver.pause("retract", owner="trainer 7")
    clock.advance(59.9, driver, 2)
    assert driver.sleep_s() == pytest.approx(0.1), "it is what the loop sleeps for"
    assert warned(caplog) == []
    clock.advance(0.2, driver, 3)
    (message,) = warned(caplog)
    assert message.startswith("paused (retract) since ")
    assert "by owner 'trainer 7', for 60 s" in message
    command = f"caesura continue --endpoint {driver.config.endpoint} --owner 'trainer 7'"
    assert message.endswith(command), "it can be pasted"
    driver.pause("in_place", owner="trainer 7")
    clock.advance(3600, driver, 3)
    assert warned(caplog) == [], "the mode changed, and it is the same pause"
    assert driver.sleep_s() is None, "nothing wakes it for this any more"


def test_each_pause_is_warned_of_and_an_ownerless_one_too(driver, clock, caplog):
    for _ in range(2):
        driver.pause("abort")
        clock.advance(61, driver, 2)
        (message,) = warned(caplog)
        assert "by a client without an owner token" in message
        assert message.endswith(f"caesura continue --endpoint {driver.config.endpoint}")
        driver.go_on()
    clock.advance(3600, driver, 2)
    assert warned(caplog) == []


def test_the_warning_names_the_refusal_of_continue(driver, clock, caplog):
    driver.pause("abort")
    driver.engine.updates.poison("a test")
    clock.advance(61, driver, 2)
    (message,) = warned(caplog)
    assert (
        ", with weights poisoned: a complete update must come first; to continue: caesura continue" in message
    )


def test_a_lease_makes_the_warning_needless(driver, clock, caplog):
    pause(driver, "stay")
    for _ in range(20):
        clock.now += 9
        driver.call(RenewPauseLeaseReqInput(owner="trainer"))
    assert warned(caplog) == []
    clock.advance(11, driver, 2)
    assert driver.status().pause_owner is None, "the lease has expired"
    assert warned(caplog) == [], "that was a warning of its own"
    clock.advance(61, driver, 2)
    (message,) = warned(caplog)
    assert "by an owner whose lease has expired, for 252 s" in message
    assert "--owner" not in message


# -- keepalive -----------------------------------------------------------------------------------------------


def next_is_keepalive(driver: EngineDriver, client: str) -> bool:
    socket = driver.client(client)
    return bool(socket.poll(5000)) and isinstance(decode_reply(socket.recv_multipart()[0]), Keepalive)


def test_clients_that_wait_get_keepalives(driver):
    request = GenerateReqInput(input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=50))
    driver.send(request, "generates")
    driver._turn()
    driver.send(FlushCacheReqInput(timeout_s=60.0), "commands")
    driver._turn()
    driver.send(request, "attached")
    driver.call(GetStatusReqInput(), "idle")
    for _ in range(2):
        driver.engine.housekeeping.next_keepalive = 0.0
        driver._turn()
        assert all(next_is_keepalive(driver, name) for name in ("generates", "commands", "attached"))
    assert not driver.client("idle").poll(0)
