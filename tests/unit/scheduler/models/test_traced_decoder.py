"""Traced decoders of transformers: which kernels take the place of calls, and what stays with the modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny_model
from support.foreign_comparison import prompt
from support.forward_batches import PagedModel, Sequence, load_model
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from caesura.scheduler.kernels import TORCH, best, elementwise_for, native
from caesura.scheduler.models.transformers_backend.fusion import proven_norms

CPU = torch.device("cpu")
compiled_only = pytest.mark.skipif(
    best("elementwise", CPU, torch.float32) == TORCH, reason="no compiled kernels"
)


def load(folder: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    tiny_model(architecture, 1, **changes).to(dtype).save_pretrained(folder)
    return load_model(str(folder), dtype, backend="transformers")


def kinds(model: Any) -> list[str]:
    return [call.kind for call in model.traced.fused.trace.calls if call.kind]


def test_a_decoder_whose_calls_depend_on_the_tokens_is_computed_by_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x * 1 if x.shape[1] > 8 else x)
    )
    model = load(tmp_path, "LlamaForCausalLM", torch.float32)
    assert model.traced is None
    assert not model.in_one_call
    model.check()
    started: list[int] = []
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: started.append(number))
    tokens, results = prompt(20), []
    for run in (model.forward, stopping(model, started)):
        model.forward = run
        results += PagedModel(model, torch.float32).step([], [(Sequence(tokens), 20)])
    assert torch.equal(*results)
    reference = tiny_model("LlamaForCausalLM", 1)
    with torch.inference_mode():
        assert (results[0] - reference(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-4


def stopping(model: Any, started: list[int]) -> Callable[..., Tensor]:
    def forward(batch: Any, backend: Any) -> Tensor:
        started.clear()
        steps = model.forward_by_layer(batch, backend)
        while True:
            try:
                assert next(steps) == len(started)
            except StopIteration as end:
                return end.value

    return forward


# Norms


class Centred(LlamaRMSNorm):
    """A norm that subtracts the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEps(LlamaRMSNorm):
    """A norm whose attribute is not what it adds."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 4 * self.variance_epsilon)


class Scaled(LlamaRMSNorm):
    """A norm of one percent more."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.03 * super().forward(x)


@compiled_only
@pytest.mark.parametrize("dtype", native.FLOATS)
def test_norms_are_kernels_where_they_compute_the_same(dtype: torch.dtype) -> None:
    kernels = elementwise_for(CPU, dtype)
    assert kernels is not None
    plain, gemma = LlamaRMSNorm(40, eps=1e-6), GemmaRMSNorm(40, eps=1e-6)
    others = [
        Centred(40, eps=1e-6),
        OtherEps(40, eps=1e-6),
        Scaled(40, eps=1e-6),
        nn.LayerNorm(40, bias=False),
    ]
    decoder = nn.ModuleList([plain, gemma, *others]).to(dtype).requires_grad_(False)
    found = proven_norms(decoder, dtype, CPU, kernels)
    assert {module: norm.from_one for module, norm in found.items()} == {plain: False, gemma: True}
    assert found[plain].weight is plain.weight
    assert proven_norms(decoder, torch.float32, CPU, kernels) == {} or dtype == torch.float32


# Kernels in the place of calls


@compiled_only
@pytest.mark.parametrize(
    ("activation", "bend"),
    [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", None), ("relu", None)],
)
@pytest.mark.parametrize("dtype", native.FLOATS)
def test_gates_are_kernels_where_they_compute_the_same(
    dtype: torch.dtype, activation: str, bend: str | None, tmp_path: Path
) -> None:
    model = load(tmp_path, "LlamaForCausalLM", dtype, hidden_act=activation)
    found = [call.detail for call in model.traced.plain.trace.calls if call.kind == "gate"]
    assert found == ([bend] * 2 if bend else [])
    assert model.in_one_call == (bend is not None)


@compiled_only
@pytest.mark.parametrize(
    ("architecture", "attention", "whole"),
    [
        ("Qwen3ForCausalLM", "fused", True),
        ("Gemma2ForCausalLM", "fused", True),
        ("Gemma3ForCausalLM", "fused", True),  # two rotations
        ("Phi3ForCausalLM", "fused", True),  # checkpoints with one product
        ("GptOssForCausalLM", "fused", False),
        ("GraniteForCausalLM", "fused", False),  # what a block adds is scaled
    ],
)
def test_operations_computed_by_kernels(
    architecture: str, attention: str, whole: bool, tmp_path: Path
) -> None:
    model = load(tmp_path, architecture)
    assert kinds(model).count(attention) == 2
    assert model.in_one_call == whole


@compiled_only
@pytest.mark.parametrize("architecture", ["GlmForCausalLM", "Olmo2ForCausalLM", "GPTNeoXForCausalLM"])
def test_other_rotations_stay(architecture: str, tmp_path: Path) -> None:
    model = load(tmp_path, architecture)
    assert model.traced is not None
    assert model.traced.fused is None


@compiled_only
def test_a_scale_behind_the_rotation_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb

    def scaled(q: Tensor, k: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, *args, **options)
        return q * 1.1, k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", scaled)
    assert load(tmp_path, "LlamaForCausalLM").traced.fused is None


@compiled_only
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_all_layers_in_one_call_have_the_bits_of_each_by_itself(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load(tmp_path, architecture, dtype)
    assert model.in_one_call
    whole, results = model.forward, []

    def by_layer(batch: Any, backend: Any) -> Tensor:
        steps = model.forward_by_layer(batch, backend)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    for model.forward in (whole, by_layer):
        paged = PagedModel(model, dtype, compiled=True)
        sequences = [Sequence(prompt(n + 1, seed)) for seed, n in enumerate((3, 15, 40))]
        results.append(paged.step([], [(each, len(each.tokens) - 1) for each in sequences]))
        results[-1] += paged.step(sequences)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@compiled_only
def test_a_token_has_the_same_bits_whatever_shares_its_step(tmp_path: Path) -> None:
    model = load(tmp_path, "Qwen3ForCausalLM")
    tokens = prompt(50)
    alone = PagedModel(model, torch.bfloat16, compiled=True).step([], [(Sequence(tokens), 50)])[0]
    paged = PagedModel(model, torch.bfloat16, compiled=True)
    sequence = Sequence(tokens)
    parts = [paged.step([], [(sequence, chunk), (Sequence(prompt(9, chunk)), 9)])[0] for chunk in (13, 1, 36)]
    assert torch.equal(torch.cat(parts), alone)


# Heads


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"])
def test_logits_are_made_where_they_are_wanted(architecture: str, tmp_path: Path) -> None:
    model = load(tmp_path, architecture, torch.float32)
    hidden = torch.randn(5, model.config.hidden_size)
    out = torch.empty(5, model.config.vocab_size)
    with torch.inference_mode():
        made = model.traced_head(hidden, out, 5)
        assert made.data_ptr() == out.data_ptr()
        model.traced_head = None
        expected = model.logits(hidden)
    assert torch.equal(made, expected)
    assert made.shape == expected.shape
