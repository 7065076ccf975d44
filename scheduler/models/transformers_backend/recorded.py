"""Recording a decoder of transformers, and its head: which of their parts are the engine's, and runs at several T.

Invariant: what stands in for a part while recording is gone when the recording ends, however it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ...kernels.attention_form import AttentionForm
from .attention import attend
from .experts import Computed
from .norms import Norm
from .probe import FOREIGN_FAILURES, Probe
from .products import GatheredEmbedding, Given, Head, PartOfProduct, Product, SharedProduct
from .recording import Fit, NotRecordableError, Recorder, Recording

IDS, POSITIONS, BACKEND = "ids", "positions", "backend"
"""Inputs of a decoder's recording."""
HIDDEN, OUT = "hidden", "out"
"""Of a head's."""
_SIZES = (7, 11, 1)
_NAME = "caesura_recorder"


@dataclass(frozen=True, slots=True)
class _Running:
    recorder: Recorder
    last: Tensor
    """The last input: what stands for the backend, or where logits go."""
    forms: Sequence[AttentionForm]
    head_size: int


_running: ContextVar[_Running] = ContextVar("running")


def record(
    module: PreTrainedModel,
    decoder: nn.Module,
    probe: Probe,
    norms: dict[nn.Module, Norm],
    forms: Sequence[AttentionForm],
    head_size: int,
    device: torch.device,
) -> Recording:
    """The calls of ``decoder``, a part of ``module`` with its parameters in their places.

    Args:
        norms: modules that a kernel stands in for.
        forms: of each layer's attention.
        head_size: of the pool's keys and values.

    Raises:
        NotRecordableError: no list of calls repeats what it does.
    """
    runs, outs = [], []
    with _parts_stand_aside(module, decoder, probe, norms), torch.inference_mode(False), torch.no_grad():
        for size in _SIZES:
            ids = torch.zeros(size, dtype=torch.int64, device=device)
            positions = torch.arange(size, device=device)
            backend = torch.empty(0)  # stands for the backend, which is an input like the others
            recorder = Recorder((ids, positions, backend))
            known = _running.set(_Running(recorder, backend, forms, head_size))
            try:
                with recorder:
                    found = decoder(
                        input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
                    )
                    outs.append(found.last_hidden_state[0])
            except FOREIGN_FAILURES as error:
                raise NotRecordableError(f"its forward fails while it is recorded: {error}") from error
            finally:
                _running.reset(known)
            runs.append(recorder)
    return Fit(_SIZES, runs).recording((IDS, POSITIONS, BACKEND), outs)


def record_head(headed: Any, given: Given, head: Head, dtype: torch.dtype, hidden_size: int) -> Recording:
    """The calls that make logits of hidden states, into memory that is given: of ``headed``, whose decoder is ``given``.

    Raises:
        NotRecordableError: no list of calls repeats what it does.
    """
    runs, outs = [], []
    with torch.inference_mode(False), torch.no_grad():
        for size in _SIZES:
            hidden, out = (
                torch.ones((size, hidden_size), dtype=dtype),
                torch.ones((size, head.out_features), dtype=dtype),
            )
            recorder = Recorder((hidden, out))
            known = _running.set(_Running(recorder, out, (), 0))
            head.__dict__["forward"] = _Projected(head)
            try:
                ids = torch.zeros((1, size), dtype=torch.int64)
                with recorder:
                    given.hidden = hidden.unsqueeze(0)
                    outs.append(headed(input_ids=ids, use_cache=False).logits[0])
            except FOREIGN_FAILURES as error:
                raise NotRecordableError(f"its head fails while it is recorded: {error}") from error
            finally:
                del head.__dict__["forward"]
                given.hidden = None
                _running.reset(known)
            runs.append(recorder)
    return Fit(_SIZES, runs).recording((HIDDEN, OUT), outs)


