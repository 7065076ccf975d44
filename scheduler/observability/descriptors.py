"""The limit on open file descriptors, without which libzmq ends the process: raised at start, and watched."""

import logging
import os
import resource

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20
NEAR = 0.8


def raise_limit() -> int:
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
