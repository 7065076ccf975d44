"""Tracing a decoder of transformers, and its head, with the engine's parts in them noted and not computed.

Invariant: what stands in for a part while it is traced is gone when the trace ends, however it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention_form import AttentionForm
from ...layers.linear import Linear
from ...tracing import NotTraceableError, Trace, Tracer, merge
from .fusion import Norm
from .interfaces import Computed, attend, attending
from .probe import FOREIGN_FAILURES, Probe
from .products import GatheredEmbedding, Given, Head, PartOfProduct, Product

_SIZES = (7, 11, 1)
"""Numbers of tokens of the traces that are merged."""


def trace_decoder(
    decoder: nn.Module,
    probe: Probe,
    norms: dict[nn.Module, Norm],
    forms: Sequence[AttentionForm],
    head_size: int,
    device: torch.device,
) -> Trace:
    """Return the calls of ``decoder``, from token ids, positions and backend; kernels replace ``norms``."""

    def inputs(size: int) -> dict[str, Tensor]:
        positions = torch.arange(size, device=device)
        return {"ids": torch.zeros_like(positions), "positions": positions, "backend": torch.empty(0)}

    def run(tracer: Tracer, ids: Tensor, positions: Tensor, backend: Any) -> Tensor:
        def attention(backend: Any, query: Tensor, key: Tensor, value: Tensor, layer: int, *_: Any) -> Tensor:
            shape, args = (1, query.shape[2], query.shape[1], value.shape[3]), (backend, query, key, value)
            return tracer.leaf(attend, *args, layer, *_, like=query, shape=shape, kind="attend", detail=layer)

        with attending(backend, forms, head_size, attention), _noted(tracer, decoder, probe, norms), tracer:
            out = decoder(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
            last: Tensor = out.last_hidden_state[0]
            return last

    return _trace(inputs, run)


def trace_head(headed: Any, given: Given, head: Head, dtype: torch.dtype, hidden_size: int) -> Trace:
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

    return _trace(inputs, run)


def _trace(inputs: Callable[[int], dict[str, Tensor]], run: Callable[..., Tensor]) -> Trace:
    traces = []
    with torch.inference_mode(False), torch.no_grad():
        for size in _SIZES:
            given = inputs(size)
            tracer = Tracer(given)
            try:
                traces.append(tracer.trace(run(tracer, **given)))
            except FOREIGN_FAILURES as error:
                raise NotTraceableError(f"it fails while it is traced: {error}") from error
    return merge(traces, _SIZES)


@contextmanager
def _noted(tracer: Tracer, decoder: nn.Module, probe: Probe, norms: dict[nn.Module, Norm]) -> Iterator[None]:
    linears: set[Linear] = set()
    with ExitStack() as stack:
        for each in decoder.modules():
            if isinstance(each, Product):
                linears.add(each.linear)
            elif isinstance(each, PartOfProduct):
                linears.add(each.shared.linear)
            elif isinstance(each, GatheredEmbedding):
                gather = partial(_gather, tracer, each.table.forward, each.weight, each.embedding_dim)
                _put(stack, each.table, "forward", gather)
            elif each in norms:
                _put(stack, each, "forward", partial(_norm, tracer, each.forward, norms[each]))
            if (computed := vars(each).get(Computed.ATTRIBUTE)) is not None:
                _put(stack, each, Computed.ATTRIBUTE, partial(_experts, tracer, computed))
        for linear in linears:
            _put(stack, linear, "forward", partial(_product, tracer, linear, linear.forward))
        for number, layer in enumerate(probe.layers):
            stack.callback(layer.register_forward_pre_hook(partial(_mark, tracer, number)).remove)
        yield


def _product(tracer: Tracer, linear: Linear, call: Callable[..., Tensor], x: Tensor) -> Tensor:
    shape = (len(x), linear.out_features)
    return tracer.leaf(call, x, like=x, shape=shape, kind="product", detail=linear)


def _gather(tracer: Tracer, call: Callable[..., Tensor], like: Tensor, size: int, ids: Tensor) -> Tensor:
    return tracer.leaf(call, ids, like=like, shape=(len(ids), size), kind="gather")


def _norm(tracer: Tracer, original: Callable[[Tensor], Tensor], norm: Norm, x: Tensor) -> Tensor:
    size = norm.weight.shape[0]
    if x.dtype != norm.weight.dtype or x.shape[-1] != size:
        return original(x)
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        return original(x)
    made = tracer.leaf(
        norm.compute, rows, norm.weight, norm.eps, from_one=norm.from_one,
        like=rows, shape=rows.shape, kind="norm", detail=norm,
    )  # fmt: skip
    return made.view(x.shape)


def _experts(tracer: Tracer, computed: Computed, owner: nn.Module, hidden: Tensor, *args: Any) -> Tensor:
    return tracer.leaf(computed, owner, hidden, *args, like=hidden, shape=hidden.shape, kind="experts")


def _mark(tracer: Tracer, number: int, *_: Any) -> None:
    tracer.mark("layer", number)


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give ``owner`` another attribute until ``stack`` is closed."""
    own = vars(owner)
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name)
    own[name] = value
