"""LoRA adapters through a process and the client, compared with PEFT over transformers."""

import json
import shutil
from collections import deque

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.lora import (
    ALL_LINEAR,
    ATTENTION,
    EXPERTS,
    checksums,
    edit_adapter,
    logprobs_by_peft,
    make_adapter,
    merge_adapter,
    split_experts,
)
from support.plain_trainer import weights_of

from caesura.client import (
    EngineError,
    MemoryReleased,
    SamplingParams,
    UnknownAdapter,
    Unsupported,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import WeightUpdateGroup
from caesura.io_struct import LoadAdapterReqInput, LoadAdapterReqOutput

OPTIONS = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "kv_pool_tokens": 4096, "check_ledger": True,
    "log_level": "WARNING", "enable_lora": True, "max_lora_rank": 8, "max_loras": 3,
}  # fmt: skip
PROMPTS = [[3 + (31 * row + 7 * i) % 90 for i in range(20 + 5 * row)] for row in range(6)]
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
FAMILIES = {
    "llama": [*ALL_LINEAR, "lm_head"],
    "qwen3.5": ["in_proj_qkv", "out_proj", "q_proj", "up_proj"],
    "gemma3": ["k_proj", "o_proj", "down_proj"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "qwen3-moe": ATTENTION,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters") / "base"
    make_checkpoint(path, "qwen3", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def engine(base):
    with launch_scheduler(base, **OPTIONS) as client:
        yield client


@pytest.fixture
def client(engine):
    yield engine
    for each in engine.status().adapters:
        if not each.replaced:
            engine.unload_adapter(each.name)


def mixed(client, adapters):
    handles = [
        client.submit(prompt, GREEDY, adapter=name, return_logprob=True)
        for prompt, name in zip(PROMPTS, adapters, strict=True)
    ]
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("family", quick(FAMILIES, 2))
def test_mixed_batches_compute_what_peft_does(family, tmp_path):
    base = tmp_path / "base"
    make_checkpoint(base, family)
    paths = {
        "a": make_adapter(base, tmp_path / "a", FAMILIES[family], rank=4),
        "b": make_adapter(base, tmp_path / "b", FAMILIES[family][:1], rank=7, seed=1, use_rslora=True),
        None: None,
    }
    names = ["a", None, "b", "a", None, "b"]
    with launch_scheduler(base, **OPTIONS) as client:
        for name in "ab":
            client.load_adapter(name, paths[name])
        found = mixed(client, names)
        for prompt, name, output in zip(PROMPTS, names, found, strict=True):
            ids = [*prompt, *output.output_ids]
            expected = logprobs_by_peft(base, paths[name], ids, len(prompt))
            np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)
            alone = client.generate(prompt, GREEDY, adapter=name, return_logprob=True)
            assert (alone.output_ids, alone.output_logprobs) == (output.output_ids, output.output_logprobs)


def tokens(client, adapter):
    """Return what is sampled where no token is certain."""
    flat = SamplingParams(max_new_tokens=6, temperature=9.0, seed=3, ignore_eos=True)
    return [output.output_ids for output in client.generate(PROMPTS, flat, adapter=adapter)]


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_the_head_change_every_logprob(tmp_path, tied):
    base = tmp_path / "base"
    make_checkpoint(base, "qwen3", num_hidden_layers=2, tie_word_embeddings=tied)
    path = make_adapter(base, tmp_path / "a", ["lm_head"])
    params = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with launch_scheduler(base, **OPTIONS) as client:
        loaded = client.load_adapter("a", path)
        assert (loaded.tensors, loaded.changed_tensors) == (2, 2)
        scored = {"return_logprob": True, "logprob_start_len": 0}
        sent = [
            (prompt, name, client.submit(prompt, params, adapter=name, **scored))
            for prompt, name in zip(PROMPTS, ["a", None] * 3, strict=True)
        ]
        for prompt, name, handle in sent:
            output = handle.result()
            ids = [*prompt, *output.output_ids]
            expected = logprobs_by_peft(base, None if name is None else path, ids, 1)
            found = [*output.input_logprobs[1:], *output.output_logprobs]
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
        known = tokens(client, "a")
        assert known != tokens(client, None)
        tensors = load_file(path / "adapter_model.safetensors")
        config = json.loads((path / "adapter_config.json").read_text())
        name = "base_model.model.lm_head.base_layer.weight"
        for wrong, reason in (
            (tensors[name] + 1, "weight of lm_head that is not the base's"),
            (tensors[name][1:], r"base_layer.weight is \[96, 40\], not \[97, 40\]"),
        ):
            with pytest.raises(EngineError, match=reason) as refused:
                client.load_adapter("a", tensors={**tensors, name: wrong}, config=config)
            assert refused.value.code == "weight_mismatch"
        assert tokens(client, "a") == known


@pytest.mark.parametrize("tp", quick([1, 2]))
def test_adapters_of_experts_compute_what_peft_does(tmp_path, tp):
    base = tmp_path / "base"
    sizes = {"hidden_size": 48, "moe_intermediate_size": 32, "num_experts": 5, "head_dim": 16}
    make_checkpoint(base, "qwen3-moe", num_hidden_layers=2, **sizes)
    both = make_adapter(base, tmp_path / "a", ["q_proj"], target_parameters=EXPERTS)
    config = {"target_parameters": EXPERTS[1:], "rank_pattern": {r".*\.down_proj": 7}}
    down = make_adapter(base, tmp_path / "b", ["o_proj"], seed=1, **config)
    split = split_experts(both, tmp_path / "c", 5)
    peft = {"a": both, "b": down, "c": both, None: None}
    names = ["a", None, "b", "c", "b", "a"]
    with launch_scheduler(base, **OPTIONS, lora_experts=True, tp=tp) as client:
        loaded = {name: client.load_adapter(name, path) for name, path in zip("abc", (both, down, split))}
        assert loaded["b"].rank == 7
        assert loaded["a"].norm == pytest.approx(loaded["c"].norm)
        found = mixed(client, names)
        for prompt, name, output in zip(PROMPTS, names, found, strict=True):
            ids = [*prompt, *output.output_ids]
            expected = logprobs_by_peft(base, peft[name], ids, len(prompt))
            np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)
            if tp == 1:
                alone = client.generate(prompt, GREEDY, adapter=name, return_logprob=True)
                assert (alone.output_ids, alone.output_logprobs) == (
                    output.output_ids,
                    output.output_logprobs,
                )
        for change, reason in (
            ({"r": 3}, r"experts.base_layer.lora_A.weight is \[20, 48\], not \[15, 48\]"),
            ({"drop": "experts.lora_B"}, "down_proj has no lora_B"),
        ):
            shutil.copytree(both, bad := tmp_path / next(iter(change)))
            edit_adapter(bad, **change)
            with pytest.raises(EngineError, match=reason):
                client.load_adapter("a", bad)


@pytest.mark.parametrize("family", ["gpt-oss", "mixtral"])
def test_experts_of_other_names_and_layouts_are_adapted(family, tmp_path):
    base = tmp_path / "base"
    make_checkpoint(base, family)
    path = make_adapter(base, tmp_path / "a", ["q_proj"], target_parameters=EXPERTS)
    with launch_scheduler(base, **OPTIONS, lora_experts=True) as client:
        client.load_adapter("a", path)
        for prompt, name in zip(PROMPTS[:3], ["a", None, "a"], strict=True):
            output = client.generate(prompt, GREEDY, adapter=name, return_logprob=True)
            ids = [*prompt, *output.output_ids]
            expected = logprobs_by_peft(base, None if name is None else path, ids, len(prompt))
            np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)


