"""Keys of OpenAI bodies that no field has: they are ignored, and each is named once in the log.

Invariants:
- What is remembered and logged is bounded, whatever clients send.
- Bodies are skimmed: no value is decoded, and a body without unknown keys makes nothing that grows with it.
"""

import logging
from functools import cache
from threading import Lock

import msgspec

from ...io_struct.field_errors import advice, fields_of, nearest
from ..exceptions import InvalidRequest
from .bodies import INLINE
from .printable import printable

logger = logging.getLogger(__name__)

MAX_KEYS = 64
"""Different keys that are named; further ones are not."""
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownKeys:
    """Names keys for the operator, who sees requests of many clients; threads may share it."""

    def __init__(self) -> None:
        self._named: set[tuple[str, str]] = set()
        self._lock = Lock()

    def note(self, route: str, body: bytes, kind: type[msgspec.Struct], ignored: frozenset[str]) -> None:
        """Log the keys of ``body``, which has been read, beyond the fields of ``kind`` and the ``ignored``
        ones.

        Raises:
            InvalidRequest: a key is not UTF-8, which decoders of ``kind`` pass over.
        """
        try:
            unknown = _unknown_in(body, kind, ignored)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        for key in unknown:
            self._warn(route, key, kind)

    def _warn(self, route: str, key: str, kind: type[msgspec.Struct]) -> None:
        with self._lock:
            if (route, key) in self._named or len(self._named) >= MAX_KEYS:
                return
            self._named.add((route, key))
            last = len(self._named) == MAX_KEYS
        logger.warning(
            "%s: the key %s is not known and ignored%s; requests with it are not mentioned again%s",
            route,
            printable(key),
            _hint(key, kind),
            ", nor are further unknown keys" if last else "",
        )


def _hint(key: str, kind: type[msgspec.Struct]) -> str:
    names = fields_of(kind)
    if (instead := advice(key, names)) is not None:
        return f" ({instead})"
    near = nearest(key, names)
    return "" if near is None else f" (did you mean {near}?)"


def _unknown_in(body: bytes, kind: type[msgspec.Struct], ignored: frozenset[str]) -> list[str]:
    """Keys of ``body``. Of a large one only the first: there might be millions."""
    try:
        _skimming(kind, ignored).decode(body)
    except msgspec.ValidationError as error:
        if len(body) > INLINE:
            return [str(error).partition("`")[2].rpartition("`")[0]]
        known = ignored.union(kind.__struct_fields__)
        return [key for key in _KEYS.decode(body) if key not in known]
    return []


@cache
def _skimming(kind: type[msgspec.Struct], ignored: frozenset[str]) -> "msgspec.json.Decoder[msgspec.Struct]":
    """A decoder that takes the keys of ``kind`` with any value, and refuses others."""
    names = sorted(ignored.union(kind.__struct_fields__))
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Keys", fields, forbid_unknown_fields=True))
