"""Ownership of a session: pieces, ends and settlements of somebody else."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error

from caesura.client.trainer import as_frames, buckets, manifest
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    InitWeightsUpdateGroupReqInput,
    Message,
    UpdateWeightsFromTensorReqInput,
)


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


class Pieces:
    """A checkpoint cut into messages of the tensor transport; ``fields`` go into each of them."""

    def __init__(
        self,
        driver: EngineDriver,
        path: Path,
        *,
        client: str = "main",
        nbytes: int = 20_000,
        **fields: object,
    ) -> None:
        self.driver, self.client, self.fields = driver, client, fields
        self.tensors = load_file(path / "model.safetensors")
        self.parts = [as_frames(part) for part in buckets(self.tensors.items(), nbytes)]
        assert len(self.parts) > 2

    def __len__(self) -> int:
        return len(self.parts)

    def send(self, number: int, **fields: object) -> Message:
        specs, frames = self.parts[number]
        message = UpdateWeightsFromTensorReqInput(specs=specs, **{**self.fields, **fields})
        return self.driver.call(message, self.client, buffers=frames)


def checksum(driver: EngineDriver) -> str:
    return driver.check_weights().total


def checksum_of(driver: EngineDriver, path: Path) -> str:
    driver.update(path)
    return checksum(driver)


# -- explicit sessions ---------------------------------------------------------------------------------------


def test_pieces_and_the_end_name_their_session(driver, other_model):
    opened = driver.call(BeginWeightUpdateReqInput())
    pieces = Pieces(driver, other_model, session_id=opened.session_id)
    for number in range(len(pieces)):
        reply = pieces.send(number)
        assert (reply.committed, reply.session_id) == (False, opened.session_id)
    reply = driver.end(session_id=opened.session_id, weight_version="new")
    assert (reply.committed, reply.weight_version, reply.session_id) == (True, "new", None)


def test_a_session_can_be_named_by_its_begin_message(driver, other_model):
    begin = BeginWeightUpdateReqInput()
    driver.call(begin)
    assert not Pieces(driver, other_model).send(0, session_id=begin.id).committed
    driver.end(commit=False, session_id=begin.id)
    assert driver.status().session is None


@pytest.mark.parametrize("fields", [{}, {"owner": "other"}], ids=["nobody", "owner"])
@pytest.mark.parametrize("client", ["main", "other"])
def test_a_piece_without_the_id_is_refused(driver, other_model, client, fields):
    opened = driver.call(BeginWeightUpdateReqInput())
    before = checksum(driver)
    pieces = Pieces(driver, other_model, client=client, **fields)
    assert_error(pieces.send(0), "session_open")
    assert_error(driver.update(other_model, client=client, **fields), "session_open")
    assert checksum(driver) == before
    status = driver.status()
    assert (status.weights, status.session.session_id) == ("valid", opened.session_id)


def test_a_foreign_piece_does_not_poison_a_session_that_has_written(driver, other_model, tmp_path):
    opened = driver.call(BeginWeightUpdateReqInput())
    pieces = Pieces(driver, other_model, session_id=opened.session_id)
    pieces.send(0)
    assert_error(driver.update(tmp_path, client="other"), "session_open")
    assert_error(Pieces(driver, other_model, client="other").send(1, session_id="x"), "no_session")
    assert driver.status().weights == "updating"
    for number in range(1, len(pieces)):
        pieces.send(number)
    assert driver.end(session_id=opened.session_id).committed


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("gone", ["expired", "ended", "never"])
def test_a_piece_of_a_session_that_is_gone_changes_nothing(driver, other_model, gone, paused):
    if paused:
        driver.pause()
    opened = driver.call(BeginWeightUpdateReqInput(deadline_s=600.0))
    session_id = "never" if gone == "never" else opened.session_id
    if gone == "expired":
        driver.engine.sessions.current.deadline = 0.0
        driver.tick()
    else:
        driver.end(commit=False, session_id=opened.session_id)
    before = checksum(driver)
    assert_error(Pieces(driver, other_model, session_id=session_id).send(0), "no_session")
    assert_error(driver.end(session_id=session_id), "no_session")
    status = driver.status()
    assert (status.weights, status.weights_epoch, status.session) == ("valid", 0, None)
    assert checksum(driver) == before


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_must_name_the_explicit_session(driver, commit):
    opened = driver.call(BeginWeightUpdateReqInput())
    assert_error(driver.end(commit=commit, client="other"), "session_open")
    assert_error(driver.end(commit=commit), "session_open")
    assert_error(driver.end(commit=commit, session_id="x", client="other"), "no_session")
    assert driver.status().session.session_id == opened.session_id


def test_force_aborts_whatever_is_open(driver, other_model):
    assert_error(driver.end(commit=False, force=True), "no_session")
    driver.call(BeginWeightUpdateReqInput())
    assert_error(driver.end(force=True, client="other"), "invalid_request")
    assert not driver.end(commit=False, force=True, client="other").committed
    assert (driver.status().session, driver.status().weights) == (None, "valid")
    driver.pause()
    Pieces(driver, other_model).send(0)
    driver.end(commit=False, force=True, client="other")
    assert (driver.status().session, driver.status().weights) == (None, "poisoned")


# -- implicit sessions ---------------------------------------------------------------------------------------


def test_an_implicit_session_takes_no_piece_of_another_sender(driver, tiny_model, other_model):
    driver.pause()
    first = Pieces(driver, other_model, weight_version="A")
    second = Pieces(driver, tiny_model, client="other")
    for number in range(len(first) - 1):
        first.send(number)
        assert_error(second.send(number), "session_open")
    assert_error(second.send(len(second) - 1), "session_open")
    assert_error(driver.update(tiny_model, client="other"), "session_open")
    assert first.send(len(first) - 1).committed
    assert driver.status().weight_version == "A"
    found = checksum(driver)
    assert found == checksum_of(driver, other_model)


def test_owners_tell_senders_apart_on_one_socket_and_join_them_over_two(driver, other_model):
    driver.pause()
    Pieces(driver, other_model, owner="a").send(0)
    assert_error(Pieces(driver, other_model, owner="b").send(1), "session_open")
    assert not Pieces(driver, other_model, owner="a", client="other").send(1).committed


@pytest.mark.parametrize("differs", ["label", "transport"])
def test_pieces_that_disagree_are_refused_on_one_socket(driver, tiny_model, other_model, differs):
    driver.pause()
    first = Pieces(driver, other_model, owner="http", weight_version="A")
    first.send(0)
    foreign = (
        Pieces(driver, tiny_model, owner="http").send(1, weight_version="B")
        if differs == "label"
        else driver.update(tiny_model, owner="http")
    )
    assert_error(foreign, "session_open")
    replies = [first.send(number) for number in range(1, len(first))]
    assert replies[-1].committed
    assert driver.status().weight_version == "A"
    assert checksum(driver) == checksum_of(driver, other_model)


def test_the_id_binds_pieces_to_an_implicit_session(driver, other_model):
    driver.pause()
    pieces = Pieces(driver, other_model)
    session_id = pieces.send(0).session_id
    assert session_id == driver.status().session.session_id
    assert pieces.send(1, session_id=session_id).session_id == session_id
    driver.end(commit=False, session_id=session_id)
    assert_error(pieces.send(2, session_id=session_id), "no_session")


def test_an_implicit_session_is_ended_by_its_sender_alone(driver, other_model):
    driver.pause()
    Pieces(driver, other_model, owner="a").send(0)
    assert_error(driver.end(commit=False, client="other"), "session_open")
    assert_error(driver.end(owner="b"), "session_open")
    assert driver.end(owner="a").committed


# -- who settles ---------------------------------------------------------------------------------------------


SETTLES = {"flush": FlushCacheReqInput, "continue": ContinueGenerationReqInput}


@pytest.mark.parametrize("command", list(SETTLES))
def test_other_owners_do_not_commit_half_an_update(driver, other_model, command):
    driver.pause()
    Pieces(driver, other_model).send(0)
    assert_error(driver.call(SETTLES[command](), "other"), "session_open")
    assert_error(driver.call(SETTLES[command](owner="b"), "other"), "session_open")
    status = driver.status()
    assert (status.weights, status.weights_epoch, status.generation) == ("updating", 0, "paused")
    driver.call(SETTLES[command](force=True), "other")
    assert driver.status().weights_epoch == 1


@pytest.mark.parametrize("command", list(SETTLES))
def test_sender_and_pause_owner_settle(driver, other_model, command):
    for settler in ({"client": "main"}, {"owner": "trainer", "client": "other"}):
        driver.pause(owner="trainer")
        epoch = driver.status().weights_epoch
        Pieces(driver, other_model, owner="trainer").send(0)
        client, owner = settler["client"], settler.get("owner", "trainer")
        driver.call(SETTLES[command](owner=owner), client)
        status = driver.status()
        assert (status.weights, status.weights_epoch) == ("valid", epoch + 1)
        driver.go_on(owner="trainer")


def test_a_lease_serves_nothing_that_a_foreign_flush_would_have_committed(driver, other_model, monkeypatch):
    clock = clock_of(monkeypatch, ["control.engine_state"])
    driver.pause(owner="trainer", lease_s=10.0)
    Pieces(driver, other_model, owner="trainer").send(0)
    assert_error(driver.flush(client="other"), "session_open")
    clock.now += 11.0
    driver.tick(2)
    status = driver.status()
    assert (status.generation, status.weights, status.weights_epoch) == ("paused", "poisoned", 0)


# -- those who are gone --------------------------------------------------------------------------------------


def vanish(driver: EngineDriver, name: str) -> None:
    driver.clients.pop(name).close(0)
    sessions = driver.engine.sessions
    for _ in range(5000):
        if sessions.current is None or sessions.current.orphaned_at is not None:
            return
        driver.engine.housekeeping.next_keepalive = 0.0
        driver.tick()
    raise AssertionError("the engine never noticed that the client is gone")


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_a_session_whose_client_is_gone_is_abandoned(tiny_model, other_model, kind, written):
    if kind == "implicit" and not written:
        return
    with EngineDriver(str(tiny_model), session_orphan_s=0.0) as driver:
        fields = {}
        if kind == "explicit":
            fields = {"session_id": driver.begin(client="gone")}
        else:
            driver.pause()
        if written:
            Pieces(driver, other_model, client="gone", **fields).send(0)
        assert driver.status().session is not None
        vanish(driver, "gone")
        driver.tick(2)
        status = driver.status()
        assert (status.session, status.weights) == (None, "poisoned" if written else "valid")
        assert driver.begin()


def test_a_message_that_names_the_session_keeps_it(tiny_model, other_model):
    with EngineDriver(str(tiny_model), session_orphan_s=3600.0) as driver:
        session_id = driver.begin(client="gone")
        vanish(driver, "gone")
        sessions = driver.engine.sessions
        assert sessions.current.orphaned_at is not None
        pieces = Pieces(driver, other_model, session_id=session_id)
        for number in range(len(pieces)):
            pieces.send(number)
        assert sessions.current.orphaned_at is None
        assert driver.end(session_id=session_id).committed


# -- leases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parked", ["flush", "join"])
def test_a_parked_command_of_another_owner_is_no_sign_of_life(driver, monkeypatch, parked):
    clock = clock_of(monkeypatch, ["control.engine_state"])
    driver.generate([5, 6, 7], 200)
    driver.tick(3)
    driver.pause("in_place", owner="trainer", lease_s=5.0)
    join = InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2
    )
    driver.send(FlushCacheReqInput(timeout_s=3600.0) if parked == "flush" else join, "other")
    driver.tick(2)
    clock.now += 6.0
    driver.tick(2)
    assert driver.status().generation == "running"


def test_a_pause_without_an_owner_is_not_adopted(driver, monkeypatch):
    """The lease of one trainer would continue the pause of another."""
    clock = clock_of(monkeypatch, ["control.engine_state"])
    driver.pause()
    driver.pause(owner="late", lease_s=5.0, client="other")
    status = driver.status()
    assert (status.pause_owner, status.lease_left_s) == (None, None)
    clock.now += 6.0
    driver.tick(2)
    assert driver.status().generation == "paused"
    driver.pause(owner="first", lease_s=5.0)  # its own socket's
    assert driver.status().pause_owner == "first"


def test_the_lease_of_one_does_not_end_the_session_of_another(driver, other_model, monkeypatch):
    clock = clock_of(monkeypatch, ["control.engine_state"])
    driver.pause(owner="trainer", lease_s=5.0)
    opened = driver.call(BeginWeightUpdateReqInput(), "other")
    pieces = Pieces(driver, other_model, client="other", session_id=opened.session_id)
    pieces.send(0)
    clock.now += 6.0
    driver.tick(2)
    status = driver.status()
    assert (status.generation, status.weights, status.pause_owner) == ("paused", "updating", None)
    for number in range(1, len(pieces)):
        pieces.send(number)
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
def test_rows_that_cannot_be_taken_are_refused_before_the_first_byte(driver, other_model, part, paused):
    if paused:
        driver.pause()
    before = checksum(driver)
    fields = {"start_row": 3, "rows": 2} if part == "from its midst" else {"rows": 3}
    reply = one_tensor(driver, other_model, abort_all_requests=True, **fields)
    if paused and part == "without its end":  # the rest may come
        assert not reply.committed
        assert_error(driver.end(), "weight_mismatch")
        assert driver.status().session is not None
        return
    assert_error(reply, "weight_mismatch")
    status = driver.status()
    assert (status.weights, status.session, status.weights_epoch) == ("valid", None, 0)
    assert checksum(driver) == before


@pytest.mark.parametrize("refusal", ["mismatch", "session_open", "no_session"])
def test_a_refused_update_aborts_no_request(driver, tiny_model, other_model, refusal):
    rid = driver.generate([5, 6, 7, 8], 50)
    driver.tick(3)
    if refusal == "session_open":
        driver.call(BeginWeightUpdateReqInput())
    pieces = Pieces(driver, other_model, abort_all_requests=True)
    session_id = "x" if refusal == "no_session" else None
    reply = (
        one_tensor(driver, other_model, abort_all_requests=True, start_row=1, rows=1)
        if refusal == "mismatch"
        else pieces.send(0, session_id=session_id)
    )
    assert_error(reply, {"mismatch": "weight_mismatch"}.get(refusal, refusal))
    driver.run_until_idle()
    assert driver.result(rid).finish_reason.type == "length"
