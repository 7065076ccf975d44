"""Traces of functions of torch: what they repeat, what is left out of them, and what is not traceable."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from caesura.scheduler.tracing import (
    Affine,
    NotTraceableError,
    Trace,
    Tracer,
    compiled,
    fold_constants,
    merge,
    tidy,
    write_in_place,
)

SIZES = (7, 11, 1)


def trace_of(function: Callable[[Tensor], Tensor]) -> Trace:
    """Trace a function of int64 [T]."""
    traces = []
    for size in SIZES:
        x = torch.arange(size)
        tracer = Tracer({"x": x})
        with torch.no_grad(), tracer:
            out = function(x)
        traces.append(tracer.trace(out))
    return merge(traces, SIZES)


def repeated(trace: Trace, x: Tensor) -> Tensor:
    tidy(trace)
    return compiled(trace.calls, trace.inputs, [trace.out])(x, len(x))


def test_calls_are_repeated_for_any_number_of_tokens() -> None:
    weight = torch.randn(3)

    def function(x: Tensor) -> Tensor:
        rows = x.float().view(x.shape[0], 1) * weight
        first, second, third = rows.split(1, dim=-1)
        padded = torch.cat((first, second, torch.zeros(x.shape[0], 2)), dim=-1)
        return padded[:, : x.shape[-1] and 3] + third.expand(len(x), 3)

    trace = trace_of(function)
    for size in (1, 2, 30):
        assert torch.equal(repeated(trace, torch.arange(size)), function(torch.arange(size)))
    weight.mul_(2)
    assert torch.equal(repeated(trace, torch.arange(5)), function(torch.arange(5))), (
        "nothing is computed ahead"
    )


def test_arguments_that_are_written_to_stay() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = torch.zeros(len(x)), torch.zeros(len(x))
        first.add_(x)
        return torch.stack((first, second))

    trace = trace_of(function)
    assert torch.equal(repeated(trace, torch.arange(9)), function(torch.arange(9)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * x.sum().item(), "calls item"),
        (lambda x: x + 1 if x.max() > 0 else x, "calls __bool__"),
        (lambda x: x + 1 if len(x) > 3 else x.add(1).mul(1), "depend on the number of tokens"),
        (lambda x: torch.zeros(len(x) ** 2) + x[0], "not linear"),
        (lambda x: x * (1 / len(x)), "float depends on the number"),
    ],
)
def test_modules_that_a_trace_cannot_repeat(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(NotTraceableError, match=reason):
        trace_of(function)


def test_equal_calls_are_made_once_and_unused_ones_never() -> None:
    def function(x: Tensor) -> Tensor:
        x.float().exp()
        return x.float().sin() + x.float().sin()

    trace = trace_of(function)
    assert len(trace.calls) == 7
    tidy(trace)
    assert [call.target.__name__ for call in trace.calls] == ["float", "sin", "add"]


def test_integers_follow_the_number_of_tokens() -> None:
    trace = trace_of(lambda x: x.view(1, len(x)).expand(3 * 1, len(x)).reshape(3 * len(x)))
    assert trace.out.shape == (Affine(3, 0),)


def test_only_what_nothing_else_takes_is_overwritten() -> None:
    def function(x: Tensor) -> Tensor:
        first = x.float() * 2
        second = first * 3
        return (second * 5).tanh() + first

    trace = trace_of(function)
    expected = repeated(trace, torch.arange(4))
    write_in_place(trace, trace.calls[0].outs[0])
    assert [call.mutates for call in trace.calls] == [False, True, False, False, False, False]
    assert torch.equal(repeated(trace, torch.arange(4)), expected)
    write_in_place(trace, trace.calls[2].outs[0])
    assert [call.mutates for call in trace.calls] == [False, True, False, True, True, False]
    assert torch.equal(repeated(trace, torch.arange(4)), expected)


def test_constants_are_computed_once() -> None:
    weight, x = torch.randn(3), torch.arange(3)

    def function(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(3), torch.arange(3).float()).cos()
        return x * (angles @ weight)

    tracer = Tracer({"x": x})
    with torch.no_grad(), tracer:
        out = function(x)
    trace = tracer.trace(out)
    fold_constants(trace, tracer.tensors, [weight])
    assert [call.target.__name__ for call in trace.calls] == ["matmul", "mul"]
    weight.mul_(2)
    assert torch.equal(compiled(trace.calls, trace.inputs, [trace.out])(x, 0), function(x))


@pytest.mark.parametrize("axis", range(3))
def test_indexing_that_adds_an_axis_keeps_the_axis(axis: int) -> None:
    index = [slice(None)] * 2
    index.insert(axis, None)

    def function(x: Tensor) -> Tensor:
        return x.view(len(x), 1)[tuple(index)]

    trace = trace_of(function)
    assert torch.equal(repeated(trace, torch.arange(4)), function(torch.arange(4)))
    assert trace.calls[-1].target is Tensor.unsqueeze
