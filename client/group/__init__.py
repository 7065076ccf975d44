"""Several engines behind one door: routing, updates in two phases, and generations that outlive the engine that began them."""

from .errors import FleetUpdateFailed
from .fleet import Fleet
from .members import EngineAddress
from .reports import FleetStatus, FleetUpdate, MemberStatus
from .router import routed_by

__all__ = [
    "EngineAddress",
    "Fleet",
    "FleetStatus",
    "FleetUpdate",
    "FleetUpdateFailed",
    "MemberStatus",
    "routed_by",
]
