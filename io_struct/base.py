"""Framing and encoding shared by every message.

Invariants: a message is one msgpack-encoded tagged struct (the header), then zero or more raw buffers, which
:class:`TensorSpec` fields of the header describe; nothing is ever unpickled. Structs are keyword-only and
map-encoded. An unknown field of a request is refused, one of a reply is skipped. This package imports msgspec
and the standard library only.
"""

import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import msgspec

WIRE_VERSION = (1, 0)
"""(major, minor). Equal majors understand each other: a newer minor only adds (wire.md, "Versions")."""
MAX_HEADER_BYTES = 64 << 20
"""Headers beyond this are refused before they are decoded: 64 MiB holds a 16-million-token prompt."""
MAX_FRAMES = 16_384
"""Maximum frames of one message, including the header."""
MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a frame. ZeroMQ drops the connection of a peer that sends a longer one."""
MAX_MESSAGE_BYTES = 4 << 30
"""Maximum size of all frames of one message together."""
MAX_ID_LENGTH = 128
"""Longest message id or request id, in characters."""
MAX_LABEL_LENGTH = 1024
"""Longest label, owner token or cache salt, in characters: they are kept, repeated in answers and logged."""
MAX_PATH_LENGTH = 65_536
"""Longest path, in characters: far beyond the kernel's own limit, which is an error of the checkpoint."""
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_LENGTH)]
FolderPath = Annotated[str, msgspec.Meta(max_length=MAX_PATH_LENGTH)]
SessionId = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]
GroupRule = Literal["first", "differing", "least", "any", "all", "joined", "united", "drift"]
"""``first``: of one engine; ``differing``: the first value unlike it; ``joined``: text; ``united``: names;
``drift``: figures of all tokens."""
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]


def new_id() -> str:
    """Return a fresh message or request id: 32 hex digits, unique without coordination."""
    return uuid.uuid4().hex


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that crosses the wire on its own; tagged with its class name."""


class Request(Message, kw_only=True):
    """Client to scheduler. ``id`` makes a retry safe: docs/reference/wire.md, "Idempotence"."""

    id: Identifier = msgspec.field(default_factory=new_id)
    """Message id; the reply carries it, and a retry repeats it. Left out: the engine generates one."""


class Reply(Message, kw_only=True, forbid_unknown_fields=False):
    """Scheduler to client, in answer to the request with the same ``id``."""

    OF_GROUP: ClassVar[dict[str, GroupRule] | None] = None
    """Rules by field for the one reply of several engines; other fields are added. None means that one
    engine's reply stands for all."""
    id: str
    """The ``id`` of the request that this answers."""


class FramedMessage(Message, kw_only=True, forbid_unknown_fields=False, dict=True):
    """Scheduler to client: a header, and behind it one frame for each of its tensors."""

    @property
    def buffers(self) -> Sequence[bytes | memoryview]:
        """The frames, which are no part of the header."""
        frames: Sequence[bytes | memoryview] = self.__dict__.get("_buffers", ())
        return frames

    def with_buffers(self, buffers: Sequence[bytes | memoryview]) -> Self:
        """Set its frames, and return it."""
        self.__dict__["_buffers"] = buffers
        return self


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A plain value inside a message."""


class ReplyRecord(Record, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """A plain value inside a reply: fields of a newer minor version are skipped."""


class TensorSpec(Record, kw_only=True, frozen=True):
    """One tensor, or some rows of one, inside a buffer (the first frame after the header is number 0).

    ``nbytes`` is whole rows from ``start_row`` on; pieces come in row order. A manifest: name, dtype, shape.
    """

    name: str
    """Name of the tensor in the Hugging Face checkpoint."""
    dtype: str
    """Safetensors name of the type (``"BF16"``, …). One that cannot be cast to the parameter's is refused."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=64)]
    """Elements per dimension of the whole tensor; empty for a scalar. At most 64 dimensions."""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes from the start of the buffer, a multiple of the dtype's size."""
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Size of this tensor's rows at ``offset``, in bytes."""
    start_row: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Index of the first of these rows; 0 for a whole tensor, a scalar, and the first piece of a tensor."""
    buffer: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Index of the buffer; always 0 in an ipc update, which has one buffer."""
    count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of elements of a sparse tensor of a delta: ``nbytes`` is their flat positions, ascending int32
    (int64 in a tensor of 2^31 elements), zeros to a multiple of 8, then as many values. None: whole rows."""
