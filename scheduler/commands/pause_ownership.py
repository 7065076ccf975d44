"""Who sent a command, and whose the pause is.

Invariants:
- Two messages are one sender's if they carry the same owner token; where one of them carries none, if they came over the
  same socket.
- A pause belongs to whoever brought it about, until it ends or its lease expires. A later pause changes the mode, not the owner;
  what nobody owned from the start is not adopted by a stranger's lease.
- Nothing here reads a clock: who asks says what time it is.
"""

from dataclasses import dataclass

from ...io_struct import CaesuraError, ErrorCode, PauseGenerationReqInput
from ...io_struct.control import LeaseAction


@dataclass(frozen=True, slots=True)
class Sender:
    """Of one message."""

    client: bytes
    """Its socket."""
    owner: str | None = None
    """The token that it carried."""

    def is_same(self, other: "Sender") -> bool:
        """Whether both may be taken for one trainer."""
        if self.owner is not None and other.owner is not None:
            return self.owner == other.owner
        return self.client == other.client


@dataclass(slots=True)
class Lease:
    """How long an owner may be silent, and what happens then."""

    seconds: float
    action: LeaseAction
    expires: float


class PauseOwnership:
    """Whose the present pause is; nobody's while the engine runs."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        """Who paused. None: nobody did, or the lease has expired."""
        self.lease: Lease | None = None

    @property
    def owner(self) -> str | None:
        """The token that the pause goes by; None: it has none."""
        return None if self.sender is None else self.sender.owner

    def take(self, sender: Sender, request: PauseGenerationReqInput, now: float) -> None:
        """A pause has completed. The first owner keeps it; its own later pauses may change token and lease."""
        if self.sender is None or (self.sender.owner is None and self.sender.client == sender.client):
            self.sender = sender
        if request.lease_s is not None and sender.owner == self.owner:
            self.lease = Lease(request.lease_s, request.on_lease_expiry, now + request.lease_s)

    def renew(self, owner: str | None, now: float) -> None:
        """A sign of life from ``owner``."""
        if self.lease is not None and owner is not None and owner == self.owner:
            self.lease.expires = now + self.lease.seconds

    def end(self) -> None:
        """The pause is over, or belongs to nobody any more."""
        self.sender = self.lease = None

    def require_continue(self, sender: Sender, force: bool) -> None:
        """Raise ``not_owner`` unless ``sender`` may end the pause: anybody may, where it carries no token."""
        if self.owner is not None and sender.owner != self.owner and not force:
            raise CaesuraError(
                ErrorCode.NOT_OWNER, f"the pause belongs to {self.owner!r}; use force", owner=self.owner
            )

    def is_owner(self, sender: Sender) -> bool:
        """Whether the pause is ``sender``'s."""
        return self.sender is not None and self.sender.is_same(sender)
