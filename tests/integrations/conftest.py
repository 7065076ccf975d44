"""The record of the routes that a client calls."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.recorded_routes import Recorded, compare, recording


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
