"""Runs steps of a real model, on the forward stream where there is one.

Invariants:
- Weights, KV and everything captured are read only on the forward stream; whoever writes them does so inside
  :meth:`ModelRunner.on_stream` and synchronises before telling anybody (I4, I5).
- The stream waits for the scheduling stream before a step, and the scheduling stream waits for it after: ``wait_stream``
  both ways. Inputs and results travel on the forward stream itself (``staging.py``).
- A decode row's input is the token that its slot sampled last, taken on the device: the host need not know it yet.
- Decode-only steps are replayed where their graphs are captured (``graphs.py``), every other step runs eagerly; the
  head and the sampler follow in the same way after both.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache.routing import RoutingPool
from ..forward import AttentionBackend, ForwardBatch, ForwardOutput, HostOutput
from ..models.base import CausalLM
from ..observability.stage_profiler import StageProfiler
from .graphs import CapturableBackend, DecodeGraphs
from .sampler import Sampler, SamplerOutput
from .staging import InputStaging, OutputStaging, StepLimits


@dataclass(slots=True)
class ReadyOutput:
    """Results that are on the host already."""

    output: HostOutput

    def fetch(self) -> HostOutput:
        """The results."""
        return self.output


class ModelRunner:
    """The :class:`~caesura.scheduler.forward.Runner` of a real model.

    Attributes:
        graphs: of decode steps; the caller has them captured. None: every step runs eagerly.
        stages: counts how long the head and the sampler take, on the host where steps run on a stream of their own.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        limits: StepLimits,
        device: torch.device,
        device_module: Any,
        routing: RoutingPool | None = None,
        use_graphs: bool = True,
    ) -> None:
        """
        Args:
            device_module: where it has streams, steps run beside the scheduler on one of their own.
            routing: takes in which experts the model chose. None: it has none.
            use_graphs: prepare graphs where device and backend can.
        """
        self.model = model
        self.stages = StageProfiler()
        self._routing = routing
        self._backend = backend
        self._sampler = sampler
        self._module = device_module
        self._last_tokens = torch.zeros(limits.rows, dtype=torch.int64, device=device)
        self._stream = device_module.Stream() if hasattr(device_module, "Stream") else None
        self.graphs: DecodeGraphs | None = None
        if self._stream is not None:
            self._outputs = OutputStaging(limits, device=device, device_module=device_module)
            self._inputs = InputStaging(limits, device=device, device_module=device_module)
            if use_graphs and hasattr(device_module, "CUDAGraph") and isinstance(backend, CapturableBackend):
                self.graphs = DecodeGraphs(
                    self._forward,
                    backend,
                    self._inputs,
                    limits=limits,
                    device=device,
                    device_module=device_module,
                    on_stream=self.on_stream,
                )

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
            self._backend.plan(batch)
            return ReadyOutput(_host_output(self._sample(batch, self._forward(batch, self._backend))))
        scheduling = self._module.current_stream()
        self._stream.wait_stream(scheduling)
        with self.on_stream():
            output = self._outputs.send(self._step(batch))
        scheduling.wait_stream(self._stream)
        return output

    @torch.inference_mode()
    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """What the decode rows of these slots read; see :class:`~caesura.scheduler.forward.Runner`."""
        with self.on_stream():
            device = self._last_tokens.device
            index, values = (torch.from_numpy(array).to(device, torch.int64) for array in (slots, tokens))
            self._last_tokens[index] = values

    def synchronize(self) -> None:
        """Return when the forward stream is idle."""
        if self._stream is not None:
            self._stream.synchronize()

    def _step(self, batch: ForwardBatch) -> SamplerOutput:
        if self.graphs is not None and self.graphs.serves(batch):
            return self._sample(*self.graphs.replay(batch))
        with self._inputs.staged(batch) as staged:
            self._backend.plan(staged)
        return self._sample(staged, self._forward(staged, self._backend))

    def _forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """What a graph captures: from the slots' last tokens to hidden states [S, hidden]."""
        decode = batch.num_decode
        torch.index_select(self._last_tokens, 0, batch.slots[:decode], out=batch.input_ids[:decode])
        hidden = self.model.forward(batch, backend)
        if self._routing is not None and self.model.routing is not None:
            self._routing.store(batch.kv_slots, self.model.routing.rows(batch.kv_slots.shape[0]))
        return hidden

    def _sample(self, batch: ForwardBatch, hidden: Tensor) -> SamplerOutput:
        if not len(batch.sample_tokens):
            none = torch.empty(0, device=hidden.device)
            return SamplerOutput(
                token_ids=none.to(torch.int64), logprobs=none, raw_logprobs=None, sampled_logprobs=None
            )
        with self.stages.stage("sample"):
            sampled = self._sampler.sample(self.model.logits(hidden), batch.sampling)
        # -1 marks a row without finite logits; its surplus step must still read a valid embedding.
        self._last_tokens[batch.sample_slots] = sampled.token_ids.clamp_min(0)
        return sampled


def _host_output(sampled: SamplerOutput) -> HostOutput:
    raw, kept = sampled.raw_logprobs, sampled.sampled_logprobs
    return HostOutput(
        token_ids=sampled.token_ids.numpy().astype(np.int32),
        logprobs=sampled.logprobs.numpy(),
        raw_logprobs=None if raw is None else raw.numpy(),
        sampled_logprobs=None if kept is None else kept.numpy(),
    )
