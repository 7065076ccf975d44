"""Masks of the tokens that the filters kept, from every sampler."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edited_logits import bound
from support.kept_tokens import kept_tokens
from support.properties import examples

from caesura.io_struct import MAX_SAMPLING_MASK, GenerateReqInput, SamplingParams
from caesura.scheduler.execution.logit_edits import SpecialSampler
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.scheduling.sampling import SamplingMaskRecord, sampling_batch

ROUNDING = 4e-6
"""Relative, of sums of float32 weights."""


# The sampler of this machine, torch's, and one that does not say what it kept, as Triton's does not.
every_kind = pytest.mark.parametrize("kind", ["best", "torch", "silent"])


def special_sampler(kind: str, vocab_size: int, dtype: torch.dtype, rows: int) -> SpecialSampler:
    ordinary = Sampler(vocab_size, rows, "cpu", dtype, in_torch=kind == "torch")
    made = SpecialSampler(ordinary, vocab_size, torch.device("cpu"))
    made.chunk_rows = 3  # a step needs several chunks
    if kind == "best":
        return made
    made.exact = exact = Sampler(vocab_size, rows, "cpu", torch.float32, in_torch=kind == "torch")
    if kind == "silent":
        sample = exact.sample

        def silent(logits, batch):
            out = sample(logits, batch)
            out.last_kept = None
            return out

        exact.sample = silent
    return made


def sampled(kind: str, logits: torch.Tensor, messages: list[GenerateReqInput]) -> SamplerOutput:
    table, _ = bound(messages, logits.shape[1])
    slots = np.arange(len(messages))
    batch = sampling_batch(table, slots, table.length[slots])
    assert batch.special is not None
    sampler = special_sampler(kind, logits.shape[1], logits.dtype, len(messages))
    return sampler.sample(logits, batch, batch.special)


def asking(**params) -> GenerateReqInput:
    return GenerateReqInput(
        input_ids=[1],
        sampling_params=SamplingParams(max_new_tokens=9, **params),
        return_sampling_mask=True,
        return_sampled_logprob=True,
    )


@st.composite
def steps(draw):
    vocab_size = draw(st.sampled_from([1, 23, 300, 4000]))
    rows = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn((rows, vocab_size), generator=generator) * draw(st.sampled_from([0.1, 2.0, 8.0]))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many are equal
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    messages = [
        asking(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.9])),
            top_k=draw(st.sampled_from([-1, 1, 5, 200])),
            top_p=draw(st.sampled_from([1.0, 1e-6, 0.5, 0.9, 0.999])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5])),
            seed=draw(st.integers(0, 99)),
        )
        for _ in range(rows)
    ]
    return logits.to(dtype), messages


@every_kind
@settings(max_examples=examples(60))
@given(step=steps())
def test_masks_are_those_of_the_definition(kind, step):
    logits, messages = step
    out = sampled(kind, logits, messages)
    assert out.further is not None and out.further.kept is not None
    assert out.further.kept.shape == logits.shape
    for row, message in enumerate(messages):
        params, kept = message.sampling_params, out.further.kept[row].numpy()
        values = logits[row].float().numpy()
        least, most = (kept_tokens(values, params, slack) for slack in (-ROUNDING, ROUNDING))
        found = set(np.flatnonzero(kept).tolist())
        assert least <= found <= most
        token = int(out.token_ids[row])
        assert token in found
        if params.temperature < 1e-6:
            assert found == {token}
            continue
        scaled = values.astype(np.float64) / np.float32(params.temperature)
        weights = np.exp(scaled - scaled.max())
        expected = np.log(weights[token] / weights[kept].sum())
        assert out.sampled_logprobs[row] == pytest.approx(expected, abs=2e-5)


@every_kind
def test_masks_of_a_large_vocabulary_are_cut_to_the_limit(kind):
    logits = torch.randn((4, 2 * MAX_SAMPLING_MASK), generator=torch.Generator().manual_seed(1)) / 10
    messages = [asking(), asking(top_k=MAX_SAMPLING_MASK + 1), asking(top_k=7), asking(top_p=0.999)]
    kept = sampled(kind, logits, messages).further.kept
    assert kept.sum(1)[:3].tolist() == [MAX_SAMPLING_MASK, MAX_SAMPLING_MASK, 7]
    assert 0.9 * MAX_SAMPLING_MASK < kept[3].sum() <= MAX_SAMPLING_MASK
    assert kept[0].logical_not().any()
    assert logits[0][kept[0]].min() >= logits[0][~kept[0]].max()


@every_kind
def test_masks_leave_out_tokens_that_cannot_be_sampled(kind):
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]])
    message = asking(top_k=4, stop_token_ids=[0], min_new_tokens=2)
    assert sampled(kind, logits, [message]).further.kept.tolist() == [[False, True, True, False]]


@every_kind
def test_rows_without_a_mask_are_unchanged_by_masked_neighbours(kind):
    logits = torch.randn((3, 300), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    params = {"top_p": 0.8, "seed": 5, "temperature": 1.3}
    plain = GenerateReqInput(
        input_ids=[1], sampling_params=SamplingParams(max_new_tokens=9, **params), return_logprob=True
    )
    top = GenerateReqInput(
        input_ids=[1],
        sampling_params=SamplingParams(max_new_tokens=9, **params),
        return_logprob=True,
        top_logprobs_num=3,
    )
    together = sampled(kind, logits, [plain, top, asking(**params)])
    without = sampled(kind, logits, [plain, top, plain])
    assert together.further.kept.shape == (2, 300)
    assert together.token_ids[:2].tolist() == without.token_ids[:2].tolist()
    assert torch.equal(together.logprobs[:2], without.logprobs[:2])
    assert torch.equal(together.further.top[0], without.further.top[0])
    assert without.further.kept is None


def test_a_position_that_is_sampled_again_has_its_new_mask():
    record = SamplingMaskRecord()
    for at, kept in enumerate(([1, 0, 1], [0, 1, 1], [1, 1, 1])):
        record.put(at, np.array(kept, np.bool_))
    assert record.nbytes == 4 * 7
    record.put(1, np.array([1, 0, 0], np.bool_))
    assert record.nbytes == 4 * 3
    mask = record.wire(2)
    assert [mask.at(0), mask.at(1), len(mask)] == [[0, 2], [0], 2]
    with pytest.raises(IndexError):
        mask.at(2)
    assert [mask.cut(1).at(0), len(mask.cut(1)), len(mask.cut(2)), len(record.wire(0))] == [[0], 1, 0, 0]