@contextmanager
def _parts_stand_aside(
    module: PreTrainedModel, decoder: nn.Module, probe: Probe, norms: dict[nn.Module, Norm]
) -> Iterator[None]:
    """Within the block, parts of the engine's note that they were called."""
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def put(owner: dict[str, Any], name: str, value: Any) -> None:
        changed.append((owner, name, owner.get(name)))
        owner[name] = value

    shared: dict[SharedProduct, _Shared] = {}
    for each in decoder.modules():
        if isinstance(each, Product):
            put(each.__dict__, "forward", _Multiplied(each))
        elif isinstance(each, PartOfProduct):
            put(each.__dict__, "forward", shared.setdefault(each.shared, _Shared(each.shared)).of(each))
        elif isinstance(each, GatheredEmbedding):
            put(each.__dict__, "table", _Gathered(each))
        elif each in norms:
            put(each.__dict__, "forward", _Normalised(each.forward, norms[each]))
        if (computed := each.__dict__.get(Computed.ATTRIBUTE)) is not None:
            put(each.__dict__, Computed.ATTRIBUTE, _Chosen(computed))
    hooks = [layer.register_forward_pre_hook(_stop(number)) for number, layer in enumerate(probe.layers)]
    config: Any = module.config
    before, config._attn_implementation = config._attn_implementation, _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()
        for owner, name, value in changed:
            if value is None:
                del owner[name]
            else:
                owner[name] = value


def _stop(number: int) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        _running.get().recorder.leaf(number, (), result=None, kind="layer", detail=number)  # type: ignore[arg-type]

    return hook


class _Multiplied:
    """A product is noted."""

    def __init__(self, product: Product) -> None:
        self._linear = product.linear

    def __call__(self, x: Tensor) -> Tensor:
        return _product(self._linear, x)


def _product(linear: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, linear.in_features)
    out = _running.get().recorder.leaf(
        linear.forward,
        (rows,),
        result=lambda: torch.empty(
            (rows.shape[0], linear.out_features), dtype=rows.dtype, device=rows.device
        ),
        kind="product",
        detail=linear,
    )
    made: Tensor = out.view(*x.shape[:-1], linear.out_features)
    return made


class _Shared:
    """A product of several parts is noted once for an input."""

    def __init__(self, shared: SharedProduct) -> None:
        self._shared = shared
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def of(self, part: PartOfProduct) -> Callable[[Tensor], Tensor]:
        """What stands for one of them."""

        def forward(x: Tensor) -> Tensor:
            if self._x is not x:
                self._x = x
                product = _product(self._shared.linear, x)
                self._parts = torch.split_with_sizes(product, self._shared.parts, dim=-1)
            return self._parts[part.number]

        return forward


class _Projected:
    """A head's product is noted."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, x: Tensor) -> Tensor:
        running, rows = _running.get(), x[0]
        made: Tensor = running.recorder.leaf(
            self._head.project,
            (rows, running.last),
            result=lambda: torch.ones((rows.shape[0], self._head.out_features), dtype=rows.dtype),
            kind="head",
        )
        return made.unsqueeze(0)


class _Gathered:
    """An embedding is noted."""

    def __init__(self, module: GatheredEmbedding) -> None:
        self._table, self._size, self._dtype = module.table, module.embedding_dim, module.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = _running.get().recorder.leaf(
            self._table.forward,
            (ids,),
            result=lambda: torch.empty((ids.shape[0], self._size), dtype=self._dtype, device=ids.device),
            kind="gather",
        )
        return out


class _Normalised:
    """A norm that a kernel computes is noted as such."""

    def __init__(self, forward: Callable[[Tensor], Tensor], norm: Norm) -> None:
        self._forward, self._norm = forward, norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if x.dtype != norm.weight.dtype or x.shape[-1] != norm.weight.shape[0]:
            return self._forward(x)
        rows = x.reshape(-1, norm.weight.shape[0])
        if rows.stride(-1) != 1:
            return self._forward(x)
        out = _running.get().recorder.leaf(
            norm.compute,
            (rows, norm.weight, norm.eps),
            {"from_one": norm.from_one},
            result=lambda: torch.empty(rows.shape, dtype=rows.dtype, device=rows.device),
            kind="norm",
            detail=norm,
        )
        made: Tensor = out.view(x.shape)
        return made


class _Chosen:
    """Experts are noted."""

    def __init__(self, computed: Computed) -> None:
        self._computed = computed

    def __call__(self, module: nn.Module, hidden: Tensor, *args: Any) -> Tensor:
        out: Tensor = _running.get().recorder.leaf(
            self._computed, (module, hidden, *args), result=lambda: torch.empty_like(hidden), kind="experts"
        )
        return out


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    running, layer = _running.get(), module.layer_idx
    shape = (1, query.shape[2], query.shape[1], value.shape[3])
    out = running.recorder.leaf(
        attend,
        (running.last, query, key, value, layer, running.forms[layer], running.head_size),
        result=lambda: torch.empty(shape, dtype=query.dtype, device=query.device),
        kind="attend",
        detail=layer,
    )
    return out, None


AttentionInterface.register(_NAME, _attend)
