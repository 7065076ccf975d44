"""The first exchange on a connection: which wire both sides speak, and which start of the engine this is."""

from typing import Annotated

import msgspec

from .base import Reply, Request

Version = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HelloReqInput(Request, kw_only=True):
    """What a client sends first on a connection. Another major version is refused as ``version_mismatch``."""

    wire_major: Version
    """Major version of the wire that the client speaks; must equal the engine's."""
    wire_minor: Version
    """Minor version of the wire that the client speaks; the engine accepts any."""
    client: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Name and version of the client's software, for the engine's log. Empty: unknown."""


class HelloReqOutput(Reply, kw_only=True):
    """What the engine speaks, and who it is."""

    wire_major: int
    """Major version of the wire that the engine speaks; equals the client's."""
    wire_minor: int
    """Minor version of the wire that the engine speaks; may be higher or lower than the client's."""
    incarnation: str
    """Drawn at random at each start of an engine: a client that sees another one talks to an engine that has forgotten everything."""
    version: str
    """Version of the engine's software."""
    pid: int
    """Process id of the engine, in its own pid namespace."""
