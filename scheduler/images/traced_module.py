"""Calls of a module as traces, which cost the CPU none of the module's Python.

A module of diffusers takes hundreds of calls of Python for each step: of small models on the CPU, that is
half of the time.

Invariants:
- A trace serves a shape only after it has made the same bits there as the module itself. What cannot be
  traced, or differs, is computed by the module as before.
- Weights are read by every call: what an update writes holds for the next step.
- A module that comes to the device block by block is not traced: nobody would bring the next block.
- The call that is traced is a step like any other; noting it takes a few times as long as the call.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from time import monotonic

import torch
from torch import Tensor, nn

from ..kernels.self_test import failure
from ..tracing import Tracer, compiled, fold_constants, tidy
from .image_request import Embeds
from .pipeline_family import Family

logger = logging.getLogger(__name__)

TRACE_AFTER = 16
"""Calls of a shape after which one is traced, which takes as long as a dozen of them."""
WORTH_S = 0.05
"""Seconds of a call above which the module's Python matters little."""
MAX_SHAPES = 64
"""Traces that are kept: those that served last."""


@dataclass(slots=True)
class _Shape:
    calls: int = 0
    fastest_s: float = inf
    program: Callable[..., Tensor] | None = None
    agrees: bool | None = None
    """The program makes what the module makes; None if nothing is known yet."""


class TracedModule:
    def __init__(self, what: str, module: nn.Module) -> None:
        self.shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._what = what
        self._weights = (*module.parameters(), *module.buffers())

    def __call__(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], fixed: Hashable) -> Tensor:
        """Return ``call(*inputs)``, which computes with the module and follows from ``fixed`` besides."""
        shape = self._shape_of(inputs, fixed)
        if shape.agrees:
            assert shape.program is not None
            return shape.program(*inputs, 0)
        untried = shape.agrees is None and shape.program is None
        if untried and shape.calls >= TRACE_AFTER and shape.fastest_s < WORTH_S:
            return self._traced(shape, call, inputs)
        began = monotonic()
        made = call(*inputs)
        shape.fastest_s = min(shape.fastest_s, monotonic() - began)
        shape.calls += 1
        if shape.agrees is None and shape.program is not None:
            self._compare(shape, inputs, made)
        return made

    def _shape_of(self, inputs: tuple[Tensor, ...], fixed: Hashable) -> _Shape:
        key = (fixed, *((each.shape, each.dtype) for each in inputs))
        shape = self.shapes.setdefault(key, _Shape())
        if len(self.shapes) > MAX_SHAPES:
            self.shapes.popitem(last=False)
        self.shapes.move_to_end(key)
        return shape

    def _traced(self, shape: _Shape, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        made: list[Tensor] = []

        def attempt() -> Iterator[float]:
            # Tensors of inference mode do not tell when they are written to.
            with torch.inference_mode(False), torch.no_grad():
                given = [each.clone() for each in inputs]
                tracer = Tracer({f"x{number}": each for number, each in enumerate(given)})
                with tracer:
                    made.append(call(*given))
            trace = tracer.trace(made[0])
            tidy(trace)
            fold_constants(trace, tracer.tensors, self._weights)
            shape.program = compiled(trace.calls, trace.inputs, [trace.out])
            yield 0.0

        if not _holds(attempt, f"tracing {self._what}"):
            shape.agrees = False
        return made[0] if made else call(*inputs)

    def _compare(self, shape: _Shape, inputs: tuple[Tensor, ...], made: Tensor) -> None:
        def attempt() -> Iterator[float]:
            assert shape.program is not None
            found = shape.program(*inputs, 0)
            bits = [each.contiguous().view(torch.uint8) for each in (found, made)]
            same = found.dtype == made.dtype and torch.equal(*bits)
            yield 0.0 if same else float((found - made).abs().max())

        shape.agrees = _holds(attempt, f"a trace of {self._what} for {len(made)} rows")


def _holds(attempt: Callable[[], Iterable[float]], what: str) -> bool:
    reason = failure(attempt, 0.0, what)
    if reason is not None:
        logger.info("%s: its module computes these calls", reason)
    return reason is None


def traced_velocity(
    family: Family,
    traced: TracedModule,
    x: Tensor,
    sigma: Tensor,
    embeds: Embeds,
    guidance: Tensor,
    size: tuple[int, int],
) -> Tensor:
    names = tuple(embeds)

    def call(x: Tensor, sigma: Tensor, guidance: Tensor, *embeds: Tensor) -> Tensor:
        return family.velocity(x, sigma, dict(zip(names, embeds, strict=True)), guidance, size)

    return traced(call, (x, sigma, guidance, *embeds.values()), (names, size))


def traced_decode(family: Family, traced: TracedModule, latents: Tensor, size: tuple[int, int]) -> Tensor:
    return traced(lambda latents: family.decode(latents, size), (latents,), size)
