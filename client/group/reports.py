"""What a fleet says of itself: its status, and what an update has done."""

from dataclasses import dataclass

from ...io_struct import GetStatusReqOutput, PauseMode, WeightUpdateReqOutput
from .members import Member, State


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """An update that a fleet has committed."""

    epoch: int
    """The fleet's weights epoch after it."""
    weight_version: str
    """Its label."""
    replies: dict[str, WeightUpdateReqOutput]
    """The replies to the commits, by name; epochs in them are the engines' own."""
    fenced: dict[str, str]
    """Members that do not have the new weights and are out of routing, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member as the fleet sees it."""

    name: str
    """Its name, or else its endpoint."""
    state: State
    """``serving``: it is given requests. ``joining``, ``fenced``, ``gone``: it is not."""
    reason: str
    """Why it does not serve; empty if it does."""
    load: int
    """Samples that this fleet has given it and that have not ended."""
    engine: GetStatusReqOutput | None
    """Its answer to a status request; None if there was none."""

    @staticmethod
    def of(member: Member, engine: GetStatusReqOutput | None) -> "MemberStatus":
        """Of ``member`` now."""
        return MemberStatus(
            name=member.name, state=member.state, reason=member.reason, load=member.load, engine=engine
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet and its members."""

    weights_epoch: int
    """Epoch of the weights that the fleet serves; spans of its outputs and ``min_weights_epoch`` count alike."""
    weight_version: str
    """Their label."""
    paused: PauseMode | None
    """Mode of the fleet's pause; None: it runs."""
    live_requests: int
    """Requests that have not ended, waiting ones included."""
    moved_requests: int
    """How often a request was continued on another member."""
    members: list[MemberStatus]
    """All engines, in the order in which they were added."""
