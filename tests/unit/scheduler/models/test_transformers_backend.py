"""Models that transformers has and the engine has no file for."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import engine_template
from support.architectures import ARCHITECTURES, REFUSED, tiny_config, tiny_model
from support.checkpoints import edit_config, make_checkpoint
from support.foreign_comparison import WAYS, compare, prompt
from support.forward_batches import PagedModel, Sequence, layer_by_layer, load_model
from support.stored_weights import storage
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral import modeling_mistral

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.execution.kernel_report import why_torch
from caesura.scheduler.kernels import TORCH, best, elementwise_for, native
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import config_difference, load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.models.transformers_backend.fusion import proven_norms
from caesura.scheduler.models.transformers_backend.products import SharedProduct
from caesura.scheduler.runtime.engine_config import EngineConfig

TOLERANCE = 1e-4
ORDINARY = (
    "Cohere2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
)
"""Between them: windows, sinks, tied and scaled embeddings, logit scales, experts of both kinds, fused
checkpoints.
"""
CPU = torch.device("cpu")


def save(folder: Path, architecture: str, seed: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    model = tiny_model(architecture, seed, **changes)
    model.save_pretrained(folder)
    return model


def build(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(load_model_config(folder, "transformers"), dtype, CPU)


def load(folder: Path) -> Any:
    return load_model(str(folder), torch.float32, backend="transformers")


@pytest.mark.parametrize(
    "architecture",
    [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES],
)
def test_logits_and_updates(architecture: str, tmp_path: Path) -> None:
    compared = compare(architecture, tmp_path)
    latent = hasattr(compared.old.config, "kv_lora_rank")
    assert compared.gaps.keys() == (WAYS - {"in_place update"} if latent else WAYS)
    assert max(compared.gaps.values()) <= TOLERANCE, compared.gaps
    with torch.inference_mode():
        assert compared.old(torch.tensor([prompt(20)])).logits.std() > 0.2, "the tolerance would mean nothing"
    assert storage(compared.model) == storage(load(tmp_path / "new"))
    names = load_file(tmp_path / "new" / "model.safetensors").keys()
    slots = compared.model.weight_slots().keys()  # first: GPT-2 says that it ignores "attn.bias" of any name
    assert slots == {name for name in names if name in slots or not compared.model.is_skipped(name)}


def named(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **fields}


@pytest.mark.parametrize(("architecture", "reason"), [
    ("DiffLlama", "do not attend once each"), ("Doge", "a mask of its own"),
    ("Falcon", "AttentionInterface"), ("JetMoe", "its forward fails over packed requests"),
    ("Lfm2", "its forward fails over packed requests"), ("Llama4", "chunked_attention"),
    ("MiMoV2Flash", "heads of different numbers or sizes"), ("MiniMax", "linear_attention"),
    ("StableLm", "AttentionInterface"),
])  # fmt: skip
def test_refused_by_name(architecture: str, reason: str, tmp_path: Path) -> None:
    architecture += "ForCausalLM"
    assert architecture in REFUSED
    tiny_config(architecture, architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(CaesuraError, match=reason) as caught:
        build(tmp_path)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert architecture in caught.value.message


@pytest.mark.parametrize(("changes", "reason"), [
    (named("MyForCausalLM", auto_map={"AutoModelForCausalLM": "my.My"}), "code of the checkpoint"),
    (named("MyForCausalLM"), "no causal language model"),
    (named("T5ForConditionalGeneration"), "no causal language model"),
    (named("LlamaModel"), "no causal language model"),
    ({"architectures": None}, "no causal language model"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
])  # fmt: skip
def test_refused_configs(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, **changes)
    with pytest.raises(CaesuraError, match=reason) as caught:
        load_model_config(tmp_path, "transformers")
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL


@pytest.mark.parametrize(("name", "value"), [
    ("hidden_size", "wide"), ("num_hidden_layers", 0), ("rope_parameters", [1]), ("dtype", "int8"),
    ("dtype", {"text_config": "bfloat16"}),
])  # fmt: skip
def test_values_that_the_config_class_does_not_take(name: str, value: Any, tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, **{name: value})
    with pytest.raises(CaesuraError) as caught:
        load_model_config(tmp_path, "transformers")
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR


def test_an_epsilon_that_the_config_class_has_as_null(tmp_path: Path) -> None:
    save(tmp_path, "Cohere2ForCausalLM")
    edit_config(tmp_path, rms_norm_eps=None)
    assert load_model_config(tmp_path, "transformers").rms_norm_eps > 0


def test_the_check_at_load_finds_what_looks_across_tokens(tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM")
    model = load(tmp_path)
    model.check()
    mlp = model.decoder.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, given: (given[0] + 0.1 * given[0].roll(1, dims=1),))
    with pytest.raises(CaesuraError, match="looks across tokens") as caught:
        model.check()
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL


def test_a_window_that_attention_is_not_told_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask alone would have it, and there is none over pages."""
    save(tmp_path, "MistralForCausalLM")
    forward = modeling_mistral.MistralAttention.forward

    def silent(self: Any, *args: Any, **options: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return forward(self, *args, **options)
        finally:
            self.config.sliding_window = window

    build(tmp_path)
    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", silent)
    with pytest.raises(CaesuraError, match="neither causal nor a sliding window"):
        build(tmp_path)


def test_projections_of_one_input_are_one_product(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2ForCausalLM")
    names = set(dict(build(tmp_path).named_storage()))
    for layer in range(2):
        assert f"layers.{layer}.self_attn.q_proj+k_proj+v_proj.weight" in names
        assert f"layers.{layer}.self_attn.q_proj+k_proj+v_proj.bias" in names
        assert f"layers.{layer}.mlp.gate_proj+up_proj.weight" in names
        assert f"layers.{layer}.self_attn.q_proj.weight" not in names


def test_parts_of_a_product_never_depend_on_who_came_before() -> None:
    linear = Linear("p", 8, {"a": 3, "b": 5}, place=Placement(torch.float32, CPU))
    weights = {slot.name: torch.randn(slot.shape) for slot in linear.slots()}
    for slot in linear.slots():
        slot.write(weights[slot.name], 0)
    shared, x, y = SharedProduct(linear, [3, 5]), torch.randn(1, 4, 8), torch.randn(1, 2, 8)
    for number, tensor in ((0, x), (1, y), (1, x), (1, x), (0, x), (0, y), (1, y)):
        weight = weights[("a.weight", "b.weight")[number]]
        torch.testing.assert_close(shared.part(number, tensor), nn.functional.linear(tensor, weight))


def test_tensors_have_the_dtypes_that_transformers_gives_them(tmp_path: Path) -> None:
    save(tmp_path, "DeepseekV3ForCausalLM", dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = build(tmp_path, torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.weight_slots()[bias].dtype == theirs.state_dict()[bias].dtype == torch.float32
    assert {slot.dtype for name, slot in model.weight_slots().items() if name != bias} == {torch.bfloat16}


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GptOssForCausalLM", "Phi3ForCausalLM"])
def test_buffers_are_those_of_a_loaded_model(architecture: str, tmp_path: Path) -> None:
    save(tmp_path, architecture)
    theirs = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).named_buffers())
    ours = dict(load(tmp_path).module.named_buffers())
    assert ours.keys() == theirs.keys()
    assert ours
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name


def test_a_long_row_keeps_the_frequencies_of_a_short_one(tmp_path: Path) -> None:
    factors = [1.0 + 0.1 * i for i in range(6)]
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors,
        "long_factor": [3 * f for f in factors],
        "original_max_position_embeddings": 64, "factor": 4.0,
    }  # fmt: skip
    context = {"original_max_position_embeddings": 64, "sliding_window": None}
    reference = save(tmp_path, "Phi3ForCausalLM", rope_parameters=rope, **context)
    model = load(tmp_path)
    assert model.config.max_position_embeddings == 64
    paged, long, short = PagedModel(model, torch.float32), Sequence(prompt(64, 1)), Sequence(prompt(9, 2))
    for sequence, got in zip((long, short), paged.step([], [(long, 64), (short, 9)])):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence.tokens])).logits[0]
        assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_routing_is_recorded_as_the_router_chose(architecture: str, tmp_path: Path) -> None:
    reference = save(tmp_path, architecture)
    model = load(tmp_path)
    assert model.torch_experts == (architecture == "GptOssForCausalLM")
    tokens = prompt(30)
    PagedModel(model, torch.float32).step([], [(Sequence(tokens), 30)])
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    expected = torch.stack([each.topk(2).indices for each in logits], dim=1)
    assert torch.equal(model.routing.rows(30).long().sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("compiled", [False, True])
def test_layer_by_layer(compiled: bool, tmp_path: Path) -> None:
    if compiled and best("attention", CPU, torch.float32) == TORCH:
        pytest.skip("no compiled kernels")
    save(tmp_path, "Gemma3ForCausalLM")
    model, tokens, seen = load(tmp_path), prompt(20), []
    whole = PagedModel(model, torch.float32, compiled=compiled).step([], [(Sequence(tokens), 20)])
    paged = PagedModel(model, torch.float32, compiled=compiled)

    def note(layer: int) -> None:
        stored = [bool(paged.pool.layer(each)[0].isfinite().any()) for each in range(2)]
        seen.append((layer, stored))

    model.forward = partial(layer_by_layer, model, due=note)
    assert torch.equal(*whole, *paged.step([], [(Sequence(tokens), 20)]))
    assert seen == [(0, [False, False]), (1, [True, False])]


def test_choice_of_the_model_backend(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "qwen3", "qwen3")
    assert load_model_config(tmp_path / "qwen3", "auto").transformers_config is None
    assert load_model_config(tmp_path / "qwen3", "transformers").transformers_config is not None
    save(tmp_path / "gemma", "GemmaForCausalLM")
    assert load_model_config(tmp_path / "gemma", "auto").transformers_config is not None
    with pytest.raises(CaesuraError, match="not supported"):
        load_model_config(tmp_path / "gemma", "native")
    edit_config(tmp_path / "qwen3", attn_logit_softcapping=30.0, quantization_config={"quant_method": "gptq"})
    with pytest.raises(
        CaesuraError, match=r"attn_logit_softcapping.*; Qwen3ForCausalLM cannot be served through"
    ):
        load_model_config(tmp_path / "qwen3", "auto")


def test_without_transformers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "GemmaForCausalLM")
    monkeypatch.setattr("caesura.scheduler.models.config.find_spec", lambda name: None)
    with pytest.raises(
        CaesuraError, match=r"GemmaForCausalLM' is not supported.*pip install 'caesura\[transformers\]'"
    ):
        load_model_config(tmp_path, "auto")


