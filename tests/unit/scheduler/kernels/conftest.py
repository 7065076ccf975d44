import pytest

from caesura.scheduler.kernels import native


@pytest.fixture
def built() -> None:
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
