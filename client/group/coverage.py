"""Whether the calls of an implicit session have written every tensor of the model, by name.

Invariant: it is a hint. Names that the engine stores otherwise than the trainer sends them are never complete here, and pieces count as
whole tensors: the commit, which every engine checks, decides.
"""

from typing import Self

from ...io_struct import WeightUpdateOptions
from ..exceptions import EngineError
from .members import Member

ASK_S = 10.0


class Coverage:
    """The tensors that no call has named yet."""

    def __init__(self, names: set[str]) -> None:
        self._left = names

    @classmethod
    async def of(cls, member: Member, component: str | None) -> Self | None:
        """Of the model of ``member``; None: it does not say what it has."""
        try:
            manifest = await member.client.weights_manifest(component=component, timeout=ASK_S)
        except EngineError:
            return None
        return cls({tensor.name for tensor in manifest.tensors})

    def is_complete_with(self, request: WeightUpdateOptions) -> bool:
        """Whether nothing is left after ``request``."""
        self._left -= {spec.name for spec in getattr(request, "specs", ())}
        return not self._left
