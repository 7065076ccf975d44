"""Models divided among processes: the logits of transformers and of one rank, on every rank the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint, make_dequantized_checkpoint, make_fp8_checkpoint
from support.lanes import quick
from support.rank_jobs import alone_and_beside_others, bits_each_way, logits_of, lost_within_a_step, sampled
from support.ranks import Ranks

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.kernels import native
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model, require_ranks
from caesura.scheduler.parallel.group import SINGLE, TensorParallel

TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels")


def heads(query: int, kv: int, size: int, hidden: int) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": size, "hidden_size": hidden}


SIX = heads(6, 6, 8, 36)
CASES = {
    "llama": ("llama", 2, {}),
    "llama-3": ("llama", 3, SIX),
    "llama-bias": ("llama", 2, {"attention_bias": True}),
    "mistral-tied": ("mistral", 2, {"tied": True}),
    "mistral-3": ("mistral", 3, heads(3, 3, 14, 42)),
    "qwen2": ("qwen2", 2, {}),
    "qwen2-one-kv-head-3": ("qwen2", 3, {"tied": True, **heads(6, 1, 6, 36)}),
    "qwen3-one-kv-head": ("qwen3", 2, heads(6, 1, 8, 40)),
    "qwen3-tied-3": ("qwen3", 3, {"tied": True, **heads(6, 3, 10, 36)}),
    "qwen3-moe": ("qwen3-moe", 2, {}),
    "qwen3-moe-3": ("qwen3-moe", 3, SIX),
    "deepseek-v2": ("deepseek-v2", 2, {}),
    "deepseek-v3": ("deepseek-v3", 2, {"attention_bias": True}),
    "gemma3": ("gemma3", 2, {}),
    "gemma3-3": ("gemma3", 3, heads(6, 1, 8, 36)),
    "mixtral": ("mixtral", 2, {}),
    "qwen2-moe": ("qwen2-moe", 2, {}),
    "gpt-oss": ("gpt-oss", 2, {}),
    "gpt-oss-3": ("gpt-oss", 3, heads(6, 3, 8, 36)),
    "glm4-moe": ("glm4-moe", 2, {}),
    "deepseek-v3-3": ("deepseek-v3", 3, heads(6, 6, 6, 36)),
    "deepseek-v2-3": ("deepseek-v2", 3, heads(6, 6, 6, 36)),
    "mixtral-3": ("mixtral", 3, SIX),
    "qwen2-moe-3": ("qwen2-moe", 3, SIX | {"shared_expert_intermediate_size": 57}),
    "glm4-moe-3": ("glm4-moe", 3, SIX),
}
"""Ranks that several share a key head among them, too."""


class _Started(dict[int, Ranks]):
    """Groups by size, each started when it is asked for."""

    def __missing__(self, size: int) -> Ranks:
        self[size] = Ranks(size)
        return self[size]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Ranks]]:
    found = _Started()
    yield found
    for ranks in found.values():
        ranks.close()


def tokens(length: int = 40) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, groups: dict[int, Ranks], tmp_path: Path) -> None:
    family, size, options = CASES[name]
    reference = make_checkpoint(tmp_path, family, seed=len(name), **options)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens()])).logits[0]
    assert expected.std() > 0.3, "the tolerance would mean nothing"
    for compiled in (False, True):
        arguments = str(tmp_path), torch.float32, tokens(), compiled
        found = groups[size].call(logits_of, *arguments)
        assert found[0].shape == expected.shape
        assert (found[0] - expected).abs().max() <= TOLERANCE
        assert (found[0] - logits_of(SINGLE, *arguments)).abs().max() <= TOLERANCE
        for other in found[1:]:
            assert torch.equal(other, found[0])


SIX_EXPERTS = {"num_local_experts": 6}
GROUPED = {
    "qwen3-moe": (2, 2, {"num_experts": 6}),
    "gpt-oss": (3, 3, SIX_EXPERTS | heads(6, 3, 8, 36)),
    "deepseek-v3": (2, 2, {}),
    "qwen2-moe": (4, 2, {"num_experts": 6, **heads(4, 4, 12, 40)}),
    "mixtral": (2, 2, SIX_EXPERTS),
    "deepseek-v2": (3, 3, heads(6, 6, 6, 36)),
    "glm4-moe": (4, 2, heads(4, 4, 12, 40)),
}
"""Ranks, groups of them that have whole experts, and sizes of a model."""


@pytest.mark.parametrize("family", quick(GROUPED, 4))
def test_logits_of_whole_experts(family: str, groups: dict[int, Ranks], tmp_path: Path) -> None:
    size, ep, options = GROUPED[family]
    reference = make_checkpoint(tmp_path, family, seed=len(family), **options)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens()])).logits[0]
    for compiled in (False, True):
        found = groups[size].call(logits_of, str(tmp_path), torch.float32, tokens(), compiled, ep)
        assert (found[0] - expected).abs().max() <= TOLERANCE
        for other in found[1:]:
            assert torch.equal(other, found[0])


@pytest.mark.parametrize("size", quick([2, 3, 4]))
def test_gloo_adds_whole_experts_as_shared_memory_does(
    size: int, groups: dict[int, Ranks], tmp_path: Path
) -> None:
    sizes = SIX if size == 3 else heads(4, 4, 12, 40)
    make_checkpoint(tmp_path, "qwen3-moe", num_experts=12, **sizes)
    ranks, arguments = Ranks(size, gloo=True), (str(tmp_path), torch.float32, tokens(), True, size)
    try:
        found = ranks.call(logits_of, *arguments)
    finally:
        ranks.close()
    expected = groups[size].call(logits_of, *arguments)
    for each in found:
        assert torch.equal(each, expected[0])


@pytest.mark.parametrize("family", quick(["qwen3-moe", "mixtral", "deepseek-v3"]))
@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float32]))
def test_whole_experts_have_the_same_bits_each_way(
    family: str, dtype: torch.dtype, groups: dict[int, Ranks], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **GROUPED[family][2])
    at_once, by_threads, by_layer = groups[2].call(bits_each_way, str(tmp_path), dtype, 37, 2)[1]
    assert at_once.isfinite().all()
    assert torch.equal(at_once, by_threads)
    assert torch.equal(at_once, by_layer)
    for alone, chunked, beside in groups[2].call(alone_and_beside_others, str(tmp_path), dtype, 2):
        assert torch.equal(alone, chunked)
        assert torch.equal(alone, beside)


WIDE = {"hidden_size": 1024, "intermediate_size": 48, "max_position_embeddings": 512}


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize(("length", "overrides"), [(37, {}), (300, WIDE)], ids=["narrow", "wide"])
def test_all_layers_in_one_call_have_the_bits_of_each(
    dtype: torch.dtype, length: int, overrides: dict[str, Any], groups: dict[int, Ranks], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama", attention_bias=True, **overrides)
    found = groups[2].call(bits_each_way, str(tmp_path), dtype, length)
    for each in found[1:]:
        for ours, theirs in zip(found[0], each, strict=True):
            assert torch.equal(ours, theirs)
    at_once, by_threads, by_layer = found[0]
    assert at_once.isfinite().all()
    assert torch.equal(at_once, by_threads)
    assert torch.equal(at_once, by_layer)


@pytest.mark.parametrize("dtype", native.FLOATS)
def test_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, groups: dict[int, Ranks], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3", **SIX)
    for alone, chunked, beside in groups[3].call(alone_and_beside_others, str(tmp_path), dtype):
        assert alone.shape == (33, 97)
        assert torch.equal(alone, chunked)
        assert torch.equal(alone, beside)


def test_a_rank_that_is_lost_ends_a_step_of_all_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    ranks = Ranks(2)
    try:
        ranks.start(lost_within_a_step, str(tmp_path))
        (errors,) = ranks.results([0])
        assert errors == ("rank 0 waits for rank 1: its process has ended [internal]",) * 2
    finally:
        ranks.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_every_rank_samples_the_same_tokens(family: str, groups: dict[int, Ranks], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, seed=9)
    heads_alone, tokens_alone, logprobs_alone = sampled(SINGLE, str(tmp_path), 12)
    results = groups[2].call(sampled, str(tmp_path), 12)
    for kv_heads, found, logprobs in results:
        assert kv_heads == (1 if family.startswith("deepseek") else heads_alone // 2)
        assert (found == tokens_alone).all()
        assert abs(logprobs - logprobs_alone).max() <= TOLERANCE
        assert (logprobs == results[0][2]).all()
    assert len(set(tokens_alone.flatten().tolist())) > 5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_two_bytes(
    family: str, dtype: torch.dtype, tolerance: float, groups: dict[int, Ranks], tmp_path: Path
) -> None:
    reference = make_checkpoint(tmp_path, family, seed=3, dtype=dtype)
    with torch.inference_mode():
        expected = reference.float()(torch.tensor([tokens()])).logits[0]
    found = groups[2].call(logits_of, str(tmp_path), dtype, tokens(), True)
    assert torch.equal(found[0], found[1])
    assert (found[0].float() - expected).abs().mean() < tolerance * expected.std()


@pytest.mark.parametrize(
    ("family", "blocks"), [("qwen3", (12, 12)), ("qwen3-moe", (4, 6)), ("deepseek-v3", (4, 4))]
)
def test_fp8(family: str, blocks: tuple[int, int], groups: dict[int, Ranks], tmp_path: Path) -> None:
    plain, fp8, dequantized = tmp_path / "plain", tmp_path / "fp8", tmp_path / "dequantized"
    make_checkpoint(plain, family, seed=3, dtype=torch.bfloat16)
    make_fp8_checkpoint(plain, fp8, blocks, ())
    make_dequantized_checkpoint(fp8, dequantized, blocks)
    expected = logits_of(SINGLE, str(dequantized), torch.float32, tokens(), False)
    for ep in (1, 2) if family == "deepseek-v3" else (1,):
        found = groups[2].call(logits_of, str(fp8), torch.float32, tokens(), False, ep)
        assert torch.equal(found[0], found[1])
        assert (found[0] - expected).abs().max() <= TOLERANCE


ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
TWELVE = {"n_routed_experts": 12}


@pytest.mark.parametrize(("family", "size", "blocks", "overrides"), quick([
    pytest.param("deepseek-v3", 4, (24, 24), TWELVE, id="a rank without dense, three without shared"),
    pytest.param("deepseek-v3", 2, (16, 12), {}, id="two thirds, and shared on one"),
    pytest.param("qwen2-moe", 2, (32, 32), {"num_experts": 6}, id="gated, the last block smaller"),
    pytest.param("llama", 2, (72, 72), {}, id="all on one rank"),
]))  # fmt: skip
def test_whole_fp8_blocks_of_widths_that_do_not_divide(
    family: str,
    size: int,
    blocks: tuple[int, int],
    overrides: dict[str, Any],
    groups: dict[int, Ranks],
    tmp_path: Path,
) -> None:
    plain, fp8, dequantized = tmp_path / "plain", tmp_path / "fp8", tmp_path / "dequantized"
    make_checkpoint(plain, family, seed=3, dtype=torch.bfloat16, **overrides)
    make_fp8_checkpoint(plain, fp8, blocks, (*ATTENTION, "shared_expert_gate"))
    make_dequantized_checkpoint(fp8, dequantized, blocks)
    expected = logits_of(SINGLE, str(dequantized), torch.float32, tokens(), False)
    for compiled in (False, True):
        ep = 1 if family == "llama" else size
        found = groups[size].call(logits_of, str(fp8), torch.float32, tokens(), compiled, ep)
        assert (found[0] - expected).abs().max() <= TOLERANCE
        for other in found[1:]:
            assert torch.equal(other, found[0])


@pytest.mark.parametrize(("family", "ranks", "overrides", "field"), [
    ("llama", 3, {}, "num_attention_heads"),
    ("qwen3", 3, heads(6, 2, 8, 40), "num_key_value_heads"),
    ("mistral", 2, {"intermediate_size": 71}, "intermediate_size"),
    ("qwen3-moe", 2, {"moe_intermediate_size": 9}, "moe_intermediate_size"),
    ("qwen2-moe", 2, {"shared_expert_intermediate_size": 9}, "shared_expert_intermediate_size"),
    ("qwen3.5", 4, {}, "linear_num_key_heads"),
    ("deepseek-v3", 3, {}, "num_attention_heads"),
    ("llama", 4, {"vocab_size": 9}, "vocab_size"),
])  # fmt: skip
def test_indivisible_sizes_are_refused_by_name(
    family: str, ranks: int, overrides: dict[str, Any], field: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **overrides)
    config = load_model_config(tmp_path)
    for rank in range(ranks):
        with pytest.raises(CaesuraError, match=field) as caught:
            build_model(config, torch.float32, torch.device("cpu"), TensorParallel(rank, ranks))
        assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
        assert caught.value.detail["fields"] == [field]


@pytest.mark.parametrize(("family", "ranks", "ep", "reason"), [
    ("qwen3", 2, 2, "Qwen3ForCausalLM has no routed experts to divide among 2 groups: leave out ep"),
    ("qwen3-moe", 2, 2, "num_experts = 5 is not a multiple of 2"),
])  # fmt: skip
def test_whole_experts_that_no_group_has_are_refused(
    family: str, ranks: int, ep: int, reason: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family)
    with pytest.raises(CaesuraError, match=reason) as caught:
        require_ranks(load_model_config(tmp_path), ranks, ep)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL


@pytest.mark.parametrize(("family", "module"), [("qwen3", "q_proj"), ("deepseek-v3", "q_b_proj")])
def test_a_border_within_an_fp8_block_is_refused_by_name(family: str, module: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", family, dtype=torch.bfloat16)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (128, 128), ())
    config = load_model_config(tmp_path / "fp8")
    with pytest.raises(CaesuraError, match=module) as caught:
        build_model(config, torch.float32, torch.device("cpu"), TensorParallel(0, 2))
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
