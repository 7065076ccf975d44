"""Hybrids against transformers: log-probabilities of the whole vocabulary, however a token was computed.

Every layer's state goes through chunks, decode steps, kept prefixes, pauses, updates and failures here; which
row of states is whose at each of these is checked with a scripted model in ``test_states.py``.
"""

import pytest
import torch
from support.checkpoints import edit_config, make_checkpoint, make_dequantized_checkpoint, make_fp8_checkpoint
from support.faults import NO_MEMORY, Fault
from support.lanes import quick
from support.scripted import EngineDriver, tokens_of, vocabulary_of

from caesura.io_struct import CaesuraError
from caesura.scheduler.execution.build import load_model
from caesura.scheduler.kernels.native import why_not
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.runtime.engine_config import EngineConfig

VOCAB, TOLERANCE = 97, 1e-4
OPTIONS = {"chunked_prefill_size": 48, "max_running_requests": 4, "kv_pool_tokens": 2048}


class Models:
    """A family's two checkpoints, what transformers computes with them, and an engine that serves them."""

    def __init__(self, folder, family, tp, sizes):
        self.paths, self.tp = [str(folder / name) for name in ("a", "b")], tp
        self.references = [
            make_checkpoint(path, family, seed=seed, **sizes) for seed, path in enumerate(self.paths)
        ]
        self.driver = EngineDriver(self.paths[0], scripted=False, tp=tp, **OPTIONS)

    @torch.no_grad()
    def logprobs(self, tokens, which=0):
        return self.references[which](torch.tensor([tokens])).logits[0].log_softmax(-1)

    def set_weights(self, which):
        self.driver.flush(torch_empty_cache=False)
        assert self.driver.update(self.paths[which]).committed

    @property
    def runner(self):
        runner = self.driver.engine.runner
        return runner if self.tp == 1 else runner.own


THREE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 36,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
"""Heads that three ranks divide; key and value heads of two ranks are those of SIZES."""


def cases():
    for family, marks in (
        ("qwen3-next", []),
        ("qwen3.5", [pytest.mark.long]),
        ("qwen3.5-moe", [pytest.mark.long]),
    ):
        yield pytest.param((family, 1, {}), id=family, marks=marks)
    for marks, (family, tp, sizes) in (
        ([], ("qwen3.5", 2, {})),
        ([pytest.mark.long], ("qwen3-next", 2, {})),
        ([pytest.mark.long], ("qwen3-next", 3, {**THREE, "shared_expert_intermediate_size": 57})),
        ([pytest.mark.long], ("qwen3.5", 3, THREE)),
    ):
        yield pytest.param(
            (family, tp, sizes), id=f"{family} on {tp} ranks", marks=[pytest.mark.slow, *marks]
        )


@pytest.fixture(scope="module", params=cases())
def loaded(tmp_path_factory, request):
    models = Models(tmp_path_factory.mktemp("hybrid"), *request.param)
    with models.driver:
        yield models


@pytest.fixture
def models(loaded):
    loaded.set_weights(0)
    return loaded


