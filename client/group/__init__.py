"""Several engines used as one: routing, updates in two phases, generations that outlive their engine."""

from .fleet import Fleet, FleetStatus, FleetUpdate, MemberStatus
from .members import EngineAddress
from .router import routed_by
from .session import FleetUpdateFailed

__all__ = [
    "EngineAddress",
    "Fleet",
    "FleetStatus",
    "FleetUpdate",
    "FleetUpdateFailed",
    "MemberStatus",
    "routed_by",
]
