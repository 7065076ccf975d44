"""The sender of a command, and the owner and lease of a pause.

- Two messages have the same sender if they carry the same owner token. If one of them carries no token, they
  have the same sender if they came over the same socket.
- A pause belongs to the sender that paused first, until the pause ends or its lease expires. A later pause
  changes the mode and not the owner; a pause without a token is not taken over by another sender's lease.
- This module reads no clock: callers pass the time.
"""

from dataclasses import dataclass

from ...io_struct import CaesuraError, ErrorCode, PauseGenerationReqInput
from ...io_struct.control import LeaseAction


@dataclass(frozen=True, slots=True)
class Sender:
    client: bytes
    """Id of the sender's socket."""
    owner: str | None = None
    """Owner token of the message."""

    def is_same(self, other: "Sender") -> bool:
        if self.owner is not None and other.owner is not None:
            return self.owner == other.owner
        return self.client == other.client


@dataclass(slots=True)
class Lease:
    """Seconds that the owner may send nothing, and what the engine does after that."""

    seconds: float
    action: LeaseAction
    expires: float


class PauseOwnership:
    """Owner and lease of the current pause; both None while the engine runs."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        """Sender that paused, or None if the engine is not paused or the lease has expired."""
        self.lease: Lease | None = None

    @property
    def owner(self) -> str | None:
        """Owner token of the pause, or None."""
        return None if self.sender is None else self.sender.owner

    def take(self, sender: Sender, request: PauseGenerationReqInput, now: float) -> None:
        """Record a completed pause. The first sender stays the owner; its own later pauses may change token
        and lease.
        """
        if self.sender is None or (self.sender.owner is None and self.sender.client == sender.client):
            self.sender = sender
        if request.lease_s is not None and sender.owner == self.owner:
            self.lease = Lease(request.lease_s, request.on_lease_expiry, now + request.lease_s)

    def renew(self, owner: str | None, now: float) -> None:
        """Renew the lease if a message carried the token of the pause's owner."""
        if self.lease is not None and owner is not None and owner == self.owner:
            self.lease.expires = now + self.lease.seconds

    def end(self) -> None:
        self.sender = self.lease = None

    def require_continue(self, sender: Sender, force: bool) -> None:
        """Raise ``not_owner`` unless ``sender`` may end the pause; anybody may end one without a token."""
        if self.owner is not None and sender.owner != self.owner and not force:
            raise CaesuraError(
                ErrorCode.NOT_OWNER, f"the pause belongs to {self.owner!r}; use force", owner=self.owner
            )

    def is_owner(self, sender: Sender) -> bool:
        return self.sender is not None and self.sender.is_same(sender)