def test_configs_differ_in_what_the_forward_reads(tmp_path: Path) -> None:
    save(tmp_path, "Gemma2ForCausalLM")
    ours = load_model_config(tmp_path, "transformers")
    for changes, differing in (
        ({"attention_dropout": 0.5, "eos_token_id": 7, "transformers_version": "5.0"}, []),
        (
            {"final_logit_softcapping": 9.0, "sliding_window": 5},
            ["final_logit_softcapping", "sliding_window"],
        ),
    ):
        edit_config(tmp_path, **changes)
        assert config_difference(ours, load_model_config(tmp_path, "transformers")) == differing


def test_deterministic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaesuraError, match="model_backend"):
        EngineConfig(model_path="x", deterministic=True, model_backend="transformers")
    save(tmp_path, "GemmaForCausalLM")
    model = load(tmp_path)
    loaded = SimpleNamespace(config=model.config, model=model, device=CPU, dtype=torch.float32)
    assert "transformers" in str(why_torch(loaded))


def test_native_models_import_nothing_of_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    code = (
        "import sys, torch\n"
        "from caesura.scheduler.models.config import load_model_config\n"
        "from caesura.scheduler.models.registry import build_model\n"
        "import caesura.scheduler.runtime.process\n"
        f"build_model(load_model_config({str(tmp_path)!r}, 'auto'), torch.float32, torch.device('cpu'))\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'transformers']\n"
    )
    assert engine_template.run(code).returncode == 0


