"""All faults by name."""

from . import network_faults, process_faults, resource_faults
from .registry import KINDS, Kind

__all__ = ["KINDS", "Kind", "network_faults", "process_faults", "resource_faults"]
