"""What libraries read when they are loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caesura.scheduler.runtime import libraries

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ADVISED = """
import numpy as np
array = np.ones(32 << 20, np.uint8)
print(any(line.startswith("VmFlags:") and " hg" in line for line in open("/proc/self/smaps")))
"""


def advised(**settings: str) -> bool:
    environment = {name: value for name, value in os.environ.items() if name not in libraries._SETTINGS}
    found = subprocess.check_output([sys.executable, "-c", ADVISED], text=True, env=environment | settings)
    return found.strip() == "True"


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_numpy_asks_for_no_huge_pages(monkeypatch):
    """The kernel would fill again what malloc_trim gave back."""
    for name in libraries._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert advised()
    assert not advised(**libraries.settings())


def test_user_settings_are_kept(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert "GOMP_SPINCOUNT" not in libraries.settings()
