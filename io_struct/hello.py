"""The first exchange on a connection: which wire both sides speak, and which start of the engine this is."""

from typing import Annotated

import msgspec

from .base import Reply, Request

Version = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HelloReqInput(Request, kw_only=True):
    """What a client sends first on a connection. Another major version is refused as ``version_mismatch``."""

    wire_major: Version
    wire_minor: Version
    client: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Name and version of the client's software, for the engine's log. Empty: unknown."""


class HelloReqOutput(Reply, kw_only=True):
    """What the engine speaks, and who it is."""

    wire_major: int
    wire_minor: int
    incarnation: str
    """Drawn at random at each start of an engine: a client that sees another one talks to an engine that has forgotten everything."""
    version: str
    """Of the engine's software."""
    pid: int
