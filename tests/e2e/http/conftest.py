"""One engine behind the OpenAI surface, for all files that a process runs."""

from collections.abc import Iterator

import pytest
from support.openai_server import Served, serve_openai


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served
