"""Any causal language model of transformers: its own modules over paged KV and engine weights.

Invariants:
- What computes a hidden state is the trainer's own code, but for products, embeddings, experts and attention,
  and on a CPU for what compiled kernels are shown to compute the same (:mod:`.fusion`).
- On a CPU the modules' calls are traced when the model is built, and repeated without them.
- All requests of a step are one row [1, T] with the positions of each; nothing but attention looks across
  tokens, which the check at load (:mod:`.self_check`) shows for the weights that are served.
- Logits are what the model's own forward makes of a hidden state (soft caps, scales).
"""

import copy
import re
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels.attention_form import AttentionForm
from ...layers.logits_processor import LogitsProcessor
from ...layers.parameters import Layer, Placement
from ..causal_lm import CausalLM
from ..config import ModelConfig
from ..multimodal import is_vision_tensor
from .assembly import Assembled, build, compute_buffers
from .interfaces import attending
from .probe import Attended, Probe, probe, refused
from .products import Given
from .self_check import check
from .traced_decoder import traced_decoder, traced_head


class TransformersForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        """Build the module over the engine's parameters; UNSUPPORTED_MODEL names what cannot be done."""
        module = build(config, place.dtype)
        decoder = module.get_decoder()
        path = next((name for name, each in module.named_modules() if each is decoder), "")
        if not path:
            raise refused(config.architecture, "it has no decoder beside its head")
        seen = probe(module, decoder)
        first = seen.attended[0]
        scales = {call.scale for call in seen.attended}
        compute_buffers(module, place.device)
        assembled = Assembled(module, seen, place)
        self.config = replace(
            config,
            num_layers=len(seen.attended),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=max(first.key_size, first.value_size),
            windows=tuple(call.window for call in seen.attended),
            attention_scale=first.scale,
        )
        self.module, self.decoder = module, decoder
        self.dtype, self.device = place.dtype, place.device
        self.routing = assembled.routing
        self.torch_experts = assembled.torch_experts
        self.forms = [_form(module, call, one_scale=len(scales) == 1) for call in seen.attended]
        self._layers = assembled.layers
        self._head = assembled.head
        self._headed, self._given = _with_given(module, path)
        self.traced_head = traced_head(
            self._headed, self._given, self._head, place.dtype, place.device, config.hidden_size
        )
        self.logits_processor = LogitsProcessor(self._project, config.vocab_size, place=place)
        self._by_layer = LayerByLayer(decoder, seen)
        self.traced = traced_decoder(decoder, seen, self.forms, place.dtype, place.device)
        self.in_one_call = self.traced is not None and self.traced.in_one_call is not None
        self._skipped = _skipped(module)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        if self.traced is not None:
            return self.traced.sampled(batch, backend)
        with attending(backend, self.forms, self.config.head_dim):
            hidden = self.hidden(batch.input_ids, batch.positions)
        return hidden.index_select(0, batch.sample_tokens)

    def hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [T, hidden] of all tokens, by the attention that the module has now."""
        return _hidden(self.decoder, input_ids, positions)

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        if self.traced is not None:
            found: Tensor = yield from self.traced.by_layer(batch, backend)
            return found
        steps = self._by_layer.steps(batch.input_ids, batch.positions)
        while True:
            try:
                with attending(backend, self.forms, self.config.head_dim):
                    number = next(steps)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden.index_select(0, batch.sample_tokens)
            yield number

    def _project(self, hidden: Tensor, out: Tensor) -> Tensor:
        if self.traced_head is not None:
            made = self.traced_head(hidden, out, hidden.shape[0])
            return made if made.data_ptr() == out.data_ptr() else out.copy_(made)
        self._given.hidden = hidden.unsqueeze(0)
        if self._head is not None:
            self._head.out = out
        ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.int64)
        logits: Tensor = self._headed(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits if logits.data_ptr() == out.data_ptr() else out.copy_(logits)

    def check(self) -> None:
        check(self)

    def is_skipped(self, name: str) -> bool:
        """Return True for rotary buffers, tied copies, what the architecture ignores, and vision towers."""
        return self._skipped.search(name) is not None or is_vision_tensor(self.config.architecture, name)

    def owners(self) -> Iterator[Layer]:
        yield from self._layers


def _form(module: nn.Module, call: Attended, *, one_scale: bool) -> AttentionForm:
    """Return what a backend is asked for; with ``one_scale`` it has the scale from the config."""
    return AttentionForm(
        window=call.window,
        softcap=call.softcap,
        scale=None if one_scale else call.scale,
        sinks=None if call.sinks is None else module.get_parameter(call.sinks).data,
    )


def _with_given(module: nn.Module, path: str) -> tuple[Any, Given]:
    """Return a copy of ``module`` that shares its parts, but has a given decoder at ``path``."""
    given = Given()
    *parents, last = path.split(".")
    copied = outer = _shallow(module)
    for name in parents:
        inner = _shallow(outer._modules[name])
        outer._modules[name] = inner
        outer = inner
    outer._modules[last] = given
    return copied, given


def _shallow(module: nn.Module | None) -> nn.Module:
    assert module is not None
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _skipped(module: Any) -> re.Pattern[str]:
    patterns = [r"rotary_emb\.inv_freq$", *(module._keys_to_ignore_on_load_unexpected or ())]
    patterns += [f"^{re.escape(name)}$" for name in module.all_tied_weights_keys]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        # Not registered: it is asked for its attributes only.
        self.__dict__["_layer"] = layer
        self._returns_tuple = returns_tuple
        self.called: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        if self.result is None:
            self.called = args, options
            self.first = hidden
        out = hidden if self.result is None else self.result
        return (out,) if self._returns_tuple else out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


class LayerByLayer:
    """Runs a decoder with layers that only note their calls, then each layer, then what follows the last.

    What a layer is called with beside hidden states follows from token ids and positions alone; the check at
    load compares with the forward that does not stop.
    """

    def __init__(self, decoder: nn.Module, probe: Probe) -> None:
        self._real = probe.layers
        self._noting = [_Layer(layer, probe.returns_tuple) for layer in self._real]
        self._decoder = copy.copy(decoder)
        self._decoder._modules = {
            name: nn.ModuleList(self._noting)
            if isinstance(each, nn.ModuleList) and list(each) == self._real
            else each
            for name, each in decoder._modules.items()
        }

    def steps(self, input_ids: Tensor, positions: Tensor) -> Generator[int, None, Tensor]:
        """Yield each layer's number before it is computed; return all hidden states, [T, hidden]."""
        self._run(input_ids, positions, None)
        hidden = self._noting[0].first
        calls = [layer.called for layer in self._noting]
        for number, (layer, called) in enumerate(zip(self._real, calls, strict=True)):
            yield number
            assert called is not None, "the decoder calls every layer"
            args, options = called
            out = layer(hidden, *args, **options)
            hidden = out[0] if isinstance(out, tuple) else out
        return self._run(input_ids, positions, hidden)

    def _run(self, input_ids: Tensor, positions: Tensor, result: Tensor | None) -> Tensor:
        for layer in self._noting:
            layer.result = result
        return _hidden(self._decoder, input_ids, positions)


def _hidden(decoder: Any, ids: Tensor, positions: Tensor) -> Tensor:
    out = decoder(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    last: Tensor = out.last_hidden_state[0]
    return last
