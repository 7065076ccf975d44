"""Models of several components: which one a call writes, and its tensors under the model's names for them.

Invariant: a tensor of a component is known as ``component.name`` everywhere but on the wire and in files, where the call says the
component once.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ..memory.workspace import Workspace
from .loader import WeightLoader
from .pieces import WeightPiece
from .source import WeightSource
from .transports.disk import Checkpoint, DiskSource


def chosen(known: tuple[str, ...], named: str | None) -> str | None:
    """The component that a call writes which names ``named``; None for a model of one piece.

    Raises:
        CaesuraError: ``invalid_request``, the model has no such component.
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
    """``source`` under the model's names."""
    return source if component is None else ComponentSource(source, component)


def component_of(source: WeightSource) -> str | None:
    """The component that ``source`` writes; None for a model of one piece."""
    return source.component if isinstance(source, ComponentSource) else None


def fitting(
    checkpoint: Checkpoint, component: str | None, loader: WeightLoader, workspace: Workspace
) -> DiskSource:
    """The source of a complete update from ``checkpoint``, checked in all that can be known before its first byte.

    Raises:
        CaesuraError: ``weight_mismatch`` with what differs.
    """
    loader.check(renamed(checkpoint.specs, component), complete=True)
    return DiskSource(checkpoint, workspace, loader.owned)


class ComponentSource:
    """Tensors of one component of a model, under the names that the model has for them."""

    def __init__(self, inner: WeightSource, component: str) -> None:
        self.inner = inner
        self.component = component
        self.name, self.total_bytes, self.complete = inner.name, inner.total_bytes, inner.complete
        self.specs = renamed(inner.specs, component)
        self._prefix = f"{component}."

    def pieces(
        self, bucket_bytes: int, skip: Callable[[str], bool]
    ) -> Generator[WeightPiece | None, None, None]:
        """Those of the inner source."""
        with closing(self.inner.pieces(bucket_bytes, lambda name: skip(self._prefix + name))) as pieces:
            for piece in pieces:
                yield None if piece is None else replace(piece, name=self._prefix + piece.name)


def renamed(specs: Iterable[Any], component: str | None) -> list[Any]:
    """``specs``, that came by the wire or from a file, under the model's names."""
    if component is None:
        return list(specs)
    return [
        msgspec.structs.replace(spec, name=f"{component}.{spec.name}")
        if isinstance(spec, TensorSpec)
        else replace(spec, name=f"{component}.{spec.name}")
        for spec in specs
    ]
