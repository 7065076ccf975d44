"""A struct whose constructor says which field was meant.

Invariant: only a failing call is looked at, and decoding does not come here. For structs that people write
out.
"""

from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from .field_errors import unknown_name


@dataclass_transform(kw_only_default=True, frozen_default=True)
class NamedFields(msgspec.StructMeta):
    """Metaclass: an unknown keyword is a TypeError with the nearest field and all of them.

    A static method ``fields_beside`` names the fields next to the struct, for which keywords are often meant.
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
