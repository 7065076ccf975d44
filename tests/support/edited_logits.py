"""Edited logits, from which a sample's next token is computed, in plain Python and float64."""

import math

import numpy as np
import torch

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.execution.logit_edits import SpecialSampler
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.scheduling.request import Request, RequestTable, make_requests

from .scripted import ScriptedRunner


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...]
) -> list[float]:
    """Return ``logits`` [V] after penalties, biases and masks, token by token."""
    found = []
    for token, value in enumerate(logits.tolist()):
        times = output.count(token)
        value -= params.frequency_penalty * times
        value -= params.presence_penalty if times else 0.0
        if times or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -math.inf
        if any(word == (output + [token])[-len(word) :] for word in params.bad_words_ids or ()):
            value = -math.inf
        if len(output) < params.min_new_tokens and token in (*eos, *params.stop_token_ids):
            value = -math.inf
        found.append(value)
    return found


def log_softmax(values: list[float], temperature: float = 1.0) -> list[float]:
    scaled = [value / temperature for value in values]
    best = max(scaled)
    total = best + math.log(sum(math.exp(value - best) for value in scaled))
    return [value - total for value in scaled]


def logits_of(*key: int, vocab_size: int) -> np.ndarray:
    """Return float32 logits [V], a function of ``key``; no two are equal, about half are positive."""
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    return (2.0 * torch.randn(vocab_size, generator=generator)).numpy()


def bound(
    messages: list[GenerateReqInput], vocab_size: int, eos: tuple[int, ...] = ()
) -> tuple[RequestTable, list[Request]]:
    """Return a table with a slot for each message's request, in their order, and the requests."""
    table, requests = RequestTable(len(messages), 64, 16, vocab_size), []
    for message in messages:
        seed = message.sampling_params.seed or 0
        requests += make_requests(message, client=b"c", seed=seed, limit=60, eos_token_ids=eos, arrival=0.0)
        table.bind(requests[-1], table.take_slot())
    return table, requests


def with_logits(runner: ScriptedRunner, vocab_size: int = 97, kinds: int = 3) -> None:
    """Let ``runner`` sample from one of ``kinds`` rows of logits: the scripted model says which."""
    ordinary = Sampler(vocab_size, 4, "cpu", torch.float32)
    special = SpecialSampler(ordinary, vocab_size, torch.device("cpu"))

    def sample(batch: ForwardBatch, tokens: np.ndarray) -> SamplerOutput:
        if not len(tokens):
            none = torch.empty(0)
            return SamplerOutput(
                token_ids=none.long(), logprobs=none, raw_logprobs=None, sampled_logprobs=None
            )
        rows = [logits_of(token % kinds, vocab_size=vocab_size) for token in tokens.tolist()]
        logits, rare = torch.tensor(np.stack(rows)), batch.sampling.special
        if rare is None:
            return ordinary.sample(logits, batch.sampling)
        inputs = batch.input_ids.numpy().copy()
        inputs[: batch.num_decode] = runner.last[batch.slots[: batch.num_decode].numpy()]
        return special.sample(logits, batch.sampling, rare, torch.from_numpy(inputs)[batch.sample_tokens])

    runner.sample = sample
