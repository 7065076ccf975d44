"""Which components the steps of each kind need, and when those that are not always on the device come and go.

Invariants:
- A step finds its components on the device, also after a release of memory in between.
- What only steps of another kind need leaves at the border between kinds, not between two steps of one kind.
- The transformer is the policy: it is always on the device, and is all that updates write where the others come and go.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..memory.residency import ComponentResidencyManager, ComponentUse
from .batcher import Kind

_LOADING = "load_pipeline"


def uses_of(components: Iterable[str]) -> dict[Kind, list[ComponentUse]]:
    """What each kind of step uses of ``components`` that come and go."""
    uses = {name: ComponentUse(name=name, memory_intensive=True) for name in components}
    return {
        "encode": [use for name, use in uses.items() if name.startswith("text_encoder")],
        "denoise": [],
        "decode": [use for name, use in uses.items() if name == "vae"],
    }


class Stages:
    """Follows the kinds of steps."""

    def __init__(
        self, residency: ComponentResidencyManager, uses: Mapping[Kind, Sequence[ComponentUse]]
    ) -> None:
        self._residency = residency
        self._uses = uses
        self._moves = any(uses.values())
        self._kind: Kind | None = None

    def enter(self, kind: Kind) -> None:
        """Before a step of ``kind`` is executed.

        Raises:
            CaesuraError: ``out_of_memory``, a component does not fit.
        """
        if not self._moves:
            return
        if kind != self._kind:
            self._leave()
            self._kind = kind
            self._residency.begin_request(kind)
        for use in self._uses[kind]:
            self._residency.use(kind, use)

    def _leave(self) -> None:
        if self._kind is None:
            return
        for use in self._uses[self._kind]:
            _exhaust(self._residency.finish_use(use))
        _exhaust(self._residency.finish_request(self._kind))
        self._kind = None


def leave_after_loading(residency: ComponentResidencyManager, name: str) -> None:
    """A component has its values, and nobody uses it yet."""
    use = ComponentUse(name=name, memory_intensive=True)
    residency.begin_request(_LOADING)
    residency.use(_LOADING, use)
    _exhaust(residency.finish_use(use))
    _exhaust(residency.finish_request(_LOADING))


def _exhaust(steps: Iterable[Any]) -> None:
    for _ in steps:
        pass
