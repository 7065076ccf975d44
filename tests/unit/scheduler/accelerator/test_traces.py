"""Launches, copies and waits of every model's steps on a device, traced on fake CUDA tensors.

The figures are budgets: whoever makes a step cheaper lowers them, and nothing raises them unseen. A launch is
an operation of torch other than a view or an allocation, or a call of a library's or Triton's kernel: on a
device some are several kernels.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import DEVICE, Record, Tracer, fake_cuda, register_guard
from support.traced_engine import ROWS, STEPS, traced_engine
from torch import Tensor

from caesura.scheduler.layers.lora import AdapterSlots
from caesura.scheduler.parallel.torch_group import TorchGroup

pytestmark = pytest.mark.long

AFTERWARDS = ("forward", "sample", "fetch")


@dataclass(frozen=True, slots=True)
class Budget:
    """Most launches and copies of a model over a backend."""

    layer: int
    """A decoder layer beyond the first two, in a decode step."""
    mixed_layer: int
    """The same in a mixed step."""
    around: int
    """The rest of a decode step of two layers: one layer, embedding, rotary table, last norm."""
    plan: int
    """Launches before the model."""
    copies: int
    """Copies to the device in a decode step."""
    mixed_copies: int


BY_TORCH = " by torch"
"""Behind a model: as it is computed where Triton is missing."""
BUDGETS = {
    # layer, mixed layer, around, plan, copies, mixed copies
    "llama/flashinfer":                   ( 9, 10, 15,  0,  2,  2),
    "mistral/flashinfer":                 ( 9, 10, 15,  0,  2,  2),
    "qwen2/flashinfer":                   ( 9, 10, 15,  0,  2,  2),
    "qwen3/flashinfer":                   ( 9, 10, 15,  0,  2,  2),
    "qwen3 tied/flashinfer":              ( 9, 10, 15,  0,  2,  2),
    "qwen3 by torch/flashinfer":          (21, 22, 35,  0,  2,  2),
    "qwen3 fp8/flashinfer":               ( 9, 10, 15,  0,  2,  2),
    "qwen3 fp8 torch/flashinfer":         (10, 11, 16,  0,  2,  2),
    "qwen3 fp8 blackwell/flashinfer":     (10, 11, 16,  0,  2,  2),
    "qwen3_moe/flashinfer":               (11, 12, 18,  0,  2,  2),
    "qwen3_moe by torch/flashinfer":      (42, 43, 57,  0,  2,  2),
    "qwen3_moe fp8/flashinfer":           ( 9, 10, 16,  0,  2,  2),
    "qwen3_moe fp8 deep_gemm/flashinfer": (11, 12, 18,  0,  2,  2),
    "qwen3_moe fp8 blackwell/flashinfer": (12, 13, 19,  0,  2,  2),
    "gpt_oss/flashinfer":                 (12, 13, 19,  0,  3,  3),
    "qwen3/triton":                       (10, 30, 16,  2,  1,  4),
    "qwen3/sdpa":                         (28, 38, 33,  8,  4,  4),
    "deepseek_v2/flashinfer":             (12, 13, 17,  0,  2,  2),
    "deepseek_v2/sdpa":                   (24, 45, 26,  5,  4,  6),
    "deepseek_v3 fp8/flashinfer":         (12, 13, 19,  0,  2,  2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Most launches and copies of one kind of step, whatever the model: head and sampler."""

    launches: int
    vocabulary: int
    """Launches among them that read or write a value per token of the vocabulary for most rows."""
    copies: int
    """Copies to the device, beside those of a plain step."""
    results: int
    """Copies to the host."""