def test_experts_are_refused_without_memory_for_them(tmp_path):
    base = tmp_path / "base"
    make_checkpoint(base, "qwen3-moe", num_hidden_layers=2)
    path = make_adapter(base, tmp_path / "a", ["q_proj"], target_parameters=EXPERTS)
    with launch_scheduler(base, **OPTIONS) as client:
        for given in (path, split_experts(path, tmp_path / "b", 5)):
            with pytest.raises(EngineError, match=r"lora_experts") as refused:
                client.load_adapter("a", given)
            assert refused.value.code == "unsupported"


@pytest.mark.parametrize("family", quick(["qwen3", "qwen3-moe"]))
def test_two_ranks_compute_what_one_does(family, tmp_path):
    base, found = tmp_path / "base", []
    make_checkpoint(base, family, hidden_size=48, intermediate_size=80, head_dim=16)
    path = make_adapter(base, tmp_path / "a", FAMILIES["llama"] if family == "qwen3" else ATTENTION)
    for tp in (1, 2):
        with launch_scheduler(base, **OPTIONS, tp=tp) as client:
            client.load_adapter("a", path)
            found.append(mixed(client, ["a", None, "a", "a", None, "a"]))
    for one, two in zip(*found, strict=True):
        assert one.output_ids == two.output_ids
        np.testing.assert_allclose(one.output_logprobs, two.output_logprobs, atol=1e-5, rtol=0)


