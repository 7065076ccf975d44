"""A transformer's call as a recorded list of its operations, which costs the CPU no Python between them.

A module of diffusers takes hundreds of calls of Python for each step: of small models on the CPU, that is half of the time.
``torch.jit.trace`` records the operations of one call, and runs them again with other values.

Invariants:
- A recording serves a shape and a number of rows only after it has made the same bits there as the module itself. What cannot be
  recorded, or differs, is computed by the module as before.
- Weights are read where they lie: what an update writes holds for the next step.
- Nothing is optimised: operations, their order and their arguments are the module's.
- Recordings are for calls whose operations follow from shapes alone (:meth:`~.family.Family.follows_values`), and for transformers
  that are on the device as a whole: a recording calls no block, and nobody brings the next one.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.trial import failure
from .family import Embeds, Family

logger = logging.getLogger(__name__)

RECORD_AFTER = 16
"""Steps of a shape after which its operations are recorded, which takes as long as dozens of small steps."""
WORTH_S = 0.05
"""Calls of the module that take longer than this gain little, and recording them would hold the loop for long."""
_MOST_SHAPES = 32
"""Recordings that are kept: those that served last."""

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Shape:
    """Everything of a call but its rows."""

    steps: int = 0
    fastest_s: float = inf
    """Of the module's calls, whatever their rows."""
    recording: Callable[..., Tensor] | None = None
    agrees: dict[int, bool] = field(default_factory=dict)
    """Number of rows to whether the recording makes what the module makes."""
    failed: bool = False
    """Its operations cannot be recorded."""


class Velocity:
    """:meth:`Family.velocity`, recorded where that is possible and sure."""

    def __init__(self, family: Family, *, records: bool) -> None:
        self._family = family
        self._records = records
        self._shapes: OrderedDict[_Key, _Shape] = OrderedDict()

    def __call__(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """See :meth:`Family.velocity`."""
        family = self._family
        if not self._records or family.follows_values(embeds):
            return family.velocity(x, sigma, embeds, guidance, size)
        shape = self._shape_of(x, embeds, size)
        inputs = (x, sigma, guidance, *embeds.values())
        if shape.agrees.get(len(x)):
            assert shape.recording is not None
            return _run(shape.recording, inputs)
        began = monotonic()
        made = family.velocity(x, sigma, embeds, guidance, size)
        shape.fastest_s = min(shape.fastest_s, monotonic() - began)
        shape.steps += 1
        due = shape.steps >= RECORD_AFTER and shape.fastest_s < WORTH_S
        if due and not shape.failed and len(x) not in shape.agrees:
            self._try(shape, inputs, list(embeds), size, made)
        return made

    def _shape_of(self, x: Tensor, embeds: Embeds, size: tuple[int, int]) -> _Shape:
        key = (x.shape[1:], size, *((name, each.shape[1:], each.dtype) for name, each in embeds.items()))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape()
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return shape

    def _try(
        self, shape: _Shape, inputs: tuple[Tensor, ...], names: list[str], size: tuple[int, int], made: Tensor
    ) -> None:
        """Record unless that was done, and compare with what the module ``made``."""
        recorded = shape.recording is not None

        def attempt() -> Iterator[float]:
            if shape.recording is None:
                shape.recording = _record(_Call(self._family, names, size), inputs)
            found = _run(shape.recording, inputs)
            yield 0.0 if _same_bits(found, made) else float((found - made).abs().max())

        reason = failure(attempt, 0.0, f"a recording of the transformer for {len(made)} rows")
        shape.agrees[len(made)] = reason is None
        shape.failed = reason is not None and not recorded
        if reason is not None:
            logger.info("%s: its module computes these steps", reason)


class _Call(nn.Module):
    """A call with tensors for arguments; a module, so that weights are its attributes and no constants."""

    def __init__(self, family: Family, names: list[str], size: tuple[int, int]) -> None:
        super().__init__()
        self.transformer = family.transformer
        self._velocity = family.velocity
        self._names, self._size = names, size

    def forward(self, x: Tensor, sigma: Tensor, guidance: Tensor, *embeds: Tensor) -> Tensor:
        """In the order of :class:`Velocity`'s inputs."""
        return self._velocity(x, sigma, dict(zip(self._names, embeds, strict=True)), guidance, self._size)


def _record(call: _Call, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        # Of Python values that become constants: comparing what comes out of every shape is the answer to those.
        warnings.simplefilter("ignore")
        recording: Any = torch.jit.trace(call.eval(), inputs, check_trace=False)
    found: Callable[..., Tensor] = recording
    return found


def _run(recording: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    # Fusions would change bits, and passes take longer than they give back.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return recording(*inputs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