def test_the_page_names_what_is_compared() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text()
    _, _, part = page.partition("<!-- generated: transformers -->")
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \|$", part.partition("<!-- end of transformers -->")[0], re.MULTILINE
    )
    assert {name for name, _ in rows} == ARCHITECTURES.keys(), "run: python docs/generate_models.py"
    assert max(float(gap) for _, gap in rows) <= TOLERANCE


# Traced decoders: which kernels take the place of calls, and what stays with the modules


compiled_only = pytest.mark.skipif(
    best("elementwise", CPU, torch.float32) == TORCH, reason="no compiled kernels"
)


def make(folder: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    tiny_model(architecture, 1, **changes).to(dtype).save_pretrained(folder)
    return load_model(str(folder), dtype, backend="transformers")


def test_a_decoder_whose_calls_vary_is_not_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x * 1 if x.shape[1] > 8 else x)
    )
    reference = save(tmp_path, "LlamaForCausalLM")
    model = load(tmp_path)
    assert model.traced is None
    assert not model.in_one_call
    model.check()
    started: list[int] = []
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: started.append(number))
    tokens, results, due = prompt(20), [], []
    for run in (model.forward, partial(layer_by_layer, model, due=lambda layer: due.append([*started]))):
        model.forward = run
        started.clear()
        results += PagedModel(model, torch.float32).step([], [(Sequence(tokens), 20)])
    assert due == [[], [0]]
    assert torch.equal(*results)
    with torch.inference_mode():
        assert (results[0] - reference(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-4


# Norms


class Centred(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEps(LlamaRMSNorm):
    """A norm whose attribute is not what it adds."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 4 * self.variance_epsilon)


class Scaled(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 1.03 * super().forward(x)


@compiled_only
@pytest.mark.parametrize("dtype", native.FLOATS)
def test_norms_are_kernels_where_they_compute_the_same(dtype: torch.dtype) -> None:
    kernels = elementwise_for(CPU, dtype)
    assert kernels is not None
    plain, gemma = LlamaRMSNorm(40, eps=1e-6), GemmaRMSNorm(40, eps=1e-6)
    others = [kind(40, eps=1e-6) for kind in (Centred, OtherEps, Scaled)] + [nn.LayerNorm(40, bias=False)]
    decoder = nn.ModuleList([plain, gemma, *others]).to(dtype).requires_grad_(False)
    found = proven_norms(decoder, dtype, kernels)
    assert {module: norm.from_one for module, norm in found.items()} == {plain: False, gemma: True}
    assert found[plain].weight is plain.weight
    assert proven_norms(decoder, torch.float32, kernels) == {} or dtype == torch.float32


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
    model = make(tmp_path, "LlamaForCausalLM", dtype, hidden_act=activation)
    found = [call.detail for call in model.traced.plain.trace.calls if call.kind == "gate"]
    assert found == ([bend] * 2 if bend else [])
    assert model.in_one_call == (bend is not None)


@compiled_only
@pytest.mark.parametrize(("architecture", "whole"), [
    ("Qwen3", True), ("Gemma2", True),
    ("Gemma3", True),  # two rotations
    ("Phi3", True),  # checkpoints with one product
    ("GptOss", False),
    ("Granite", False),  # what a block adds is scaled
])  # fmt: skip
def test_operations_computed_by_kernels(architecture: str, whole: bool, tmp_path: Path) -> None:
    model = make(tmp_path, f"{architecture}ForCausalLM")
    assert [call.kind for call in model.traced.fused.trace.calls].count("fused") == 2
    assert model.in_one_call == whole


@compiled_only
@pytest.mark.parametrize("architecture", ["GlmForCausalLM", "Olmo2ForCausalLM", "GPTNeoXForCausalLM"])
def test_other_rotations_stay(architecture: str, tmp_path: Path) -> None:
    model = make(tmp_path, architecture)
    assert model.traced is not None
    assert model.traced.fused is None


@compiled_only
def test_a_scale_behind_the_rotation_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb

    def scaled(q: Tensor, k: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, *args, **options)
        return q * 1.1, k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", scaled)
    assert make(tmp_path, "LlamaForCausalLM").traced.fused is None


@compiled_only
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_all_layers_in_one_call_have_the_bits_of_each_by_itself(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(tmp_path, architecture, dtype)
    assert model.in_one_call
    results = []
    for way in (model.forward, partial(layer_by_layer, model)):
        model.forward = way
        paged = PagedModel(model, dtype, compiled=True)
        sequences = [Sequence(prompt(n + 1, seed)) for seed, n in enumerate((3, 15, 40))]
        results.append(paged.step([], [(each, len(each.tokens) - 1) for each in sequences]))
        results[-1] += paged.step(sequences)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@compiled_only
def test_a_token_has_the_same_bits_whatever_shares_its_step(tmp_path: Path) -> None:
    model = make(tmp_path, "Qwen3ForCausalLM")
    tokens = prompt(50)
    alone = PagedModel(model, torch.bfloat16, compiled=True).step([], [(Sequence(tokens), 50)])[0]
    paged = PagedModel(model, torch.bfloat16, compiled=True)
    sequence = Sequence(tokens)
    parts = [paged.step([], [(sequence, chunk), (Sequence(prompt(9, chunk)), 9)])[0] for chunk in (13, 1, 36)]
    assert torch.equal(torch.cat(parts), alone)


# Heads


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"])
def test_logits_are_made_where_they_are_wanted(architecture: str, tmp_path: Path) -> None:
    model = make(tmp_path, architecture, torch.float32)
    hidden = torch.randn(5, model.config.hidden_size)
    out = torch.empty(5, model.config.vocab_size)
    with torch.inference_mode():
        made = model.traced_head(hidden, out, 5)
        assert made.data_ptr() == out.data_ptr()
        model.traced_head = None
        expected = model.logits(hidden)
    assert torch.equal(made, expected)
    assert made.shape == expected.shape