def test_requests_without_adapter_have_the_base_bits(base, client, tmp_path):
    client.load_adapter("a", make_adapter(base, tmp_path / "a", ALL_LINEAR))
    found = mixed(client, [None, "a", None, "a", None, "a"])
    with launch_scheduler(base, **{**OPTIONS, "enable_lora": False}) as plain:
        assert plain.generate(PROMPTS[0], GREEDY, return_logprob=True).output_logprobs == (
            found[0].output_logprobs
        )
        with pytest.raises(Unsupported, match="start it with enable_lora"):
            plain.generate(PROMPTS[0], GREEDY, adapter="a")
        with pytest.raises(Unsupported, match="start it with enable_lora"):
            plain.load_adapter("a", tmp_path / "a")


def test_a_swap_changes_new_requests_and_shares_no_prefix(base, client, tmp_path):
    first, second = (make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2))
    before = client.load_adapter("a", first)
    running = client.submit(PROMPTS[3], LONG, adapter="a", return_logprob=True)
    cached = [client.generate(PROMPTS[3], GREEDY, adapter="a").cached_tokens for _ in range(2)]
    after = client.load_adapter("a", second)
    new = client.generate(PROMPTS[3], GREEDY, adapter="a", return_logprob=True)
    assert cached[1] > 0 == new.cached_tokens
    assert (before.changed_tensors, after.changed_tensors) == (after.tensors, after.tensors)
    assert client.load_adapter("a", second).changed_tensors == 0
    for output, path, epoch in ((running.result(), first, before), (new, second, after)):
        expected = logprobs_by_peft(base, path, [*PROMPTS[3], *output.output_ids], len(PROMPTS[3]))
        np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)
        (span,) = output.weight_versions
        assert (span.adapter, span.adapter_epoch) == ("a", epoch.adapter_epoch)


@pytest.mark.parametrize("on_running", ["retract", "keep"])
def test_running_samples_go_on_with_the_new_version(base, client, tmp_path, on_running):
    first, second = (make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2))
    epochs = [client.load_adapter("a", first).adapter_epoch]
    prompt = PROMPTS[3]
    running = client.submit(prompt, LONG, adapter="a", return_logprob=True, stream=True)
    next(iter(running))
    swap = client.load_adapter("a", second, on_running=on_running)
    epochs.append(swap.adapter_epoch)
    output = running.result()
    spans = output.weight_versions
    assert (swap.switched, [span.adapter_epoch for span in spans]) == (1, epochs)
    assert [span.stale_kv for span in spans] == [False, on_running == "keep"]
    assert output.num_retractions == (on_running == "retract")
    ids, cut = [*prompt, *output.output_ids], len(prompt) + spans[1].start
    of_first = logprobs_by_peft(base, first, ids, len(prompt))
    np.testing.assert_allclose(
        output.output_logprobs[: spans[1].start], of_first[: spans[1].start], atol=1e-4, rtol=0
    )
    of_second = logprobs_by_peft(base, second, ids, cut)
    same = np.abs(np.subtract(output.output_logprobs[spans[1].start :], of_second)) < 1e-4
    assert same.all() == (on_running == "retract")
    assert client.generate(prompt, GREEDY, adapter="a").cached_tokens == 0 or on_running == "retract"


