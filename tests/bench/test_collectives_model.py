"""The model of a step's collectives counts those that the layers call."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import ranks
import torch
from harness.collectives_model import Collective, Step
from support.checkpoints import make_checkpoint
from support.forward_batches import Row, build_attention, forward_batch
from torch import Tensor

from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import SINGLE, TensorParallel
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint

PAGES = 4
"""Pages of a rank, without scratch."""


class Counting(TensorParallel):
    """Rank 0 of a group whose other ranks send zeros; keeps what was called, of an exchange its kind."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.called: list[Collective] = []
        self.sent: list[int] = []
        """Bytes that it has sent to others in each exchange of its own rows."""

    def all_reduce(self, x: Tensor) -> None:
        self.called.append(Collective("sum", x.nbytes))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        whole = torch.cat([x, *[torch.zeros_like(x)] * (self.size - 1)], dim=1)
        self.called.append(Collective("gather", whole.nbytes))
        return whole if out is None else out.copy_(whole[:, : out.shape[1]])

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self.called.append(Collective("gather", self.size * max(counts) * x.shape[1] * x.itemsize))
        return torch.cat((x, x.new_zeros((sum(counts) - len(x), x.shape[1]))))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self.called.append(Collective("scatter", self.size * max(counts) * x.shape[1] * x.itemsize))
        return x[: counts[0]]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        self.called.append(Collective("exchange", 0))
        self.sent.append(sum(counts[0][1:]) * x.shape[1] * x.itemsize)
        others = sum(row[0] for row in counts[1:])
        return torch.cat((x[: counts[0][0]], x.new_zeros((others, x.shape[1]))))


@pytest.mark.parametrize(
    ("family", "division"),
    [
        ("llama", {}),
        ("qwen3-moe", {"ep": 2}),
        ("deepseek-v3", {"dp_attention": 2}),
        ("deepseek-v3", {"ep": 2, "dp_attention": 2}),
        ("deepseek-v3", {"ep": 6, "dp_attention": 6}),
    ],
)
@torch.inference_mode()
def test_the_model_counts_what_layers_call(family: str, division: dict[str, int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **({"num_experts": 6} if family == "qwen3-moe" else {}))
    group = Counting(division.get("dp_attention", 2))
    cpu = torch.device("cpu")
    model = build_model(load_model_config(tmp_path), torch.float32, cpu, group, **division)
    load_from_disk(WeightLoader(model), open_checkpoint(tmp_path), 1 << 20)
    model.finalize_weights()
    rows = model.rank_rows
    _, backend = build_attention(model, torch.float32, 1 + PAGES, group if rows is None else SINGLE)
    # One request of rank 0 and two of rank 1, where ranks have requests of their own.
    others = PAGES if rows is not None else 1
    batch = forward_batch(
        [Row([1] * 5, 0, [1]), Row([1] * 3, 0, [1 + others]), Row([1] * 9, 0, [2 + others])], 0
    )
    own = batch if rows is None else rows.divide(batch, PAGES)
    assert own is not None
    backend.plan(own)
    logits, vocab = model.logits_to_sample(model.forward(batch, backend)), model.config.vocab_size
    assert logits is not None
    Sampler(vocab, 17, cpu, torch.float32).sample(logits, batch.sampling)
    step = Step(
        ranks=group.size,
        layers=model.config.num_layers,
        hidden=model.config.hidden_size,
        vocab=model.config.vocab_size,
        itemsize=4,
        tokens=17,
        sampled=17,
        fullest=None if rows is None else 12,
        exchanged=3 if group.size == 6 else None,
        dense_layers=1,
    )
    sent = [each.nbytes for each in step.collectives() if each.kind == "exchange"]
    assert len(sent) == len(group.sent)
    assert all(0 <= found <= most for found, most in zip(group.sent, sent, strict=True))
    assert rows is None or group.sent[-1] > 0, "logits of the rows that others sample"
    assert [
        each if each.kind != "exchange" else Collective("exchange", 0) for each in step.collectives()
    ] == (group.called)


def test_the_page_has_the_tables_of_the_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text("utf-8")
    for tokens in (256, 8192):
        columns = [column.cells for column in ranks.links_table(tokens).columns]
        for row in zip(*columns, strict=True):
            assert f"| {' | '.join(map(str, row))} |" in page
