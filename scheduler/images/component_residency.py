"""Which components the steps of each kind need, and when those not always on the device come and go.

A *stage* is a stretch of steps of one kind. Components with a strategy come before its first step, each step
uses them, and they leave before the next stage, or when no sample is left.

Invariants:
- A step finds its components on the device, also after a release of memory in between.
- What only steps of another kind need leaves at the border between stages, not between two steps of one kind.
- Nothing here empties the device cache: the residency manager does.
"""

from collections.abc import Mapping

from ...io_struct import Residency
from ..memory.host_copy import exhaust
from ..memory.offload import ComponentOffloadStrategy, LayerwiseOffloadStrategy, Strategy
from ..memory.residency import ComponentResidencyManager
from ..observability.stage_profiler import StageProfiler
from ..runtime.config import EngineConfig
from .batcher import Kind
from .components import Blocks

_STRATEGIES: dict[Residency, Strategy] = {
    "offload": ComponentOffloadStrategy(),
    "layerwise": LayerwiseOffloadStrategy(),
}


def strategy_of(name: str, config: EngineConfig) -> Strategy | None:
    transformer = name == "transformer"
    return _STRATEGIES.get(config.transformer_residency if transformer else config.frozen_residency)


def kind_using(component: str) -> Kind:
    if component.startswith("text_encoder"):
        return "encode"
    return "decode" if component == "vae" else "denoise"


class ComponentStages:
    def __init__(
        self, residency: ComponentResidencyManager, movable: Mapping[str, Blocks | None], times: StageProfiler
    ) -> None:
        """``movable``: components with a strategy, with the blocks of those that are there layer by layer."""
        self._residency = residency
        self._times = times
        self._blocks = movable
        self._used: dict[Kind, list[str]] = {"encode": [], "denoise": [], "decode": []}
        for name in movable:
            self._used[kind_using(name)].append(name)
        self._kind: Kind | None = None

    def comes_in_blocks(self, component: str) -> bool:
        return self._blocks.get(component) is not None

    def enter(self, kind: Kind) -> None:
        """Prepare a step of ``kind``; CaesuraError ``out_of_memory``: a component does not fit."""
        if not self._blocks:
            return
        if kind == self._kind:
            self._use(kind)
            return
        self.leave()
        self._kind = kind
        if self._used[kind]:
            with self._times.stage("components.arrive"):
                exhaust(self._residency.bring(self._used[kind]))
        self._use(kind)

    def leave(self) -> None:
        """End the stage: no step of its kind comes next."""
        if self._kind is None:
            return
        kind, self._kind = self._kind, None
        if self._used[kind]:
            with self._times.stage("components.leave"):
                exhaust(self._residency.leave(self._used[kind]))

    def _use(self, kind: Kind) -> None:
        for name in self._used[kind]:
            at_layer = self._residency.use(name)
            if (blocks := self._blocks[name]) is not None:
                blocks.before = at_layer