@pytest.mark.long
@pytest.mark.executed
def test_a_thousand_swaps_under_load_stay_flat(base, tmp_path):
    swaps, depth, contents = 1000, 3, 7
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(contents)]
    tensors = [load_file(path / "adapter_model.safetensors") for path in paths]
    config = json.loads((paths[0] / "adapter_config.json").read_text())
    expected, resident, checked, running = [], [], 0, deque()
    with launch_scheduler(base, **OPTIONS) as client:
        engine = psutil.Process(client.status().pid)

        def finish():
            number, handle = running.popleft()
            output = handle.result()
            assert output.cached_tokens == 0 or number % 5 == 0, "KV of another version"
            versions = {span.adapter_epoch for span in output.weight_versions}
            assert versions <= {number + 1, number + 1 + ((number + 1) % 5 == 0)}
            if number % 90 in (0, 4):
                expected.append((number, output))

        for number in range(swaps):
            which = number % contents
            given = {"tensors": tensors[which], "config": config, "shared": number % 2 == 0}
            given = {"path": paths[which]} if number % 3 == 0 else given
            mode = "retract" if number % 5 == 0 else "finish_old"
            loaded = client.load_adapter("a", on_running=mode, **given)
            assert (loaded.adapter_epoch, loaded.evicted) == (number + 1, [])
            running.append((number, client.submit(PROMPTS[3], GREEDY, adapter="a", return_logprob=True)))
            if len(running) == depth:
                finish()
            if number % 10 == 0:
                again = client.generate(PROMPTS[3], GREEDY, adapter="a")
                checked += again.cached_tokens > 0
                assert len(client.status().adapters) <= depth
                resident.append(engine.memory_info().rss)
        while running:
            finish()
        (left,) = client.status().adapters
        assert (left.adapter_epoch, left.running) == (swaps, 0)
    assert checked == swaps // 10
    assert max(resident[50:]) - max(resident[10:50]) < 4 << 20
    for _, output in expected:
        ids = [*PROMPTS[3], *output.output_ids]
        ends = [span.start for span in output.weight_versions[1:]] + [len(output.output_ids)]
        for span, end in zip(output.weight_versions, ends, strict=True):
            path = paths[(span.adapter_epoch - 1) % contents]
            logprobs = logprobs_by_peft(base, path, ids, len(PROMPTS[3]))
            found, due = output.output_logprobs[span.start : end], logprobs[span.start : end]
            np.testing.assert_allclose(found, due, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"), quick([("bfloat16", 0.1, 0.02), ("float32", 1e-4, 1e-5)])
)
def test_an_adapter_equals_its_merged_checkpoint(base, tmp_path, dtype, largest, mean):
    path, options = make_adapter(base, tmp_path / "a", ALL_LINEAR), {**OPTIONS, "dtype": dtype}
    merge_adapter(base, path, tmp_path / "merged")
    found = []
    for model, names in ((base, ("a", None)), (tmp_path / "merged", (None,))):
        with launch_scheduler(model, **options) as client:
            client.load_adapter("a", path)
            for name in names:
                outputs = client.generate(
                    PROMPTS, {"max_new_tokens": 1}, adapter=name, return_logprob=True, logprob_start_len=0
                )
                found.append(np.concatenate([output.input_logprobs[1:] for output in outputs]))
    change = np.abs(np.subtract(found[0], found[2]))
    assert (change.max(), change.mean()) < (largest, mean), (change.max(), change.mean())
    assert np.abs(np.subtract(found[0], found[1])).mean() > 10 * mean, "the adapter changes little"


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_are_the_same_as_their_folder(base, client, tmp_path, shared):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    tensors = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    by_path = client.load_adapter("a", path)
    loaded = client.load_adapter("a", tensors=tensors, config=config, shared=shared)
    assert (loaded.tensors, loaded.changed_tensors, loaded.norm) == (by_path.tensors, 0, by_path.norm)
    name = next(iter(tensors))
    loaded = client.load_adapter("a", tensors={**tensors, name: tensors[name] + 1}, config=config)
    assert loaded.changed_tensors == 1
    for wrong, reason in (
        ({"tensors": tensors}, "need its config"),
        ({"tensors": tensors, "config": config, "path": path}, "give one of them"),
        ({"config": config}, "give one of them"),
        ({"tensors": {}, "config": config}, "without tensors"),
        ({"tensors": {**tensors, name: tensors[name] * float("nan")}, "config": config}, "not finite"),
        ({"tensors": {**tensors, name.removeprefix("base_model.model."): tensors[name]}}, "twice"),
        ({"tensors": {name: tensors[name]}, "config": config}, "has no lora_B"),
    ):
        with pytest.raises(EngineError, match=reason):
            client.load_adapter("a", **({"config": config} if reason == "twice" else {}), **wrong)


