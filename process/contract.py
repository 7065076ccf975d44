"""Socket paths, local addresses and exit statuses that an engine, its launcher and its clients agree on."""

import ipaddress

MAX_IPC_PATH = 107
"""Maximum bytes of the path of an ``ipc://`` endpoint: ``sun_path`` of Linux, without its final zero."""
SHUT_SUFFIX = ".full"
"""Suffix of a socket's path while its engine accepts no connection, so that a client can say why."""
EXIT_HUNG = 70
"""Exit status of an engine whose loop or shutdown hung; no other end has it."""


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``, a name or an IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