STEP_BUDGETS = {
    # launches, vocabulary, copies, results
    "decode":  StepBudget( 69,  11,   0,   2),
    "greedy":  StepBudget( 38,   9,   0,   2),
    "mixed":   StepBudget( 69,  11,   0,   2),
    "top_k":   StepBudget(132,  13,   0,   2),
    "top_p":   StepBudget(116,  23,   0,   2),
    "min_p":   StepBudget(127,  25,   0,   2),
    "raw":     StepBudget(108,  19,   0,   4),
    "special": StepBudget(242,  23,  13,   8),
    "masked":  StepBudget(327,  14,  13,   8),
    "prompt":  StepBudget( 87,  23,   3,   6),
}  # fmt: skip
TRITON_STEP_BUDGETS = {
    name: replace(STEP_BUDGETS[name], launches=5, vocabulary=3)
    for name in ("decode", "greedy", "mixed", "top_k", "top_p", "min_p", "raw")
} | {
    "special": StepBudget(launches=68, vocabulary=8, copies=13, results=8),
    "masked": StepBudget(launches=207, vocabulary=7, copies=13, results=8),
    "prompt": StepBudget(launches=23, vocabulary=15, copies=3, results=6),
}
"""The head, two kernels of ``kernels/triton_sampler.py``, and what the slots read next (two)."""
CASES = tuple(BUDGETS)
WHOLE = (
    "qwen3/flashinfer", "qwen3 by torch/flashinfer", "qwen3_moe/flashinfer", "deepseek_v2/flashinfer",
    "deepseek_v2/sdpa",
)  # fmt: skip
"""Steps of every kind are traced of these: in the others, models differ by their hidden states only."""
STEP_CASES = [(case, step) for case in CASES for step in (STEPS if case in WHOLE else ("decode", "mixed"))]


@dataclass(frozen=True)
class Traces:
    vocab_size: int
    captured: bool
    in_triton: bool
    """True if the sampler runs in Triton."""
    steps: dict[str, Record]
    """Records by kind of step, and of the engine's start and of slots that are told their last tokens."""
    deeper: dict[str, Record]
    """Records of a model of three layers instead of two."""

    def layer(self, step: str) -> int:
        return self.forward(self.deeper, step) - self.forward(self.steps, step)

    @cached_property
    def around(self) -> int:
        return self.forward(self.steps, "decode") - self.layer("decode")

    def forward(self, records: dict[str, Record], step: str) -> int:
        if step == "decode" and self.captured:
            return records["start"].count("launch", "capture")
        return records[step].count("launch", "forward")


def traced(case: str, tracer: Tracer) -> Traces:
    model, _, backend = case.partition("/")
    by_torch = model.endswith(BY_TORCH)
    if not by_torch:
        pytest.importorskip("triton")
    model = model.removesuffix(BY_TORCH)
    steps = STEPS if case in WHOLE else {name: STEPS[name] for name in ("decode", "mixed")}
    with traced_engine(tracer, model, backend, 2, by_torch=by_torch) as engine:
        captured = engine.runner.graphs is not None and engine.runner.graphs.are_captured
        records = {name: engine.step(make(engine.vocab_size)) for name, make in steps.items()}
        records["start"] = engine.started
        records["last tokens"] = engine.set_last_tokens()
        vocab_size, in_triton = engine.vocab_size, engine.runner.sampler._triton is not None
    with traced_engine(tracer, model, backend, 3, by_torch=by_torch, autotune=False) as engine:
        deeper = {name: engine.step(STEPS[name](engine.vocab_size)) for name in ("decode", "mixed")}
        deeper["start"] = engine.started
    return Traces(vocab_size, captured, in_triton, records, deeper)


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    register_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def traces(guard: None) -> dict[str, Traces]:
    class Made(dict[str, Traces]):
        def __missing__(self, case: str) -> Traces:
            with fake_cuda() as tracer:
                self[case] = traced(case, tracer)
            return self[case]

    return Made()


PAGEABLE = "the torch backends' plans copy from memory that is not pinned"


def waits_in_plan(case: str, step: str) -> str | None:
    if not case.endswith(("flashinfer", "triton")) or (case.endswith("triton") and step == "mixed"):
        return PAGEABLE
    return None


KNOWN_PLANS = [
    pytest.param(
        case,
        step,
        marks=[]
        if (reason := waits_in_plan(case, step)) is None
        else pytest.mark.xfail(strict=True, reason=reason),
        id=f"{case}-{step}",
    )
    for case, step in STEP_CASES
]
"""Cases of plans; those that wait today are marked as failing, and whoever mends one removes its mark."""


