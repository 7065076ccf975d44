"""Runs steps of a real model, on the forward stream where there is one.

Invariants:
- Weights, KV and everything captured are read only on the forward stream; whoever writes them does so inside
  :meth:`ModelRunner.on_stream` and synchronises before telling anybody (I4, I5).
- The stream waits for the scheduling stream before a step (its inputs), and the scheduling stream waits for it after
  (its outputs): ``wait_stream`` both ways.
- A decode row's input is the token that its slot sampled last, taken on the device: the host need not know it yet.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..forward import AttentionBackend, ForwardBatch, ForwardOutput, HostOutput
from ..models.base import CausalLM
from .sampler import Sampler, SamplerOutput


@dataclass(slots=True)
class ReadyOutput:
    """Results that are on the host already."""

    output: HostOutput

    def fetch(self) -> HostOutput:
        """The results."""
        return self.output


class PendingOutput:
    """Results on their way to pinned host memory; ``fetch`` waits for this step's event only."""

    def __init__(self, sampled: SamplerOutput, device_module: Any) -> None:
        self._host = [
            None if tensor is None else tensor.to("cpu", non_blocking=True)
            for tensor in (
                sampled.token_ids,
                sampled.logprobs,
                sampled.raw_logprobs,
                sampled.sampled_logprobs,
            )
        ]
        self._event = device_module.Event()
        self._event.record()

    def fetch(self) -> HostOutput:
        """Wait for the event, then view the copies."""
        self._event.synchronize()
        tokens, logprobs, raw, sampled = self._host
        assert tokens is not None
        assert logprobs is not None
        return _host_output(tokens, logprobs, raw, sampled)


class ModelRunner:
    """The :class:`~caesura.scheduler.forward.Runner` of a real model."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        device: torch.device,
        max_slots: int,
        device_module: Any,
    ) -> None:
        self.model = model
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._last_tokens = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._module = device_module
        self._stream = device_module.Stream() if device.type != "cpu" else None

    def on_stream(self) -> AbstractContextManager[Any]:
        """Work inside is ordered with the steps: after those launched, before those to come."""
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> ForwardOutput:
        """Enqueue one step; on the CPU it has run when this returns."""
        if self._stream is None:
            return ReadyOutput(_fetch_now(self._step(batch)))
        scheduling = self._module.current_stream()
        batch = _to_device(batch, self._device)
        self._stream.wait_stream(scheduling)
        with self.on_stream():
            output = PendingOutput(self._step(batch), self._module)
        scheduling.wait_stream(self._stream)
        return output

    def synchronize(self) -> None:
        """Return when the forward stream is idle."""
        if self._stream is not None:
            self._stream.synchronize()

    def _step(self, batch: ForwardBatch) -> SamplerOutput:
        decode = batch.slots[: batch.num_decode]
        batch.input_ids[: batch.num_decode] = self._last_tokens[decode]
        self._backend.plan(batch)
        hidden = self.model.forward(batch, self._backend)
        if not len(batch.sample_tokens):
            none = torch.empty(0, device=self._device)
            return SamplerOutput(
                token_ids=none.to(torch.int64), logprobs=none, raw_logprobs=None, sampled_logprobs=None
            )
        sampled = self._sampler.sample(self.model.logits(hidden), batch.sampling)
        # -1 marks a row without finite logits; its surplus step must still read a valid embedding.
        self._last_tokens[batch.sample_slots] = sampled.token_ids.clamp_min(0)
        return sampled


def _to_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Inputs copied asynchronously through pinned memory."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return ForwardBatch(
        num_decode=batch.num_decode,
        input_ids=move(batch.input_ids),
        positions=move(batch.positions),
        kv_slots=move(batch.kv_slots),
        page_table=move(batch.page_table),
        kv_lens=move(batch.kv_lens),
        q_lens_host=batch.q_lens_host,
        kv_lens_host=batch.kv_lens_host,
        slots=move(batch.slots),
        sample_tokens=move(batch.sample_tokens),
        sample_slots=move(batch.sample_slots),
        sampling=batch.sampling.to(device),
    )


def _fetch_now(sampled: SamplerOutput) -> HostOutput:
    return _host_output(sampled.token_ids, sampled.logprobs, sampled.raw_logprobs, sampled.sampled_logprobs)


def _host_output(tokens: Tensor, logprobs: Tensor, raw: Tensor | None, sampled: Tensor | None) -> HostOutput:
    return HostOutput(
        token_ids=tokens.numpy().astype(np.int32),
        logprobs=logprobs.numpy(),
        raw_logprobs=None if raw is None else raw.numpy(),
        sampled_logprobs=None if sampled is None else sampled.numpy(),
    )
