from collections.abc import Iterator

import pytest

from caesura.scheduler.kernels import native


@pytest.fixture(params=["compiled", "torch"])
def served(request: pytest.FixtureRequest) -> Iterator[None]:
    """Experts and routers by compiled kernels, and by torch."""
    if request.param == "compiled" and native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    with native.limited_to("torch" if request.param == "torch" else native.isa()):
        yield
