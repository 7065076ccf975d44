"""Which components the steps of each kind need, and when those not always on the device come and go.

A *stage* is a stretch of steps of one kind. Components with a strategy come before its first step, each step
uses them, and they leave before the next stage, or when no sample is left.

Invariants:
- A step finds its components on the device, also after a release of memory in between.
- What only steps of another kind need leaves at the border between stages, not between two steps of one kind.
- Nothing here empties the device cache: the residency manager does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...io_struct import Residency
from ..memory.offload import ComponentOffloadStrategy, LayerwiseOffloadStrategy, Strategy
from ..memory.residency import ComponentResidencyManager, ComponentUse
from ..observability.stage_profiler import StageProfiler
from ..runtime.config import EngineConfig
from .components import Blocks
from .request import Kind

_LOADING = "load_pipeline"
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
        # A window of blocks leaves as many holes in the allocator as a large component: the manager cannot
        # tell by size.
        self._uses: dict[Kind, list[ComponentUse]] = {"encode": [], "denoise": [], "decode": []}
        for name, blocks in movable.items():
            use = ComponentUse(name=name)
            self._uses[kind_using(name)].append(replace(use, memory_intensive=blocks is not None))
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
        self._residency.begin_request(kind)
        if self._uses[kind]:
            with self._times.stage("components.arrive"):
                _exhaust(self._residency.before_stage(kind, self._uses[kind]))
        self._use(kind)

    def leave(self) -> None:
        """End the stage: no step of its kind comes next."""
        if self._kind is None:
            return
        kind, self._kind = self._kind, None
        uses = self._uses[kind]
        if not uses:
            _exhaust(self._residency.finish_request(kind))
            return
        with self._times.stage("components.leave"):
            for use in uses:
                _exhaust(self._residency.finish_use(use))
            _exhaust(self._residency.finish_request(kind))

    def _use(self, kind: Kind) -> None:
        for use in self._uses[kind]:
            at_layer = self._residency.use(kind, use)
            if (blocks := self._blocks[use.name]) is not None:
                blocks.before = at_layer


def leave_after_loading(residency: ComponentResidencyManager, name: str) -> None:
    """Have a component that has its values, and that nobody uses yet, leave the device."""
    use = ComponentUse(name=name)
    residency.begin_request(_LOADING)
    residency.use(_LOADING, use)
    _exhaust(residency.finish_use(use))
    _exhaust(residency.finish_request(_LOADING))


def _exhaust(steps: Iterable[Any]) -> None:
    for _ in steps:
        pass
