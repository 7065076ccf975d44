"""Calls of a module as recorded lists of their operations, which cost the CPU no Python between them.

A module of diffusers takes hundreds of calls of Python for each step: of small models on the CPU, that is half of the time.
torch's tracer records the operations of one call, and its interpreter runs them again with other values.

Invariants:
- A recording serves a shape and a number of rows only after it has made the same bits there as the module itself. What cannot be
  recorded, or differs, is computed by the module as before.
- Weights are arguments of a recording, never constants in it: what an update writes holds for the next step, and two that are
  equal while it is made stay two.
- Nothing is optimised: operations, their order and their arguments are the module's.
- Recordings are for calls whose operations follow from shapes alone (:meth:`~.family.Family.follows_values`), and for modules that
  are on the device as a whole: a recording calls no block, and nobody brings the next one.
- Recording goes on in slices beside the steps that come meanwhile, so that no pause waits for all of it.
- A recording that is dropped gives its memory back: none is known to torch's own table of functions, which keeps all for ever.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.self_test import failure
from .family import Embeds, Family
from .sliced import Sliced

logger = logging.getLogger(__name__)

RECORD_AFTER = 16
"""Calls of a shape after which its operations are recorded, which takes as long as a dozen of them."""
WORTH_S = 0.05
"""Calls of the module that take longer than this gain little from a recording."""
SLICE = 0.25
"""Of a call: how long recording goes on beside each."""
_MOST_SHAPES = 32
"""Recordings that are kept: those that served last."""

Call = Callable[..., Tensor]


@dataclass(slots=True)
class _Shape:
    """Everything of a call but its rows."""

    calls: int = 0
    fastest_s: float = inf
    """Of the module's calls, whatever their rows."""
    recording: Call | None = None
    agrees: dict[int, bool] = field(default_factory=dict)
    """Number of rows to whether the recording makes what the module makes."""
    failed: bool = False
    """Its operations cannot be recorded."""


class Recorded:
    """Calls of one module, recorded where that is possible and sure."""

    def __init__(self, what: str, module: nn.Module) -> None:
        """``what`` is for the log."""
        self._what = what
        self._module = module
        self._weights = (*module.parameters(), *module.buffers())
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._under_way: tuple[_Shape, Sliced[Call]] | None = None

    def __call__(self, call: Call, inputs: tuple[Tensor, ...], fixed: Hashable) -> Tensor:
        """``call(*inputs)``, which computes with the module.

        Args:
            inputs: [rows, …] each.
            fixed: what ``call`` follows from besides: two calls with the same are the same function.
        """
        shape, rows = self._shape_of(inputs, fixed), len(inputs[0])
        self._proceed()
        if shape.agrees.get(rows):
            assert shape.recording is not None
            return _run(shape.recording, (*inputs, *self._weights))
        began = monotonic()
        made = call(*inputs)
        shape.fastest_s = min(shape.fastest_s, monotonic() - began)
        shape.calls += 1
        if shape.recording is not None:
            if rows not in shape.agrees:
                self._compare(shape, inputs, made)
        elif shape.calls >= RECORD_AFTER and shape.fastest_s < WORTH_S and not shape.failed:
            self._begin(shape, call, inputs)
        return made

    def _shape_of(self, inputs: tuple[Tensor, ...], fixed: Hashable) -> _Shape:
        key = (fixed, *((each.shape[1:], each.dtype) for each in inputs))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape()
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return shape

    def _begin(self, shape: _Shape, call: Call, inputs: tuple[Tensor, ...]) -> None:
        if self._under_way is None:
            module, arguments = self._module, (*inputs, *self._weights)
            self._under_way = (
                shape,
                Sliced(lambda rest: _record(call, arguments, len(inputs), module, rest)),
            )

    def _proceed(self) -> None:
        """Go on with the recording that is under way, of whatever shape."""
        if self._under_way is None:
            return
        shape, recording = self._under_way
        if not recording.proceed(SLICE * shape.fastest_s):
            return
        self._under_way = None

        def taken() -> Iterator[float]:
            shape.recording = recording.result()
            yield 0.0

        reason = failure(taken, 0.0, f"recording {self._what}")
        shape.failed = reason is not None
        if reason is not None:
            logger.info("%s: its module computes these calls", reason)

    def _compare(self, shape: _Shape, inputs: tuple[Tensor, ...], made: Tensor) -> None:
        """With what the module ``made``."""

        def attempt() -> Iterator[float]:
            assert shape.recording is not None
            found = _run(shape.recording, (*inputs, *self._weights))
            yield 0.0 if _same_bits(found, made) else float((found - made).abs().max())

        reason = failure(attempt, 0.0, f"a recording of {self._what} for {len(made)} rows")
        shape.agrees[len(made)] = reason is None
        if reason is not None:
            logger.info("%s: its module computes these calls", reason)


class Velocity:
    """:meth:`Family.velocity`, recorded where that is possible and sure."""

    def __init__(self, family: Family, *, records: bool) -> None:
        self._family = family
        self._recorded = Recorded("the transformer", family.transformer) if records else None

    def __call__(
        self, x: Tensor, sigma: Tensor, embeds: Embeds, guidance: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """See :meth:`Family.velocity`."""
        family = self._family
        if self._recorded is None or family.follows_values(embeds):
            return family.velocity(x, sigma, embeds, guidance, size)
        names = tuple(embeds)

        def call(x: Tensor, sigma: Tensor, guidance: Tensor, *embeds: Tensor) -> Tensor:
            return family.velocity(x, sigma, dict(zip(names, embeds, strict=True)), guidance, size)

        return self._recorded(call, (x, sigma, guidance, *embeds.values()), (names, size))


class Images:
    """:meth:`Family.decode`, recorded where that is possible and sure."""

    def __init__(self, family: Family, *, records: bool) -> None:
        self._family = family
        self._recorded = Recorded("the VAE", family.vae) if records else None

    def __call__(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """See :meth:`Family.decode`."""
        family = self._family
        if self._recorded is None:
            return family.decode(latents, size)
        return self._recorded(lambda latents: family.decode(latents, size), (latents,), size)


def _record(
    call: Call, arguments: tuple[Tensor, ...], inputs: int, module: nn.Module, rest: Callable[[], None]
) -> Call:
    """The operations of ``call``, whose first ``inputs`` arguments it is given, and the others are the weights of ``module``."""
    # Of Python values that become constants: comparing what comes out for every shape is the answer to those. Others see the
    # filters, too, so they are not put back while they may have added theirs; nobody else has warnings of this kind.
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # type: ignore[attr-defined]
    with ExitStack() as hooks, torch.inference_mode():
        for each in module.modules():
            hooks.callback(each.register_forward_pre_hook(lambda *_: rest()).remove)
        graph, _ = torch._C._create_graph_by_tracing(
            lambda *given: call(*given[:inputs]), arguments, lambda _: "", False, False
        )
    rest()
    made: Any = torch._C._create_function_from_graph("recorded", graph)
    rest()
    # The interpreter prepares at the first call: arguments without elements end that at its first operation.
    with suppress(RuntimeError, IndexError, TypeError, ValueError):
        _run(made, (torch.empty(0),) * len(arguments))
    found: Call = made
    return found


def _run(recording: Call, inputs: tuple[Tensor, ...]) -> Tensor:
    # Fusions would change bits, and passes take longer than they give back.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return recording(*inputs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
