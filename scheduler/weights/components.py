"""Models of several components. Everywhere but on the wire and in files, a tensor of a component is called
``component.name``.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from .source import Pieces, WeightSource


def chosen(known: tuple[str, ...], named: str | None) -> str | None:
    """Return the component that a call writes if it names ``named``; None for a model without components.

    Raises CaesuraError ``invalid_request`` if there is no such component.
    """
    if named is None:
        return known[0] if known else None
    if named not in known:
        said = f"is none of {', '.join(known)}" if known else "is given, and this model has no components"
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST, f"component = {named!r} {said}", field="component", value=named
        )
    return named


def in_component(source: WeightSource, component: str | None) -> WeightSource:
    return source if component is None else ComponentSource(source, component)


class ComponentSource:
    """Tensors of one component, under the model's names."""

    def __init__(self, inner: WeightSource, component: str) -> None:
        self.inner = inner
        self.component = component
        self.name, self.total_bytes, self.complete = inner.name, inner.total_bytes, inner.complete
        self.specs = renamed(inner.specs, component)
        self._prefix = f"{component}."

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Pieces:
        with closing(self.inner.pieces(bucket_bytes, lambda name: skip(self._prefix + name))) as pieces:
            for piece in pieces:
                yield None if piece is None else replace(piece, name=self._prefix + piece.name)


def renamed(specs: Iterable[Any], component: str | None) -> list[Any]:
    """Return ``specs`` under the model's names."""
    if component is None:
        return list(specs)
    return [
        msgspec.structs.replace(spec, name=f"{component}.{spec.name}")
        if isinstance(spec, TensorSpec)
        else replace(spec, name=f"{component}.{spec.name}")
        for spec in specs
    ]
