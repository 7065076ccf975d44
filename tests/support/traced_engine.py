"""An engine's runner on fake CUDA tensors (``fake_cuda.py``), made as an engine's start makes it, and steps
of every kind.

Sizes are those of published models, so that what depends on sizes is traced as it would run; layers are few.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from caesura.scheduler import kernels
from caesura.scheduler.attention import backends, flashinfer
from caesura.scheduler.execution import build, graphs
from caesura.scheduler.execution.forward import ForwardBatch, InputTokens, SpecialRows
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.layers import experts, fp8_products
from caesura.scheduler.layers.lora import AdapterSlots
from caesura.scheduler.models.config import parse_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import SINGLE, TensorParallel
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.weights.loaded_model import LoadedModel
from caesura.scheduler.weights.loader import WeightLoader

from .fake_cuda import DEVICE, FakeGraph, Record, Tracer
from .flashinfer_interface import Interface
from .forward_batches import Row, forward_batch, greedy_sampling

ROWS, CHUNK, CONTEXT = 8, 512, 4096


def _config(architecture: str, hidden: int, **further: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "head_dim": 128,
        "eos_token_id": 1,
        **further,
    }


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_DENSE = {"intermediate_size": 12288, **_HEADS}
_EXPERTS = {
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
_LATENT = {
    "head_dim": 64,
    "vocab_size": 102400,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "routed_scaling_factor": 1.0,
}
_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

_GPT_OSS = {
    "head_dim": 64,
    "vocab_size": 201088,
    "intermediate_size": 2880,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "sliding_window": 128,
}
_LATENT_V3 = {
    **_LATENT,
    "q_lora_rank": 1536,
    "n_routed_experts": 8,
    "intermediate_size": 1408,
    "n_shared_experts": 1,
    "n_group": 2,
    "num_experts_per_tok": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": _config(
        "LlamaForCausalLM", 4096, **{**_DENSE, "intermediate_size": 14336, "vocab_size": 128256}
    ),
    "mistral": _config("MistralForCausalLM", 4096, **_DENSE, sliding_window=None),
    "qwen2": _config(
        "Qwen2ForCausalLM", 3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4
    ),
    "qwen3": _config("Qwen3ForCausalLM", 4096, **_DENSE),
    "qwen3 tied": _config("Qwen3ForCausalLM", 1024, **{**_DENSE, "tie_word_embeddings": True}),
    **dict.fromkeys(
        ("qwen3 fp8", "qwen3 fp8 torch", "qwen3 fp8 blackwell"),
        _config("Qwen3ForCausalLM", 4096, **_DENSE, **_FP8),
    ),
    "qwen3_moe": _config("Qwen3MoeForCausalLM", 2048, **_EXPERTS),
    **dict.fromkeys(
        ("qwen3_moe fp8", "qwen3_moe fp8 deep_gemm", "qwen3_moe fp8 blackwell"),
        _config("Qwen3MoeForCausalLM", 2048, **{**_EXPERTS, "num_experts": 16}, **_FP8),
    ),
    "gpt_oss": _config("GptOssForCausalLM", 2880, **_GPT_OSS),
    "deepseek_v2": _config("DeepseekV2ForCausalLM", 2048, **_LATENT),
    "deepseek_v3 fp8": _config("DeepseekV3ForCausalLM", 2048, **_LATENT_V3, **_FP8),
}


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """A runner, as :func:`traced_engine` has it."""

    tracer: Tracer
    runner: ModelRunner
    vocab_size: int
    started: Record
    """Record of the start: warm-up in the phase ``start``, graphs in the phases ``capture`` and ``capture
    head``.
    """

    def step(self, batch: ForwardBatch) -> Record:
        """Launch a step and fetch its results: phases ``plan``, ``forward``, ``sample`` and ``fetch``."""
        self.tracer.begin("plan")
        output = self.runner.execute(batch)
        self.tracer.phase = "fetch"
        output.fetch()
        return self.tracer.record

    def set_last_tokens(self) -> Record:
        self.tracer.begin("last tokens")
        self.runner.set_last_tokens(np.arange(3), np.arange(3, dtype=np.int32))
        return self.tracer.record


@contextmanager
def traced_engine(
    tracer: Tracer,
    model: str,
    backend: str,
    num_layers: int,
    *,
    by_torch: bool = False,
    autotune: bool = True,
    adapters: AdapterSlots | None = None,
    parallel: TensorParallel = SINGLE,
) -> Iterator[TracedEngine]:
    """
    Args:
        tracer: of :func:`~.fake_cuda.fake_cuda`.
        model: of :data:`MODELS`.
        backend: as ``EngineConfig.attention_backend``.
        by_torch: nothing is computed by kernels in Triton.
        autotune: as ``EngineConfig.autotune``.
        adapters: slots of the engine, which nothing is loaded into.
        parallel: ranks with rows and whole experts of their own.
    """
    library = Interface(tracer.launch)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in library.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(flashinfer, "find_spec", lambda name: object())
        patch.setattr(backends, "failure_of", lambda choice, shape: None)  # a trial step has no results here
        _choose_products(model, tracer, patch)
        patch.setattr(graphs, "ladder", lambda largest: [largest])
        _mark_captures(tracer, patch)
        if by_torch:
            patch.setenv("CAESURA_KERNELS", kernels.TORCH)
        kernels.why_not_triton.cache_clear()  # what is said of a fake device
        tracer.begin("start")
        config = parse_model_config({**MODELS[model], "num_hidden_layers": num_layers})
        size = parallel.size
        built = build_model(config, torch.bfloat16, DEVICE, parallel, adapters, ep=size, dp_attention=size)
        parts = {"config": config, "model": built, "loader": WeightLoader(built), "parallel": parallel}
        loaded = LoadedModel(**parts, dtype=torch.bfloat16, device=DEVICE, digest="", adapters=adapters)
        pages = 1 + ROWS * CONTEXT // 16
        engine = EngineConfig(
            model_path="",
            device=str(DEVICE),
            max_running_requests=ROWS,
            chunked_prefill_size=CHUNK,
            context_len=CONTEXT,
            attention_backend=backend,
            autotune=autotune,
            tp=size,
            dp_attention=size,
        )
        pool, routing = build.make_pool(loaded, pages), build.build_routing_pool(loaded, pages)
        runner = build.build_runner(engine, loaded, pool, routing)
        _mark_phases(tracer, runner, patch)
        yield TracedEngine(tracer, runner, config.vocab_size, tracer.record)
    kernels.why_not_triton.cache_clear()


def _choose_products(model: str, tracer: Tracer, patch: pytest.MonkeyPatch) -> None:
    dense = {"torch": 1, "blackwell": 2}.get(model.rpartition(" ")[2], 0)
    grouped = {"deep_gemm": 1, "blackwell": 2}.get(model.rpartition(" ")[2], 0)
    patch.setattr(fp8_products, "dense_for", lambda device: fp8_products.DENSE[dense][1])
    for module in (fp8_products, experts):
        patch.setattr(module, "experts_for", lambda device: fp8_products.EXPERTS[grouped][1])
    patch.setattr(experts, "multiplies_experts", lambda device: True)  # a trial product has no results here
    deep_gemm, name = ModuleType("deep_gemm"), "m_grouped_fp8_gemm_nt_contiguous"
    setattr(deep_gemm, name, lambda a, b, d, grouped_layout: tracer.launch(name, a, b, d, grouped_layout))
    patch.setitem(sys.modules, "deep_gemm", deep_gemm)


def _mark_phases(tracer: Tracer, runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    def marked(phase: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            tracer.phase = phase
            return compute(*args)

        return run

    patch.setattr(runner.model, "forward", marked("forward", runner.model.forward))
    patch.setattr(runner.model, "logits", marked("sample", runner.model.logits))
    replay = FakeGraph.replay
    first, second = marked("forward", replay), marked("sample", replay)
    patch.setattr(FakeGraph, "replay", lambda graph: (first if tracer.phase == "plan" else second)(graph))


def _mark_captures(tracer: Tracer, patch: pytest.MonkeyPatch) -> None:
    capture_head = graphs.DecodeGraphs._capture_head

    def marked(*args: Any) -> Any:
        tracer.capture_phase = "capture head"
        try:
            return capture_head(*args)
        finally:
            tracer.capture_phase = "capture"

    patch.setattr(graphs.DecodeGraphs, "_capture_head", marked)


def decode(rows: int = ROWS - 2) -> ForwardBatch:
    return mixed([], rows)


def mixed(prompts: Sequence[int] = (300, 212), rows: int = ROWS // 2) -> ForwardBatch:
    """Build ``rows`` that decode beside chunks of so many tokens, the last of their prompts."""
    q_lens = [1] * rows + list(prompts)
    kv_lens = [1000 + 7 * row for row in range(rows)] + [length + 128 for length in prompts]
    count, width = len(q_lens), -(-max(kv_lens) // 16)
    made = [
        Row([0] * new, length - new, list(range(1 + row * width, 1 + (row + 1) * width)))
        for row, (new, length) in enumerate(zip(q_lens, kv_lens, strict=True))
    ]
    sampling = replace(
        greedy_sampling(count),
        temperature=torch.full((count,), 0.7),
        greedy=torch.zeros(count, dtype=torch.bool),
        any_sampled=True,
    )
    return replace(
        forward_batch(made, rows),
        sample_tokens=torch.tensor(q_lens).cumsum(0) - 1,
        sample_slots=torch.arange(count),
        sampling=sampling,
    )


def _sampling(**changes: Any) -> ForwardBatch:
    batch = decode()
    return replace(batch, sampling=replace(batch.sampling, **changes))


def _rows(**fields: Any) -> SpecialRows:
    """Build special rows of which nothing is wanted but what ``fields`` say."""
    none, ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
    values: dict[str, Any] = dict.fromkeys(("repetition", "frequency", "presence"), none)
    values |= dict.fromkeys(("counters", "restarted", "prompt_at", "output_at"), ids)
    values |= dict.fromkeys(("top", "num_masked", "num_counters"), 0)
    values |= dict.fromkeys(("in_one_call", "repeats"), False)
    values["edited"] = np.ones(len(fields["rows"]), np.bool_)
    return SpecialRows(**{**values, **fields})


def special(vocab_size: int) -> ForwardBatch:
    """Build two rows with penalties, one of which begins, one with biases."""
    two = torch.ones(2)
    rows = _rows(
        rows=torch.tensor([0, 2, 4]),
        repetition=1.1 * two,
        frequency=0.5 * two,
        presence=two,
        counters=torch.tensor([0, 1]),
        restarted=torch.tensor([0]),
        prompt_at=torch.tensor([1, 2]),
        output_at=torch.tensor([vocab_size - 1]),
        bias_ids=torch.zeros((3, 2), dtype=torch.int64),
        bias=torch.zeros((3, 2)),
        wants=torch.tensor([1, 2]),
        wants_host=np.array([1, 2]),
        top=5,
        masked=torch.tensor([False, False]),
        token_ids=torch.zeros((2, 3), dtype=torch.int64),
        num_counters=2,
    )
    return _sampling(special=rows, want_raw=True, want_sampled=True)


def masked(vocab_size: int) -> ForwardBatch:
    """Build a step with filters, of which two rows want to know what these kept."""
    rows = _rows(
        rows=torch.tensor([0, 2]),
        bias_ids=torch.empty((2, 0), dtype=torch.int64),
        bias=torch.empty((2, 0)),
        wants=torch.tensor([0, 1]),
        wants_host=np.array([0, 1]),
        masked=torch.tensor([True, True]),
        num_masked=2,
        token_ids=torch.empty((2, 0), dtype=torch.int64),
    )
    step = STEPS["top_k"](vocab_size)
    return replace(step, sampling=replace(step.sampling, special=rows, want_sampled=True))


def prompt_logprobs() -> ForwardBatch:
    """Build a mixed step that wants them of the tokens of its first chunk."""
    count = 300
    inputs = InputTokens(
        tokens=ROWS // 2 + torch.arange(count),
        targets=torch.zeros(count, dtype=torch.int64),
        top=3,
        token_ids=torch.zeros((count, 2), dtype=torch.int64),
    )
    return replace(mixed(), inputs=inputs)


STEPS: dict[str, Callable[[int], ForwardBatch]] = {
    "decode": lambda vocab_size: decode(),
    "greedy": lambda vocab_size: _sampling(greedy=torch.ones(ROWS - 2, dtype=torch.bool), any_sampled=False),
    "mixed": lambda vocab_size: mixed(),
    "top_k": lambda vocab_size: _sampling(
        top_k=torch.full((ROWS - 2,), 20), largest_top_k=20, any_filtered=True
    ),
    "top_p": lambda vocab_size: _sampling(top_p=torch.full((ROWS - 2,), 0.95), any_filtered=True),
    "min_p": lambda vocab_size: _sampling(min_p=torch.full((ROWS - 2,), 0.1), any_filtered=True),
    "raw": lambda vocab_size: _sampling(want_raw=True, want_sampled=True),
    "special": special,
    "masked": masked,
    "prompt": lambda vocab_size: prompt_logprobs(),
}
"""Kinds of steps, of a model with so large a vocabulary."""
