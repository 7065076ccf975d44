"""Notifications to a service manager: systemd's datagrams to ``NOTIFY_SOCKET``, if set; 1 s at most."""

import os
import socket

_PATIENCE_S = 1.0


def notify(*assignments: str) -> bool:
    """Send ``READY=1``, ``STATUS=…`` and the like; return True if a service manager received it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    if address.startswith("@"):  # a name in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagrams:
            datagrams.settimeout(_PATIENCE_S)
            datagrams.sendto("\n".join(assignments).encode(), address)
    except (OSError, ValueError):
        return False
    return True


def watchdog_interval_s() -> float | None:
    """Return the seconds between two ``WATCHDOG=1``, or None if the manager expects none."""
    try:
        limit = int(os.environ["WATCHDOG_USEC"]) / 1e6
        pid = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return limit / 3 if limit > 0 and pid == os.getpid() else None