def on_the_host() -> torch.Tensor:
    return torch.arange(3)


@pytest.mark.parametrize("does,recorded", [
    (lambda x: x.sum().item(), {"launch": 2, "wait": 1}),
    (lambda x: bool((x > 0).any()), {"launch": 3, "wait": 1}),
    (lambda x: x[x > 0], {"launch": 2, "wait": 1}),
    (lambda x: x.cpu(), {"d2h": 1, "wait": 1}),
    (lambda x: x.tolist(), {"launch": 3, "wait": 3}),  # fake tensors are read number by number
    (lambda x: x.to("cpu", non_blocking=True), {"d2h": 1}),
    (lambda x: on_the_host().to(x.device), {"h2d": 1, "wait": 1}),
    (lambda x: on_the_host().to(x.device, non_blocking=True), {"h2d": 1}),
    (lambda x: torch.tensor([1, 2], device=x.device), {"h2d": 1, "wait": 1}),
    (lambda x: x[on_the_host()], {"launch": 1, "mixed": 1}),
    (lambda x: x.view(1, 3).t()[0].expand(3), {}),
    (lambda x: on_the_host()[1:].tolist(), {}),
    (lambda x: x * 2, {"launch": 1}),
    (lambda x: x.copy_(x + 1), {"launch": 2}),
])  # fmt: skip
def test_the_tracer_itself(guard, does, recorded):
    with fake_cuda() as tracer, torch.inference_mode():
        values = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        tracer.begin("step")
        does(values)
    found = {kind: tracer.record.count(kind) for kind in ("launch", "wait", "h2d", "d2h", "mixed")}
    assert found == {**dict.fromkeys(found, 0), **recorded}


@pytest.mark.parametrize("case", CASES)
def test_nothing_mixes_devices(traces, case):
    found = traces[case]
    for name, record in found.steps.items():
        assert not record.count("mixed"), f"{name}:\n{record.told('mixed')}"


@pytest.mark.parametrize("case,step", KNOWN_PLANS)
def test_no_plan_waits_for_the_device(traces, case, step):
    record = traces[case].steps[step]
    assert not record.count("wait", "plan"), record.told("wait", "plan")


@pytest.mark.parametrize("case,step", STEP_CASES)
def test_no_step_waits_for_the_device(traces, case, step):
    record = traces[case].steps[step]
    assert not record.count("wait", *AFTERWARDS), record.told("wait", *AFTERWARDS)


CAPTURED = [(case, "decode") for case in CASES if case.endswith(("flashinfer", "triton"))]


@pytest.mark.parametrize("case,step", CAPTURED)
def test_decode_steps_are_captured(traces, case, step):
    assert traces[case].captured
    assert traces[case].steps[step].count("launch", "forward") == 1, "the graph"


def test_steps_with_adapters_are_captured_and_wait_for_nothing(guard):
    pytest.importorskip("triton")
    with (
        fake_cuda() as tracer,
        traced_engine(tracer, "qwen3", "flashinfer", 2, adapters=AdapterSlots(3, 16)) as engine,
    ):
        for name in ("decode", "mixed"):
            batch = STEPS[name](engine.vocab_size)
            batch.adapters = torch.arange(len(batch.input_ids)) % 4 - 1
            record = engine.step(batch)
            assert not record.count("wait", *AFTERWARDS), record.told("wait", *AFTERWARDS)
            assert not record.count("mixed"), record.told("mixed")
            assert (record.count("launch", "forward") == 1) == (name == "decode")


