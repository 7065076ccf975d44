"""An address for a fake engine."""

import pytest


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('s')}/s"
