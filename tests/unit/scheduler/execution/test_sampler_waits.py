"""Samplers on an accelerator never ask it for a value: tensors here have none, so asking fails."""

import numpy as np
import pytest
import torch
from support.edited_logits import bound

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.execution.forward import SamplingBatch, moved
from caesura.scheduler.execution.logit_edits import FETCHED_TOP, SpecialSampler
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.scheduling.sampling import sampling_batch

VOCAB = 3000
META = torch.device("meta")
FILTERS = {
    "top-k": {"top_k": 20},
    "a long top-k": {"top_k": 1500},
    "top-p": {"top_p": 0.9},
    "both": {"top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.1},
}


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(META)


def batch_of(*params: SamplingParams, **options: object) -> SamplingBatch:
    messages = [GenerateReqInput(input_ids=[5, 6, 7], sampling_params=each, **options) for each in params]
    table, _ = bound(messages, VOCAB)
    slots = np.arange(len(params))
    return sampling_batch(table, slots, np.full(len(params), 3))


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS.keys())
def test_filtered_rows(options):
    rows = [SamplingParams(**options), SamplingParams(), SamplingParams(temperature=0.0, **options)]
    batch = batch_of(*rows, return_logprob=True, return_raw_logprob=True)
    assert batch.any_filtered
    out = Sampler(VOCAB, 2, META, torch.bfloat16).sample(
        torch.empty((3, VOCAB), dtype=torch.bfloat16, device=META), moved(batch, to_meta)
    )
    assert_of(out, 3)


def test_special_rows():
    rows = [
        SamplingParams(top_k=20, repetition_penalty=1.2),
        SamplingParams(top_p=0.9, logit_bias={3: 1.0}),
        SamplingParams(min_new_tokens=4, stop_token_ids=[9]),
        SamplingParams(),
    ]
    batch = batch_of(*rows, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[1, 2])
    assert batch.special is not None
    batch, special = moved(batch, to_meta), moved(batch.special, to_meta)
    sampler = SpecialSampler(Sampler(VOCAB, 4, META, torch.bfloat16), VOCAB, META)
    out = sampler.sample(torch.empty((4, VOCAB), dtype=torch.bfloat16, device=META), batch, special)
    assert_of(out, 4)
    assert out.further.top.shape == (4, min(FETCHED_TOP, VOCAB))


def assert_of(out: SamplerOutput, rows: int) -> None:
    assert out.token_ids.device.type == "meta"
    assert out.token_ids.shape == out.logprobs.shape == (rows,)


def test_the_longest_list_is_known_on_the_host():
    greedy = SamplingParams(temperature=0.0, top_k=2000)
    assert batch_of(SamplingParams(), greedy).largest_top_k is None
    assert batch_of(SamplingParams(top_k=7), SamplingParams(), greedy).largest_top_k == 7
    assert batch_of(SamplingParams(top_k=7), SamplingParams(top_k=90, top_p=0.5)).largest_top_k == 90
    assert batch_of(SamplingParams(top_k=7), SamplingParams(top_p=0.5)).largest_top_k == VOCAB
