"""Notifications to a service manager by systemd's protocol: datagrams to the socket in ``NOTIFY_SOCKET``.

Invariant: without ``NOTIFY_SOCKET`` nothing happens, and nothing that happens there can fail the caller, nor hold it up for
long.
"""

import os
import socket

_PATIENCE_S = 1.0
"""With a manager that does not read: its queue is short."""


def notify(*assignments: str) -> bool:
    """Send ``READY=1``, ``STATUS=…`` and the like; whether somebody was there to hear it."""
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
    """Interval in which to send ``WATCHDOG=1``, with a margin; None means that the manager does not expect it."""
    try:
        limit = int(os.environ["WATCHDOG_USEC"]) / 1e6
        pid = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return limit / 3 if limit > 0 and pid == os.getpid() else None
