"""The record of the routes that a client calls; an engine whose answers are known."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.http_serve import ServedEngine, served
from support.recorded_routes import Recorded, compare, recording
from support.steered_model import make_steered_model


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    """Return a function of a client's name, its package and a server's address: that of a recording proxy."""
    calls: dict[tuple[str, str], set[str]] = {}
    with ExitStack() as stack:

        def record(client: str, package: str, url: str) -> str:
            return stack.enter_context(recording(url, calls.setdefault((client, package), set())))

        yield record
    for (client, package), routes in calls.items():
        compare(client, package, f"{request.path.name}::{request.node.name}", routes)


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    path = make_steered_model(tmp_path_factory.mktemp("steered"))
    options = ("--dtype", "float32", "--kv-pool-tokens", "4096", "--reasoning-parser", "auto")
    with served("--model", str(path), *options) as engine:
        yield engine
