"""A struct whose constructor says which field was meant.

Invariants:
- Only a call that fails is looked at, and decoding makes structs without this call: messages cost what they
  did.
- It is for structs that people write out, one for each request; those that are made for each token have no
  use for it.
"""

from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from .field_errors import unknown_name


@dataclass_transform(kw_only_default=True, frozen_default=True)
class NamedFields(msgspec.StructMeta):
    """Metaclass: an unknown keyword is a TypeError with the nearest field and all of them.

    A struct may have a static method ``fields_beside``: what stands next to it where it is used, as a keyword
    that was given to the one is often meant for the other.
    """

    if not TYPE_CHECKING:  # checkers read the fields; a constructor of any keywords would hide them

        def __call__(cls, /, *values: Any, **fields: Any) -> Any:  # noqa: N805 (of a metaclass)
            try:
                return _construct(cls, *values, **fields)
            except TypeError:
                names = cls.__struct_fields__
                unknown = next((name for name in fields if name not in names), None)
                if unknown is None:
                    raise
                beside = cls.fields_beside() if hasattr(cls, "fields_beside") else ()
                said = unknown_name(unknown, names, beside, place=cls.__name__)
            raise TypeError(f"{cls.__name__}: {unknown} {said}")


_construct = msgspec.StructMeta.__call__
