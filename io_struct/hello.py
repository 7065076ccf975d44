"""The first exchange on a connection: the versions of the wire, and the incarnation of the engine."""

from typing import Annotated

import msgspec

from .base import Reply, Request

Version = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HelloReqInput(Request, kw_only=True):
    """The first message of a client on a connection. Another major version is refused as
    ``version_mismatch``.
    """

    wire_major: Version
    """Major version of the client's wire; must equal the engine's."""
    wire_minor: Version
    """Minor version of the client's wire; the engine accepts any."""
    client: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Name and version of the client's software, for the engine's log. Empty means unknown."""


class HelloReqOutput(Reply, kw_only=True):
    """Version and incarnation of the engine."""

    wire_major: int
    """Major version of the engine's wire; equals the client's."""
    wire_minor: int
    """Minor version of the engine's wire; may be higher or lower than the client's."""
    incarnation: str
    """Random id of this start of the engine. Another one is a new process, which knows no earlier requests.
    """
    version: str
    """Version of the engine's software."""
    pid: int
    """Process id of the engine, in its own pid namespace."""
