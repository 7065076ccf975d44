import pytest

from caesura.scheduler import kernels
from caesura.scheduler.kernels import native
from caesura.scheduler.layers import experts, moe


@pytest.fixture(params=["compiled", "torch"])
def served(request, monkeypatch):
    """Experts and routers by compiled kernels, and by torch."""
    if request.param == "torch":
        for module in (experts, moe):
            monkeypatch.setattr(module, "best", lambda *_: kernels.TORCH)
    elif native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
