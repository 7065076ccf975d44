"""Models that transformers has and the engine has no file for."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.architectures import ARCHITECTURES, REFUSED, tiny_config, tiny_model
from support.checkpoints import edit_config, make_checkpoint
from support.foreign_comparison import compare, prompt
from support.forward_batches import PagedModel, Sequence, load_model
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.execution.kernel_report import why_torch
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.layers.linear import Linear
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.models.base import CausalLM
from caesura.scheduler.models.config import config_difference, load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.models.transformers_backend.products import SharedProduct
from caesura.scheduler.runtime.config import EngineConfig
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint

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
WAYS = {
    "prefill", "chunked prefill", "prefix hit", "decode", "mixed", "in_place update", "retract and update",
}  # fmt: skip
CPU = torch.device("cpu")


def storage(model: CausalLM) -> dict[str, bytes]:
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in model.named_storage()}


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
    slots = (
        compared.model.weight_slots().keys()
    )  # which come first: GPT-2 says that it ignores "attn.bias", of any name
    assert slots == {name for name in names if name in slots or not compared.model.is_skipped(name)}


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DiffLlamaForCausalLM", "do not attend once each"),
        ("DogeForCausalLM", "a mask of its own"),
        ("FalconForCausalLM", "AttentionInterface"),
        ("JetMoeForCausalLM", "its forward fails over packed requests"),
        ("Lfm2ForCausalLM", "its forward fails over packed requests"),
        ("Llama4ForCausalLM", "chunked_attention"),
        ("MiMoV2FlashForCausalLM", "heads of different numbers or sizes"),
        ("MiniMaxForCausalLM", "linear_attention"),
        ("StableLmForCausalLM", "AttentionInterface"),
    ],
)
def test_refused_by_name(architecture: str, reason: str, tmp_path: Path) -> None:
    assert architecture in REFUSED
    tiny_config(architecture, architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(CaesuraError, match=reason) as caught:
        build(tmp_path)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert architecture in caught.value.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["MyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "my.My"}},
            "code of the checkpoint",
        ),
        ({"architectures": ["MyForCausalLM"]}, "no causal language model"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "no causal language model"),
        ({"architectures": ["LlamaModel"]}, "no causal language model"),
        ({"architectures": None}, "no causal language model"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_refused_configs(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, **changes)
    with pytest.raises(CaesuraError, match=reason) as caught:
        load_model_config(tmp_path, "transformers")
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL


def test_values_that_the_config_class_does_not_take(tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM")
    for name, value in (
        ("hidden_size", "wide"),
        ("num_hidden_layers", 0),
        ("rope_parameters", [1]),
        ("dtype", "int8"),
        ("dtype", {"text_config": "bfloat16"}),
    ):
        edit_config(tmp_path, **{name: value})
        with pytest.raises(CaesuraError) as caught:
            load_model_config(tmp_path, "transformers")
        assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
        save(tmp_path, "LlamaForCausalLM")


def test_an_epsilon_that_the_config_class_has_as_null(tmp_path: Path) -> None:
    save(tmp_path, "Cohere2ForCausalLM")
    edit_config(tmp_path, rms_norm_eps=None)
    assert load_model_config(tmp_path, "transformers").rms_norm_eps > 0


def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x + 0.1 * x.roll(1, dims=1))
    )


def test_the_check_at_load_finds_what_looks_across_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "LlamaForCausalLM")
    model = load(tmp_path)
    model.check()
    leaking(monkeypatch)
    with pytest.raises(CaesuraError, match="looks across tokens") as caught:
        model.check()
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL


def test_the_check_at_load_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    reference = save(tmp_path, "Gemma2ForCausalLM")
    model = load(tmp_path)
    before = storage(model)
    model.check()
    assert storage(model) == before
    tokens = prompt(20)
    (got,) = PagedModel(model, torch.float32).step([], [(Sequence(tokens), 20)])
    with torch.inference_mode():
        assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() <= TOLERANCE


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
    a, b = (nn.functional.linear, weights["a.weight"]), (nn.functional.linear, weights["b.weight"])
    for number, tensor, (compute, weight) in (
        (0, x, a),
        (1, y, b),
        (1, x, b),
        (1, x, b),
        (0, x, a),
        (0, y, a),
        (1, y, b),
    ):
        torch.testing.assert_close(shared.part(number, tensor), compute(tensor, weight))


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


def test_a_batch_with_a_long_row_does_not_change_the_frequencies_of_a_short_one(tmp_path: Path) -> None:
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


def by_layer_of(model: Any, seen: list[Any], note: Any) -> Any:
    def forward(batch: Any, backend: Any) -> Tensor:
        steps = model.forward_by_layer(batch, backend)
        while True:
            try:
                seen.append((next(steps), note()))
            except StopIteration as end:
                return end.value

    return forward


@pytest.mark.parametrize("compiled", [False, True])
def test_layer_by_layer(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled and best("attention", CPU, torch.float32) == TORCH:
        pytest.skip("no compiled kernels")
    save(tmp_path, "Gemma3ForCausalLM")
    computed: list[str] = []
    forward = Linear.forward

    def noting(self: Linear, *args: Any, **options: Any) -> Tensor:
        computed.append(next(self.parameters()).name)
        return forward(self, *args, **options)

    monkeypatch.setattr(Linear, "forward", noting)
    model = load(tmp_path)
    paged, sequence = PagedModel(model, torch.float32, compiled=compiled), Sequence(prompt(20))
    seen: list[tuple[int, set[str]]] = []
    whole = model.forward
    model.forward = by_layer_of(model, seen, lambda: {name.partition("self_attn")[0] for name in computed})
    (got,) = paged.step([], [(sequence, 20)])
    done = {f"layers.0.{name}.weight" for name in ("mlp.gate_proj+up_proj", "mlp.down_proj")} | {"layers.0."}
    assert seen == [(0, set()), (1, done)]
    model.forward = whole
    paged = PagedModel(model, torch.float32, compiled=compiled)
    assert torch.equal(got, paged.step([], [(Sequence(sequence.tokens), 20)])[0])


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


def test_native_models_agree_with_theirs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tied=True)
    tokens = prompt(40)
    results = [
        PagedModel(load_model(str(tmp_path), torch.float32, backend=backend), torch.float32).step(
            [], [(Sequence(tokens), 40)]
        )[0]
        for backend in ("native", "transformers")
    ]
    assert (results[0] - results[1]).abs().max() <= TOLERANCE


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
    loaded = type(
        "Loaded", (), {"config": model.config, "model": model, "device": CPU, "dtype": torch.float32}
    )
    assert "transformers" in str(why_torch(loaded))


def test_an_update_in_pieces_that_ends_early_leaves_tensors_due(tmp_path: Path) -> None:
    save(tmp_path / "one", "MixtralForCausalLM")
    save(tmp_path / "two", "MixtralForCausalLM", seed=2)
    model = load(tmp_path / "one")
    loader = WeightLoader(model)
    load_from_disk(loader, open_checkpoint(tmp_path / "two"), 64)
    assert loader.is_whole
    assert loader.missing(loader.written) == []
    assert storage(model) == storage(load(tmp_path / "two"))


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
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_names_what_is_compared() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text()
    _, _, part = page.partition("<!-- generated: transformers -->")
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \|$", part.partition("<!-- end of transformers -->")[0], re.MULTILINE
    )
    assert {name for name, _ in rows} == ARCHITECTURES.keys(), "run: python docs/generate_models.py"
    assert max(float(gap) for _, gap in rows) <= TOLERANCE
