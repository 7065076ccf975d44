"""Tracing a decoder of transformers, and its head, with the engine's parts in them noted and not computed.

Invariant: what stands in for a part while it is traced is gone when the trace ends, however it ends.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention_form import AttentionForm
from ...tracing import NotTraceableError, Trace, Tracer, merge
from .fusion import Norm
from .interfaces import Computed, attend, attending
from .probe import FOREIGN_FAILURES, Probe
from .products import GatheredEmbedding, Given, Head, PartOfProduct, Product

logger = logging.getLogger(__name__)

_SIZES = (7, 11, 1)
"""Numbers of tokens of the traces that are merged."""


def trace_decoder(
    decoder: nn.Module,
    probe: Probe,
    norms: dict[nn.Module, Norm],
    forms: Sequence[AttentionForm],
    head_size: int,
) -> Trace | None:
    """Return the calls of ``decoder``, from token ids, positions and backend; kernels replace ``norms``."""

    def inputs(size: int) -> dict[str, Tensor]:
        positions = torch.arange(size)
        return {"ids": torch.zeros_like(positions), "positions": positions, "backend": torch.empty(0)}

    def run(tracer: Tracer, ids: Tensor, positions: Tensor, backend: Any) -> Tensor:
        def attention(backend: Any, query: Tensor, key: Tensor, value: Tensor, layer: int, *_: Any) -> Tensor:
            shape, args = (1, query.shape[2], query.shape[1], value.shape[3]), (backend, query, key, value)
            return tracer.leaf(attend, *args, layer, *_, like=query, shape=shape, kind="attend", detail=layer)

        with attending(backend, forms, head_size, attention), _noted(tracer, decoder, probe, norms), tracer:
            out = decoder(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
            last: Tensor = out.last_hidden_state[0]
            return last

    return _trace(inputs, run, f"{type(decoder).__name__} is computed by its modules")


def trace_head(headed: Any, given: Given, head: Head, dtype: torch.dtype, hidden_size: int) -> Trace | None:
    """Return the calls of ``headed``, whose decoder is ``given``, from hidden states and memory to logits."""

    def inputs(size: int) -> dict[str, Tensor]:
        widths = {"hidden": hidden_size, "out": head.out_features}
        return {name: torch.ones((size, width), dtype=dtype) for name, width in widths.items()}

    def run(tracer: Tracer, hidden: Tensor, out: Tensor) -> Tensor:
        project = partial(tracer.leaf, head.project, like=out, shape=out.shape, kind="head")
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64)
        with ExitStack() as stack:
            _put(stack, head, "project", project)
            _put(stack, head, "out", out)
            _put(stack, given, "hidden", None)
            with tracer:
                given.hidden = hidden.unsqueeze(0)
                logits: Tensor = headed(input_ids=ids, use_cache=False).logits[0]
                return logits

    return _trace(inputs, run, f"logits of {type(headed).__name__} are computed by its module")


def _trace(
    inputs: Callable[[int], dict[str, Tensor]], run: Callable[..., Tensor], otherwise: str
) -> Trace | None:
    traces = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            for size in _SIZES:
                given = inputs(size)
                tracer = Tracer(given)
                traces.append(tracer.trace(run(tracer, **given)))
        return merge(traces, _SIZES)
    except NotTraceableError as error:
        logger.info("%s: %s", otherwise, error)
    except FOREIGN_FAILURES as error:
        logger.info("%s: it fails while it is traced: %s", otherwise, error)
    return None


@contextmanager
def _noted(tracer: Tracer, decoder: nn.Module, probe: Probe, norms: dict[nn.Module, Norm]) -> Iterator[None]:
    rows: dict[Any, tuple[Tensor, int, str]] = {}
    with ExitStack() as stack:
        for each in decoder.modules():
            if isinstance(each, Product | PartOfProduct):
                linear = each.linear if isinstance(each, Product) else each.shared.linear
                rows[linear] = each.weight, linear.out_features, "product"
            elif isinstance(each, GatheredEmbedding):
                rows[each.table] = each.weight, each.embedding_dim, "gather"
            elif each in norms:
                _put(stack, each, "forward", partial(_norm, tracer, each.forward, norms[each]))
            if (computed := vars(each).get(Computed.ATTRIBUTE)) is not None:
                _put(stack, each, Computed.ATTRIBUTE, partial(_experts, tracer, computed))
        for owner, form in rows.items():
            _put(stack, owner, "forward", partial(_rows, tracer, owner, owner.forward, *form))
        for number, layer in enumerate(probe.layers):
            hook = layer.register_forward_pre_hook(lambda *_, number=number: tracer.mark("layer", number))
            stack.callback(hook.remove)
        yield


def _rows(
    tracer: Tracer, owner: Any, call: Callable[..., Tensor], like: Tensor, size: int, kind: str, x: Tensor
) -> Tensor:
    return tracer.leaf(call, x, like=like, shape=(len(x), size), kind=kind, detail=owner)


def _norm(tracer: Tracer, original: Callable[[Tensor], Tensor], norm: Norm, x: Tensor) -> Tensor:
    size = norm.weight.shape[0]
    if x.dtype != norm.weight.dtype or x.shape[-1] != size or (rows := x.reshape(-1, size)).stride(-1) != 1:
        return original(x)
    made = tracer.leaf(
        norm.compute, rows, norm.weight, norm.eps, from_one=norm.from_one,
        like=rows, shape=rows.shape, kind="norm", detail=norm,
    )  # fmt: skip
    return made.view(x.shape)


def _experts(tracer: Tracer, computed: Computed, owner: nn.Module, hidden: Tensor, *args: Any) -> Tensor:
    return tracer.leaf(computed, owner, hidden, *args, like=hidden, shape=hidden.shape, kind="experts")


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give ``owner`` another attribute until ``stack`` is closed."""
    own = vars(owner)
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name)
    own[name] = value
