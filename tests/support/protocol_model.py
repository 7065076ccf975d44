"""The reference of the control protocol: what each command must answer, and what it leaves, as
docs/reference/lifecycle.md says.

Plain data and a few rules; it knows nothing of the engine. A method for each command returns "ok" or the
error code.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sender:
    """Sender of a command: a socket, and the owner token in the message."""

    client: str
    owner: str | None = None

    def is_same(self, other: "Sender") -> bool:
        if self.owner is not None and other.owner is not None:
            return self.owner == other.owner
        return self.client == other.client


@dataclass
class Session:
    """The open weight session. ``id`` is the engine's, taken from its answers."""

    kind: str
    sender: Sender
    id: str | None = None
    begin_id: str | None = None
    route: str | None = None
    label: str | None = None
    touched: bool = False


@dataclass
class Protocol:
    """An engine as its clients see it, when no command is under way."""

    names: frozenset[str]
    """Names of all tensors."""
    mode: str | None = None
    pauser: Sender | None = None
    lease: str | None = None
    weights: str = "valid"
    epoch: int = 0
    label: str = "default"
    session: Session | None = None
    written: set[str] = field(default_factory=set)
    """Names of tensors written since the last commit or poisoning."""
    contents: dict[str, int] = field(default_factory=dict)
    """Number of the checkpoint that each tensor is of."""

    def pause(self, sender: Sender, mode: str, lease: str | None) -> str:
        if lease is not None and sender.owner is None:
            return "invalid_request"
        self.mode = mode
        if self.pauser is None or (self.pauser.owner is None and self.pauser.client == sender.client):
            self.pauser = sender
        if lease is not None and sender.owner == self.pauser.owner:
            self.lease = lease
        return "ok"

    def go_on(self, sender: Sender, force: bool) -> str:
        if self.mode is None:
            return "ok"
        owner = self.pauser.owner if self.pauser is not None else None
        if owner is not None and sender.owner != owner and not force:
            return "not_owner"
        if self.session is not None and self.session.kind == "explicit":
            return "session_open"
        refused = self._settle(sender, force)
        if refused == "ok" and self.weights == "poisoned":
            refused = "weights_poisoned"
        if refused == "ok":
            self.mode = self.pauser = self.lease = None
        return refused

    def flush(self, sender: Sender, force: bool) -> str:
        return self._settle(sender, force)

    def begin(self, sender: Sender) -> str:
        if self.session is not None:
            return "session_open"
        self.session = Session("explicit", sender)
        return "ok"

    def piece(
        self,
        sender: Sender,
        name: str | None,
        route: str,
        label: str | None,
        tensors: frozenset[str],
        which: int,
    ) -> str:
        session = self.session
        if name is not None:
            if not self._is_named(name):
                return "no_session"
        elif session is not None:
            disagrees = session.route not in (None, route) or (
                None not in (session.label, label) and session.label != label
            )
            if session.kind == "explicit" or not session.sender.is_same(sender) or disagrees:
                return "session_open"
        if session is None:
            session = self.session = Session("single" if self.mode is None else "implicit", sender)
        session.route, session.touched = route, True
        session.label = label if label is not None else session.label
        self.written |= tensors
        self.contents |= dict.fromkeys(tensors, which)
        self.weights = "updating" if self.weights == "valid" else self.weights
        covered = self.written >= self.names
        if session.kind != "explicit" and (
            covered or (session.kind == "single" and self.weights != "poisoned")
        ):
            self._commit(session.label)
        elif session.kind == "single":
            self.session = None
        return "ok"

    def end(self, sender: Sender, name: str | None, commit: bool, force: bool, label: str | None) -> str:
        if force and commit:
            return "invalid_request"
        session = self.session
        if name is not None and not force:
            if not self._is_named(name):
                return "no_session"
        elif session is None:
            return "no_session"
        elif not force and (session.kind == "explicit" or not session.sender.is_same(sender)):
            return "session_open"
        assert session is not None
        if not commit:
            self.abandon()
        elif self.weights == "poisoned" and not self.written >= self.names:
            return "weight_mismatch"
        else:
            self._commit(label if label is not None else session.label)
        return "ok"

    def abandon(self) -> None:
        assert self.session is not None
        if self.session.touched:
            self.weights, self.written = "poisoned", set()
        self.session = None

    def expire_lease(self) -> None:
        action, owner, session = self.lease, self.pauser, self.session
        assert owner is not None
        self.lease = self.pauser = None
        if action != "continue":
            return
        if session is not None and (
            session.sender.is_same(owner) or (session.kind == "implicit" and not session.touched)
        ):
            self.abandon()
        if self.weights == "valid":
            self.mode = None

    def _settle(self, sender: Sender, force: bool) -> str:
        session = self.session
        if session is None or session.kind != "implicit":
            return "ok"
        owns = self.pauser is not None and self.pauser.is_same(sender)
        if not (force or owns or session.sender.is_same(sender)):
            return "session_open"
        if self.weights == "poisoned" and not self.written >= self.names:
            return "weight_mismatch"
        self._commit(session.label)
        return "ok"

    def _commit(self, label: str | None) -> None:
        self.epoch += 1
        self.label = label if label is not None else self.label
        self.weights, self.session, self.written = "valid", None, set()

    def _is_named(self, name: str) -> bool:
        return self.session is not None and name in (self.session.id, self.session.begin_id)
