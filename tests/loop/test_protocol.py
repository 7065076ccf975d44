"""The whole control protocol, several clients, owners and sessions at once, against a model of what
docs/reference/lifecycle.md says.

After each command the answer is the model's, status is the model's, and every tensor is of the checkpoint
that the model names: nothing that was refused has written, nothing that was written is lost.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file
from support.lanes import quick
from support.properties import examples
from support.protocol_model import Protocol, Sender
from support.scripted import EngineDriver, assert_error

from caesura.client.trainer import as_frames, buckets
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ErrorReply,
    Message,
    RenewPauseLeaseReqInput,
    UpdateWeightsFromTensorReqInput,
)

SENDERS = st.sampled_from(
    [Sender("main", "a"), Sender("main"), Sender("other", "b"), Sender("third"), Sender("third", "a")]
)
RARELY = st.sampled_from([False, False, False, True])
NAMES = st.sampled_from(["none", "none", "session", "session", "begin", "stale", "foreign"])
"""Kinds of session id that a message carries."""
LABELS = st.sampled_from([None, None, "x", "y"])
MODES = st.sampled_from(["abort", "retract", "in_place"])


class ProtocolMachine(RuleBasedStateMachine):
    """Rules are the commands; each may be sent by anybody, with any session id."""

    def __init__(self, folders: list[str], depth: int) -> None:
        super().__init__()
        self.driver = EngineDriver(folders[0], pipeline_depth=depth, load_bucket_bytes=1 << 20)
        self.folders = folders
        self.tensors = [load_file(f"{folder}/model.safetensors") for folder in folders]
        self.parts = [
            [as_frames(part) for part in buckets(tensors.items(), 20_000)] for tensors in self.tensors
        ]
        names = frozenset(self.tensors[0])
        self.model = Protocol(names, contents=dict.fromkeys(names, 0))
        self.stale: list[str] = ["never"]
        self.slots = self.driver.engine.model.weight_slots()

    # -- sending and checking

    def check(self, reply: Message, expected: str) -> Message:
        if expected == "ok":
            assert not isinstance(reply, ErrorReply), reply
        else:
            assert_error(reply, expected)
        session = self.model.session
        if session is not None and session.id is None:
            session.id = reply.session_id
        if session is not None and session.id not in self.stale:
            self.stale.append(session.id)
        return reply

    def command(
        self,
        call: Callable[..., Message],
        sender: Sender,
        expected: str,
        *arguments: object,
        **fields: object,
    ) -> Message:
        return self.check(call(*arguments, client=sender.client, owner=sender.owner, **fields), expected)

    def name_of(self, kind: str) -> str | None:
        session = self.model.session
        if kind == "session" and session is not None:
            return session.id
        if kind == "begin" and session is not None:
            return session.begin_id
        if kind == "stale":
            gone = [name for name in self.stale if session is None or name != session.id]
            return gone[-1]
        return "foreign" if kind == "foreign" else None

    # -- rules

    @rule(sender=SENDERS, mode=MODES, lease=st.sampled_from([None, None, "continue", "abort", "stay"]))
    def pause(self, sender, mode, lease):
        expected = self.model.pause(sender, mode, lease)
        options = {"lease_s": None if lease is None else 600.0, "on_lease_expiry": lease or "stay"}
        reply = self.command(self.driver.pause, sender, expected, mode, **options)
        assert expected != "ok" or (reply.mode, reply.owner) == (mode, self.model.pauser.owner)

    @rule(sender=SENDERS, force=RARELY)
    def go_on(self, sender, force):
        expected = self.model.go_on(sender, force)
        self.command(self.driver.go_on, sender, expected, force=force, torch_empty_cache=False)

    @rule(sender=SENDERS, force=RARELY)
    def flush(self, sender, force):
        expected = self.model.flush(sender, force)
        self.command(self.driver.flush, sender, expected, force=force, torch_empty_cache=False)

    @rule(sender=SENDERS)
    def begin(self, sender):
        expected = self.model.begin(sender)
        message = BeginWeightUpdateReqInput(owner=sender.owner)
        if expected == "ok":
            self.model.session.begin_id = message.id
        self.check(self.driver.call(message, sender.client), expected)

    @rule(sender=SENDERS, kind=NAMES, label=LABELS, which=st.integers(0, 1), part=st.integers(0, 5))
    def piece(self, sender, kind, label, which, part):
        specs, frames = self.parts[which][part % len(self.parts[which])]
        name = self.name_of(kind)
        expected = self.model.piece(
            sender, name, "tensor", label, frozenset(spec.name for spec in specs), which
        )
        message = UpdateWeightsFromTensorReqInput(
            specs=specs, owner=sender.owner, session_id=name, weight_version=label
        )
        self.check(self.driver.call(message, sender.client, buffers=frames), expected)

    @rule(sender=SENDERS, kind=NAMES, label=LABELS, which=st.integers(0, 1))
    def disk(self, sender, kind, label, which):
        name = self.name_of(kind)
        expected = self.model.piece(sender, name, "disk", label, self.model.names, which)
        fields = {"session_id": name, "weight_version": label}
        self.command(self.driver.update, sender, expected, self.folders[which], **fields)

    @rule(sender=SENDERS, kind=NAMES, commit=st.booleans(), force=RARELY, label=LABELS)
    def end(self, sender, kind, commit, force, label):
        name = self.name_of(kind)
        expected = self.model.end(sender, name, commit, force, label)
        fields = {"session_id": name, "commit": commit, "force": force, "weight_version": label}
        self.command(self.driver.end, sender, expected, **fields)

    @rule(sender=SENDERS)
    def renew(self, sender):
        reply = self.driver.call(RenewPauseLeaseReqInput(owner=sender.owner), sender.client)
        owner = None if self.model.pauser is None else self.model.pauser.owner
        assert reply.renewed is (self.model.lease is not None and sender.owner == owner)

    @precondition(lambda self: self.model.session is not None)
    @rule()
    def deadline_passes(self):
        self.driver.engine.sessions.current.deadline = 0.0
        self.driver.tick()
        self.model.abandon()

    @precondition(lambda self: self.model.lease is not None)
    @rule()
    def owner_is_silent(self):
        self.driver.engine.state.ownership.lease.expires = 0.0
        self.driver.tick()
        self.model.expire_lease()

    # -- what must always hold

    @invariant()
    def status_is_the_model(self):
        model, status = self.model, self.driver.status()
        assert status.pause_mode == model.mode
        assert status.pause_owner == (None if model.pauser is None else model.pauser.owner)
        assert (status.lease_left_s is not None) == (model.lease is not None)
        committed = (status.weights, status.weights_epoch, status.weight_version)
        assert committed == (model.weights, model.epoch, model.label)
        if model.session is None:
            assert status.session is None
        else:
            assert (status.session.kind, status.session.session_id) == (model.session.kind, model.session.id)
            assert status.session.owner == model.session.sender.owner

    @invariant()
    def every_tensor_is_of_the_checkpoint_that_was_written_last(self):
        for name, which in self.model.contents.items():
            assert self.slots[name].read().equal(self.tensors[which][name]), name

    def teardown(self):
        self.driver.__exit__()


@pytest.mark.parametrize("depth", quick([0, 1]))
def test_any_order_of_commands_by_anybody(tiny_model, other_model, depth):
    folders = [str(tiny_model), str(other_model)]
    run_state_machine_as_test(
        lambda: ProtocolMachine(folders, depth),
        settings=settings(max_examples=examples(60), stateful_step_count=40),
    )
