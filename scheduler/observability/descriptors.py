"""How many descriptors the process may have open.

libzmq ends the process when there is none left for a new connection, and the usual soft limit is 1,024. So the limit is
raised as far as the system lets anybody raise it, and coming near it is said.
"""

import logging
import os
import resource

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20
"""Raised no further than this, however much is allowed: some libraries count up to the limit."""
NEAR = 0.8
"""Share of the limit from which on there is a warning."""


def raise_limit() -> int:
    """The soft limit as high as it may be; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class DescriptorCheck:
    """Warns once when many are open, and again when it was better in between."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> None:
        """Look; cheap enough for every few seconds."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/proc/self/fd"))
        near = limit != resource.RLIM_INFINITY and used >= NEAR * limit
        if near and not self._told:
            logger.warning(
                "%d of %d descriptors are open: near the limit (ulimit -n); beyond it the process ends",
                used,
                limit,
            )
        self._told = near