class Nccl:
    """Stand-in for ``ProcessGroupNCCL``: records calls, and looks at the sizes."""

    def __init__(self, tracer: Tracer, size: int) -> None:
        self._tracer, self._size = tracer, size

    def allreduce(self, tensors: list[Tensor]) -> "Nccl":
        return self._called("all_reduce", *tensors)

    def _allgather_base(self, out: Tensor, x: Tensor) -> "Nccl":
        assert out.numel() == self._size * x.numel()
        return self._called("gather", out, x)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> "Nccl":
        assert x.numel() == self._size * out.numel()
        return self._called("reduce_scatter", out, x)

    def alltoall_base(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> "Nccl":
        assert (len(out), len(x)) == (sum(received), sum(sent))
        assert len(received) == len(sent) == self._size
        return self._called("all_to_all", out, x)

    def _called(self, name: str, *tensors: Tensor) -> "Nccl":
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._tracer.launch(name, *tensors)
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("rank", [0, 1], ids=["rows", "no rows"])
@pytest.mark.parametrize(
    ("model", "size", "sparse"), [("qwen3_moe", 16, 2), ("deepseek_v2", 16, 1), ("deepseek_v3 fp8", 8, 1)]
)
def test_ranks_with_rows_wait_only_where_they_send_some(guard, model, size, sparse, rank):
    pytest.importorskip("triton")
    with fake_cuda() as tracer:
        group = TorchGroup(dist.HashStore(), rank, size, DEVICE)
        group._backend = Nccl(tracer, size)
        with traced_engine(tracer, model, "flashinfer", 2, parallel=group) as engine:
            for step, exchanges in (("decode", 0), ("mixed", sparse)):
                record = engine.step(STEPS[step](engine.vocab_size))
                assert not record.count("mixed"), record.told("mixed")
                waits = {event.where for event in record.of("wait", *AFTERWARDS)}
                assert len(waits) == (exchanges > 0), f"for the counts alone: {record.told('wait')}"
                assert all(where.startswith("rank_rows.py") for where in waits), waits
                called = Counter(event.name for event in record.of("launch", "forward"))
                found = [called[name] for name in ("gather", "reduce_scatter", "all_to_all", "all_reduce")]
                assert found == [3, 3 - exchanges, 1 + 2 * exchanges, 1], "embedding, layers, norm, samples"


@pytest.mark.parametrize("case", CASES)
def test_a_model_launches_no_more_than_its_budget(traces, case):
    found, budget = traces[case], Budget(*BUDGETS[case])
    decode = found.steps["decode"]
    figures = Budget(
        layer=found.layer("decode"),
        mixed_layer=found.layer("mixed"),
        around=found.around,
        plan=decode.count("launch", "plan"),
        copies=decode.count("h2d"),
        mixed_copies=found.steps["mixed"].count("h2d"),
    )
    for name in Budget.__dataclass_fields__:
        assert getattr(figures, name) <= getattr(budget, name), f"{name} of {figures}"


@pytest.mark.parametrize("case,step", [(case, step) for case, step in STEP_CASES if case in WHOLE])
def test_head_and_sampler_launch_no_more_than_their_budget(traces, case, step):
    record, budget = traces[case].steps[step], step_budget(traces[case], step)
    figures = step_figures(traces[case], step)
    for name in StepBudget.__dataclass_fields__:
        told = record.told("launch", "sample") if name in ("launches", "vocabulary") else record.told("h2d")
        assert getattr(figures, name) <= getattr(budget, name), f"{name} of {figures}:\n{told}"


@pytest.mark.parametrize("case", [case for case in WHOLE if case.endswith("flashinfer")])
def test_captured_heads_and_samplers_keep_their_budget(traces, case):
    started = traces[case].steps["start"]
    launches = started.count("launch", "capture head")
    assert launches <= (5 if traces[case].in_triton else 77)
    assert launches > 1, started.told("launch", "capture head")


def step_budget(found: Traces, step: str) -> StepBudget:
    budget = (TRITON_STEP_BUDGETS if found.in_triton else STEP_BUDGETS)[step]
    in_graph = (
        ("decode", "greedy", "top_k", "top_p", "min_p", "raw") if found.in_triton else ("decode", "greedy")
    )
    if found.captured and step in in_graph:
        return replace(budget, launches=1, vocabulary=0)
    return budget


def step_figures(found: Traces, step: str) -> StepBudget:
    record, plain = found.steps[step], found.steps["mixed" if step in ("mixed", "prompt") else "decode"]
    launches = record.of("launch", "sample")
    return StepBudget(
        launches=len(launches),
        vocabulary=sum(event.elements >= ROWS // 2 * found.vocab_size for event in launches),
        copies=record.count("h2d") - plain.count("h2d"),
        results=record.count("d2h"),
    )
