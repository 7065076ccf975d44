"""The limit of open descriptors: raised at start, and told when it is near."""

import logging
import os
import resource
import subprocess
import sys

import pytest

from caesura.scheduler.runtime import process
from caesura.scheduler.runtime.process import DescriptorCheck


@pytest.mark.parametrize(
    ("allowed", "most", "expected"), [(300, 1 << 20, 300), (300, 200, 200), (300, 50, 100)]
)
def test_the_soft_limit_is_raised_as_far_as_allowed_and_sensible(allowed, most, expected):
    script = (
        "import resource; from caesura.scheduler.runtime import process as d\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {allowed}))\n"
        f"d.MAX_DESCRIPTORS = {most}\n"
        "print(d.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected), str(expected), str(allowed)]


def test_coming_near_is_said_once_each_time(monkeypatch, caplog):
    used = len(os.listdir("/proc/self/fd"))
    limits = iter([10 * used, used + 1, used + 1, 10 * used, used + 1])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (next(limits), 1 << 20))
    check = DescriptorCheck()
    said = []
    with caplog.at_level(logging.WARNING, logger=process.logger.name):
        for _ in range(5):
            check()
            said.append(len(caplog.messages))
    assert said == [0, 1, 1, 1, 2]
    assert "near the limit" in caplog.messages[0]