def prompt_of(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def send(driver, prompt, new_tokens, seed=0, **fields):
    return driver.generate(
        prompt, new_tokens, seed=seed, return_logprob=True, top_logprobs_num=VOCAB, **fields
    )


def gap(models, driver, rid, prompt, which=0):
    result = driver.result(rid)
    tokens, count = [*prompt, *tokens_of(result)], len(tokens_of(result))
    expected = models.logprobs(tokens, which)[-count - 1 : -1]
    return float((vocabulary_of(result.output_top_logprobs) - expected).abs().max())


def check(models, rids, which=0):
    for rid, prompt in rids.items():
        assert gap(models, models.driver, rid, prompt, which) < TOLERANCE
    models.driver.engine.cache.check()


def test_prompts_in_chunks_and_beside_others(models):
    driver, prompts = models.driver, [prompt_of(length, length) for length in (3, 130, 16, 71)]
    rids = {send(driver, prompt, 20, seed=number): prompt for number, prompt in enumerate(prompts)}
    driver.tick(3)
    late = prompt_of(90, 5)
    rid = send(driver, late, 5, logprob_start_len=0)
    driver.run_until_idle()
    check(models, {**rids, rid: late})
    given = vocabulary_of(driver.result(rid).input_top_logprobs)
    assert float((given - models.logprobs(late)[:-1]).abs().max()) < TOLERANCE


def test_a_kept_prefix_equals_its_recomputation(models):
    driver, prompt = models.driver, prompt_of(83, 1)
    first = send(driver, prompt, 30)
    driver.run_until_idle()
    longer = [*prompt, *tokens_of(driver.result(first)), 7, 8, 9]
    rids = {send(driver, each, 12, seed=4): each for each in (prompt, longer, [*prompt[:50], 5, 4])}
    driver.run_until_idle()
    check(models, {first: prompt, **rids})
    assert [driver.result(rid).cached_tokens for rid in rids] == [80, 112, 0]


@torch.no_grad()
def test_a_state_outlives_an_update_in_place(models):
    driver, prompt = models.driver, prompt_of(45, 3)
    rid = send(driver, prompt, 40)
    driver.tick(17)
    driver.pause("in_place")
    assert driver.update(models.paths[1], flush_cache=False)
    driver.go_on(torch_empty_cache=False)
    driver.run_until_idle()
    result = driver.result(rid)
    old, new = result.weight_versions
    assert new.stale_kv
    assert (old.start, new.end) == (0, 40)
    tokens = [*prompt, *tokens_of(result)]
    split = len(prompt) + old.end - 1  # the last token of the first span was sampled, and not computed
    before = models.references[0](torch.tensor([tokens[:split]]), use_cache=True)
    expected = [before.logits[0, len(prompt) - 1 :]]
    for position in range(split, len(tokens) - 1):
        one = torch.tensor([[tokens[position]]])
        step = models.references[1](one, past_key_values=before.past_key_values, use_cache=True)
        expected.append(step.logits[0])
    gaps = vocabulary_of(result.output_top_logprobs) - torch.cat(expected).log_softmax(-1)
    assert float(gaps.abs().max()) < TOLERANCE
    again = send(driver, prompt, 3)
    driver.run_until_idle()
    check(models, {again: prompt}, which=1)
    assert driver.result(again).cached_tokens == 0


def test_no_state_survives_an_update_or_a_release(models):
    driver, prompt = models.driver, prompt_of(60, 6)
    send(driver, prompt, 3)
    driver.run_until_idle()
    models.set_weights(1)
    rid = send(driver, prompt, 20)
    driver.run_until_idle()
    check(models, {rid: prompt}, which=1)
    assert driver.result(rid).cached_tokens == 0
    driver.pause("retract")
    driver.release("kv_cache")
    pool = models.runner.backend.pool
    assert not any(storage.any() for layer in range(3) for storage in pool.layer(layer))
    driver.resume("kv_cache")
    driver.go_on(torch_empty_cache=False)
    again = send(driver, prompt, 20)
    driver.run_until_idle()
    assert driver.result(again).output_logprobs == driver.result(rid).output_logprobs
    config = EngineConfig(model_path=models.paths[1], dtype="float32", device="cpu")
    cold = load_model(config, parallel=TensorParallel(0, models.tp))
    ours = dict(models.runner.model.named_storage())
    for name, tensor in cold.model.named_storage():
        assert torch.equal(ours[name], tensor), name


def test_a_step_that_ran_out_of_memory_between_two_layers(models, monkeypatch):
    driver, prompts = models.driver, [prompt_of(60, 11), prompt_of(20, 12)]
    rids = {send(driver, prompt, 20): prompt for prompt in prompts}
    driver.tick(9)
    monkeypatch.setattr(models.runner.model, "_kernel", None)  # layer by layer
    with Fault(models.runner.backend, "delta" if why_not() else "compiled", NO_MEMORY[1], {2}) as fault:
        driver.tick(1)
    assert fault.raised
    driver.run_until_idle()
    check(models, rids)
    assert {driver.result(rid).finish_reason.type for rid in rids} == {"length"}
    assert sum(driver.result(rid).num_retractions for rid in rids) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plain", "tp"),
    quick([("qwen3-next", ["ba"], 1), ("qwen3.5", ["b", "a"], 2), ("qwen3-next", ["ba"], 2)], 2),
)
def test_fp8_checkpoints_with_plain_narrow_projections(family, plain, tp, tmp_path):
    blocks, skipped = (2, 4), (*(f"in_proj_{name}" for name in plain), "mlp.shared_expert_gate")
    make_checkpoint(tmp_path / "plain", family, dtype=torch.bfloat16)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", blocks, skipped)
    make_dequantized_checkpoint(tmp_path / "fp8", tmp_path / "wide", blocks, torch.float32)
    found, prompt = [], prompt_of(90, 3)
    for folder, ranks in (("wide", 1), ("fp8", tp)):
        path = str(tmp_path / folder)
        with EngineDriver(path, scripted=False, tp=ranks, dtype="float32", **OPTIONS) as driver:
            rid = send(driver, prompt, 20)
            driver.run_until_idle()
            found.append(driver.result(rid))
    assert tokens_of(found[0]) == tokens_of(found[1])
    wide, narrow = (vocabulary_of(each.output_top_logprobs) for each in found)
    assert float((wide - narrow).abs().max()) < TOLERANCE


def refused(folder, **options):
    with pytest.raises(CaesuraError) as error:
        EngineDriver(folder, scripted=False, **OPTIONS, **options)
    return error.value


def test_unsupported_hybrid_features_are_refused_by_name(tmp_path_factory):
    plain, hybrid = (str(tmp_path_factory.mktemp("refused") / name) for name in ("plain", "hybrid"))
    make_checkpoint(plain, "qwen3")
    make_checkpoint(hybrid, "qwen3.5")
    error = refused(plain, reference_model_path=hybrid)
    assert (error.code, error.detail["fields"]) == ("unsupported_model", ["architectures"])
    for field, value in (
        ("layer_types", ["linear_attention"] * 4),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("linear_num_key_heads", 3),
    ):
        folder = str(tmp_path_factory.mktemp("refused"))
        make_checkpoint(folder, "qwen3.5")
        edit_config(folder, **{field: value})
        with pytest.raises(CaesuraError, match=field):
            load_model_config(folder)


def test_layers_by_interval_and_names_of_older_configs(tmp_path):
    make_checkpoint(tmp_path, "qwen3-next", layer_types=None, full_attention_interval=2)
    found = load_model_config(str(tmp_path))
    assert found.delta.layers == (True, False, True, False)
    edit_config(tmp_path, layer_types=None, full_attention_interval=2, rope_parameters=None, rope_theta=1e6)
    older = load_model_config(str(tmp_path))
    assert (older.delta, older.rotary_dim) == (found.delta, 4)
