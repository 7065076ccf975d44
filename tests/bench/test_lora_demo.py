"""The demo of adapters, quick: all of their loops against a real engine and real trainers."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.test_demo import assert_ended, finish_demo, start_demo, summary_in
from demo.engine import Handle
from demo.lora.adapter import add_adapter, peft_tensors, save_adapter
from demo.policy import build_policy, save_policy
from demo.rollout import Ledger, RolloutPool, Sampled
from demo.settings import LoraSettings
from demo.task import TARGETS, encode
from peft import PeftModel

from caesura.client import GenerateOutput, launch_scheduler
from caesura.io_struct import FinishReason, WeightVersionSpan

UPDATES = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish_demo(tmp_path_factory.mktemp("lora"), "--policy", "lora")


@pytest.mark.slow
def test_three_adapters_are_swapped_on_their_own(finished):
    summary = summary_in(finished)
    adapters = summary["adapters"]
    assert list(adapters) == list(TARGETS)
    assert summary["swaps"] == UPDATES * len(TARGETS)
    assert (summary["requests_lost"], summary["samples_of_another_adapter"]) == (0, 0)
    last = {name: each["adapter_epoch_last"] for name, each in adapters.items()}
    assert len(set(last.values())) == len(TARGETS)
    assert max(last.values()) == (UPDATES + 1) * len(TARGETS), "each begins with a version without effect"
    for each in adapters.values():
        assert each["updates"] == UPDATES
        assert each["samples_across_a_swap"] > 0
        assert each["norm_last"] > 0
        assert 0.5 < each["ess_min"] <= 1.0


@pytest.mark.slow
def test_engine_and_trainers_agree_across_swaps(finished):
    summary = summary_in(finished)
    assert 0.0 < summary["max_logprob_gap"] <= 1e-4
    assert 0.0 < summary["max_logprob_gap_later"] <= 1e-4, "the KV of what goes on is computed again"


@pytest.mark.slow
def test_the_report_tells_the_adapters_apart(finished):
    page = (finished / "report.html").read_text()
    assert not re.findall(r"https?:|@import|url\((?!#)|<script|<link|(?:src|href)=[\"'](?!#)", page)
    for name in TARGETS:
        assert f"</i>{name}</th>" in page
    for chart in ("reward", "epochs", "swap", "norm", "gap"):
        assert f'aria-label="{chart}"' in page


@pytest.mark.slow
def test_the_last_adapters_are_left_beside_their_base(finished):
    summary, targets = summary_in(finished), list(TARGETS)
    with launch_scheduler(finished / "model", dtype="float32", device="cpu", enable_lora=True) as client:
        for name in targets:
            loaded = client.load_adapter(name, finished / "adapters" / name)
            assert loaded.norm == pytest.approx(summary["adapters"][name]["norm_last"], abs=1e-3)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_every_other_transport_brings_the_adapters(tmp_path, transport):
    out = finish_demo(tmp_path, "--policy", "lora", "--updates", "2", "--transport", transport)
    summary = summary_in(out)
    assert (summary["transport"], summary["swaps"], summary["requests_lost"]) == (transport, 6, 0)
    assert 0.0 < summary["max_logprob_gap"] <= 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine through /proc")
@pytest.mark.parametrize(
    ("victim", "number", "status", "told"),
    [
        ("engine", signal.SIGKILL, 1, "error: engine: the scheduler process was killed by signal 9"),
        ("trainer", signal.SIGKILL, 1, "error: the trainer process ended (exit code -9)"),
        ("demo", signal.SIGINT, 130, "interrupted; the engine has stopped"),
    ],
)
def test_the_end_of_one_ends_all_loops(tmp_path, victim, number, status, told):
    demo = start_demo(tmp_path, "--policy", "lora", "--updates", "1000")
    assert_ended(demo, victim, number, status, told)


def test_peft_computes_what_the_trainer_does(tmp_path):
    settings = LoraSettings(out_dir=tmp_path)
    torch.manual_seed(0)
    model = build_policy()
    save_policy(model, tmp_path / "model")
    add_adapter(model, settings)
    assert len(peft_tensors(model)) == 2 * 2 * 7, "two factors of seven products in each of two layers"
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert len(trained) == len(peft_tensors(model))
    for name, value in model.named_parameters():
        if name in trained:
            torch.nn.init.normal_(value, std=0.1)
    save_adapter(model, settings, tmp_path / "adapter")
    base = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.tensor([encode("pause=esuap")])
    with torch.no_grad():
        before = base(tokens).logits
        by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
        ours = model(tokens).logits
    assert (ours - by_peft).abs().max() < 1e-5 < (ours - before).abs().max()


class Answered:
    """A prompt whose samples are there at once, with the spans that are given."""

    def __init__(self, spans: list[WeightVersionSpan], n: int) -> None:
        self.spans, self.n = spans, n

    def done(self) -> bool:
        return True

    def results(self, timeout: float | None = None) -> list[GenerateOutput]:
        ids = encode("aesup")
        return [
            GenerateOutput(
                rid="", index=index, output_ids=ids[: index + 2], output_logprobs=[-1.0] * (index + 2),
                raw_logprobs=None, sampled_logprobs=None, routed_experts=None,
                finish_reason=FinishReason(type="length"), weight_versions=self.spans,
                prompt_tokens=6, cached_tokens=0, seed=0, num_retractions=0, queue_time=0, e2e_latency=0,
            )
            for index in range(self.n)
        ]  # fmt: skip


class AnsweringEngine:
    def __init__(self, *spans: WeightVersionSpan) -> None:
        self.spans = list(spans)

    def submit(self, input_ids: list[int], params: Any, **options: Any) -> Handle:
        return Answered(self.spans, params.n)


def span(adapter: str | None, epoch: int, start: int = 0, end: int = 5) -> WeightVersionSpan:
    return WeightVersionSpan(
        version="default", epoch=0, start=start, end=end, adapter=adapter, adapter_epoch=epoch
    )


@pytest.mark.parametrize(
    ("spans", "foreign"),
    [
        ([span("backwards", 4)], False),
        ([span("backwards", 4, 0, 2), span("backwards", 7, 2, 5)], False),
        ([span("backwards", 4, 0, 2), span("copied", 7, 2, 5)], True),
        ([span(None, 0)], True),
        ([span("backwards", 5)], True),
    ],
)
def test_samples_of_another_policy_are_counted_and_left_out(spans, foreign):
    settings = LoraSettings(groups_in_flight=2, samples_per_prompt=3)
    policy = Sampled("backwards", "backwards", updates={4: 0, 7: 1})
    pool = RolloutPool(AnsweringEngine(*spans), settings, Ledger(), policy)
    pool.pump()
    pool.pump()
    assert pool.counts.finished == 6
    assert pool.counts.foreign == (6 if foreign else 0)
    assert len(pool.scored_since()) == (0 if foreign else 2)
