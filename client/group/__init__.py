"""Several engines used as one: routing, updates in two phases, and generations that outlive the engine that began them."""

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
