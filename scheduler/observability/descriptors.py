"""The limit on open file descriptors: raised at start, and a warning when it comes close.

libzmq ends the process when no descriptor is left for a new connection, and the usual soft limit is 1,024.
"""

import logging
import os
import resource

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20
"""Highest limit to set: some libraries iterate up to the limit."""
NEAR = 0.8
"""Fraction of the limit at which the warning is logged."""


def raise_limit() -> int:
    """Raise the soft limit as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class DescriptorCheck:
    """Warns once when many descriptors are open, and again after their number has been lower."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> None:
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