def test_expected_checksums_are_those_of_sglang(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    tensors = load_file(path / "adapter_model.safetensors")
    sums = checksums(tensors)
    config = json.loads((path / "adapter_config.json").read_text())
    name = next(iter(sums))
    for source in ({"path": path}, {"tensors": tensors, "config": config}):
        known = client.load_adapter("a", **source, expected_checksums=sums)
        for wrong, reason in (
            ({**sums, name: sums[name][::-1]}, f"{name} has another"),
            ({**sums, "x": ""}, "x has not come"),
            ({each: sums[each] for each in sums if each != name}, f"{name} is not among them"),
            ({}, "and 20 more"),
        ):
            with pytest.raises(WeightMismatch, match=reason):
                client.load_adapter("a", **source, expected_checksums=wrong)
            assert [each.adapter_epoch for each in client.status().adapters] == [known.adapter_epoch]


def test_another_scale_counts_as_a_change(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    client.load_adapter("a", path)
    edit_adapter(path, alpha_pattern={"up_proj": 64})
    assert client.load_adapter("a", path).changed_tensors == 2
    edit_adapter(path, lora_alpha=64)
    assert client.load_adapter("a", path).changed_tensors == 12


@pytest.mark.parametrize("tp", quick([2, 1]))
def test_a_group_broadcasts_adapters(base, tmp_path, tp):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    tensors = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    name = next(iter(tensors))
    with launch_scheduler(base, **OPTIONS, tp=tp) as client:
        by_path = client.load_adapter("a", path)
        with WeightUpdateGroup.create([client]) as group:
            for _ in range(2):
                loaded = client.load_adapter("b", tensors=tensors, config=config, group=group)
            assert (loaded.digest, loaded.changed_tensors) == (by_path.digest, 0)
            found = mixed(client, ["a", "b"] * 3)
            again = mixed(client, ["b", "a"] * 3)
            assert [each.output_logprobs for each in found] == [each.output_logprobs for each in again]
            client.update_weights_from_distributed(weights_of(base), group=group)
            wrong = {name: tensors[name]}
            with pytest.raises(WeightMismatch, match="has no lora_B"):
                client.load_adapter("b", tensors=wrong, config=config, group=group)
        assert {each.name: each.digest for each in client.status().adapters} == dict.fromkeys(
            "ab", loaded.digest
        )
        with pytest.raises(EngineError, match="there is no weight update group"):
            client.start(
                LoadAdapterReqInput(name="b", config=config, group_name="nobody"), LoadAdapterReqOutput
            ).result()


FAULTS = {
    "unsupported": [
        {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"peft_type": "IA3"},
        {"rank_pattern": {"(a+)+$": 4}}, {"fan_in_fan_out": True},
    ],
    "weight_mismatch": [
        {"r": 5}, {"drop": "lora_B"}, {"drop": "lora"}, {"rename": ("q_proj", "x_proj")},
        {"rename": ("lora_A", "lora_magnitude")},
    ],
    "checkpoint_error": [{"r": "four"}, {"r": 0}],
    "weights_not_finite": [{"lora_alpha": 1e308}],
}  # fmt: skip


def test_a_refused_adapter_changes_nothing(base, client, tmp_path):
    good, bad = make_adapter(base, tmp_path / "good", ATTENTION), tmp_path / "bad"
    client.load_adapter("a", good)
    known = mixed(client, ["a"] * 6), client.status().adapters
    for code, change in ((code, change) for code, changes in FAULTS.items() for change in changes):
        shutil.copytree(good, bad, dirs_exist_ok=True)
        edit_adapter(bad, **change)
        for name in ("a", "new"):
            with pytest.raises(EngineError) as refused:
                client.load_adapter(name, bad)
            assert refused.value.code == code, (change, refused.value)
        shutil.rmtree(bad)
    found = mixed(client, ["a"] * 6)
    assert [each.output_logprobs for each in found] == [each.output_logprobs for each in known[0]]
    assert client.status().adapters == known[1]
    assert client.status().weights == "valid"


def test_many_patterns_are_matched_at_once(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    known = client.load_adapter("a", path)
    whole = "model.layers.0.mlp.up_proj"
    ours = {"self_attn.q_proj": 4, f"^{whole}$": 4, "q_proj": 5, whole: 5}
    edit_adapter(path, rank_pattern={**ours, **{f"nobody{i}.q_proj": 7 for i in range(40_000)}})
    assert client.load_adapter("a", path).norm == known.norm
    edit_adapter(path, alpha_pattern={"up_proj": 16})
    assert client.load_adapter("a", path).norm > known.norm


def test_an_adapters_own_file_counts(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    shutil.copy(base / "model.safetensors", path)
    assert client.load_adapter("a", path).tensors == 28


def test_the_rank_is_limited(base, client, tmp_path):
    paths = [make_adapter(base, tmp_path / str(rank), ["q_proj"], rank=rank) for rank in (8, 9)]
    assert client.load_adapter("a", paths[0]).rank == 8
    with pytest.raises(EngineError, match=r"rank of 9 is beyond max_lora_rank = 8") as refused:
        client.load_adapter("a", paths[1])
    assert refused.value.code == "invalid_request"


def test_missing_or_torn_files_are_refused(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ["q_proj"])
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:40], b""):
        file.write_bytes(data)
        with pytest.raises(EngineError) as refused:
            client.load_adapter("a", path)
        assert refused.value.code == "checkpoint_error"
    with pytest.raises(EngineError, match="no such folder"):
        client.load_adapter("a", tmp_path / "nowhere")
    with pytest.raises(UnknownAdapter, match="no adapter 'a' is loaded"):
        client.generate(PROMPTS[0], GREEDY, adapter="a")


def test_the_least_used_adapter_makes_room(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ["q_proj"])
    client.load_adapter("pinned", path, pinned=True)
    client.load_adapter("old", path)
    client.load_adapter("used", path)
    client.generate(PROMPTS[0], GREEDY, adapter="old")
    assert client.load_adapter("new", path).evicted == ["used"]
    assert {each.name for each in client.status().adapters} == {"pinned", "old", "new"}
    client.load_adapter("old", path, pinned=True)
    client.load_adapter("new", path, pinned=True)
    with pytest.raises(EngineError, match="of 3 adapter slots 3 are pinned, and requests use 0 versions"):
        client.load_adapter("fourth", path)
    with pytest.raises(EngineError, match="is loaded: replace it, or unload it first"):
        client.load_adapter("old", path, replace=False)


def test_requests_end_with_an_adapter_that_is_unloaded(base, client, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    client.load_adapter("a", path)
    running = client.submit(PROMPTS[0], LONG, adapter="a", return_logprob=True)
    assert client.unload_adapter("a").running in (0, 1)
    with pytest.raises(UnknownAdapter):
        client.generate(PROMPTS[0], GREEDY, adapter="a")
    output = running.result()
    expected = logprobs_by_peft(base, path, [*PROMPTS[0], *output.output_ids], len(PROMPTS[0]))
    np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)
    assert client.status().adapters == []


def test_adapters_outlive_updates_and_released_memory(base, client, tmp_path):
    for seed in range(2):  # the second copy on the host is the second adapter's
        client.load_adapter("a", make_adapter(base, tmp_path / str(seed), ALL_LINEAR, seed=seed))
        known = client.generate(PROMPTS[0], GREEDY, adapter="a", return_logprob=True)
        client.pause()
        (slots,) = (each for each in client.status().components if each.name == "adapters")
        assert slots.device_bytes == slots.nbytes > 0
        client.release_memory()
        (slots,) = (each for each in client.status().components if each.name == "adapters")
        assert slots.device_bytes == 0
        with pytest.raises(MemoryReleased, match="resume it first"):
            client.load_adapter("b", tmp_path / "0")
        client.resume_memory()
        client.update_weights_from_disk(base)
        client.continue_generation()
        again = client.generate(PROMPTS[0], GREEDY, adapter="a", return_logprob=True)
        assert again.output_logprobs == known.output_logprobs
        assert again.weight_versions[0].epoch == known.weight_versions[0].epoch + 1


@pytest.mark.parametrize("tp", quick([1, 2]))
def test_more_adapters_than_slots_take_turns(base, tmp_path, tp):
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(5)]
    options = {**OPTIONS, "max_loras": 1, "max_loaded_loras": 5, "tp": tp}
    with launch_scheduler(base, **options) as client:
        for number, path in enumerate(paths):
            client.load_adapter(str(number), path)
        assert sum(each.resident for each in client.status().adapters) == 2
        alone = [client.generate(PROMPTS[0], GREEDY, adapter=str(i)).output_ids for i in range(5)]
        assert len({tuple(ids) for ids in alone}) == 5
        handles = [client.submit(PROMPTS[0], GREEDY, adapter=str(i % 5)) for i in range(30)]
        assert [handle.result().output_ids for handle in handles] == alone * 6
        assert client.load_adapter("5", paths[0]).evicted == ["0"]
        assert len(client.status().adapters) == 5


def test_a_waiting_adapter_gets_a_slot_of_busy_ones(base, tmp_path):
    options = {**OPTIONS, "max_loras": 1, "max_loaded_loras": 3, "max_running_requests": 2}
    with launch_scheduler(base, **options) as client:
        for number, name in enumerate("abc"):
            client.load_adapter(name, make_adapter(base, tmp_path / name, ALL_LINEAR, seed=number))
        for name in "ab":
            client.generate(PROMPTS[0], GREEDY, adapter=name)
        assert [each.name for each in client.status().adapters if not each.resident] == ["c"]
        handles = [client.submit(PROMPTS[0], GREEDY, adapter=name) for name in "abc" + "ab" * 10]
        waited = [handle.result().queue_time for handle in handles]
        assert waited[2] < min(waited[-2:])


def test_samples_that_wait_for_a_slot_can_be_aborted(base, tmp_path):
    with launch_scheduler(base, **{**OPTIONS, "max_loras": 1, "max_loaded_loras": 3}) as client:
        for number, name in enumerate("abc"):
            client.load_adapter(name, make_adapter(base, tmp_path / name, ALL_LINEAR, seed=number))
        running = [client.submit(PROMPTS[0], LONG, adapter=name) for name in "ab"]
        waiting = client.submit(PROMPTS[0], GREEDY, adapter="c")
        assert client.abort(waiting.rid).aborted == 1
        later = [client.submit(PROMPTS[1], GREEDY, adapter=name) for name in "ab"]
        assert all(len(handle.result().output_ids) == 200 for handle in running)
        assert all(len(handle.result().output_ids) == 10 for handle in later)
        client.unload_adapter("c")


def test_pinned_adapters_keep_their_slots(base, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    with launch_scheduler(base, **{**OPTIONS, "max_loras": 1, "max_loaded_loras": 4}) as client:
        client.load_adapter("a", path, pinned=True)
        with pytest.raises(EngineError, match="of 1 adapter slots 1 are pinned"):
            client.load_adapter("b", path, pinned=True)
        for name in "bcd":
            client.load_adapter(name, path)
            client.generate(PROMPTS[0], GREEDY, adapter=name)
        resident = {each.name: each.resident for each in client.status().adapters}
        assert resident == {"a": True, "b": False, "c": False, "d": True}
