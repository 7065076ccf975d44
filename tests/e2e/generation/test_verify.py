"""Stored rollouts are computed again, and what is not what it claims is named."""

import shutil

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.lora import ALL_LINEAR, make_adapter

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.cli import cli
from caesura.client.rollout_records import RolloutRecord, read_rollouts, save_rollouts
from caesura.client.verify import verify

PROMPT = [5, 6, 7, 8, 9]
OPTIONS = {"dtype": "float32"}
PARAMS = {
    "plain": SamplingParams(max_new_tokens=12, seed=3),
    "greedy": SamplingParams(max_new_tokens=12, temperature=0.0),
    "edited": SamplingParams(
        max_new_tokens=12,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        repetition_penalty=1.3,
        min_new_tokens=5,
        seed=4,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return two checkpoints of one model with experts."""
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        make_checkpoint(root / str(seed), "qwen3-moe", seed=seed)
    return [root / "1", root / "2"]


@pytest.fixture(scope="module")
def records(folders):
    """Return a record of each kind of sampling, and one whose weights changed on the way."""
    asked = {"return_logprob": True, "return_raw_logprob": True, "return_routed_experts": True}
    found = {}
    with launch_scheduler(folders[0], **OPTIONS) as client:
        for name, params in PARAMS.items():
            more = {"return_sampling_mask": name == "edited"}
            found[name] = RolloutRecord.of(PROMPT, params, client.generate(PROMPT, params, **asked, **more))
        params = SamplingParams(max_new_tokens=200, temperature=0.9, ignore_eos=True)
        handle = client.submit(PROMPT, params, stream=True, return_logprob=True)
        next(iter(handle))
        client.update_weights_from_disk(folders[1], weight_version="2")
        found["updated"] = RolloutRecord.of(PROMPT, params, handle.result())
    assert len(found["updated"].weight_versions) == 2
    return found


def verdict_on(record, folders, **options):
    (verdict,) = verify([record], map(str, folders), **{**OPTIONS, **options})
    return verdict


def changed(values, at, value):
    return [*values[:at], value, *values[at + 1 :]]


def test_true_records_pass(records, folders, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, records.values())
    assert [*read_rollouts(path)] == [*records.values()]
    result = CliRunner().invoke(
        cli,
        [
            "verify",
            str(path),
            "--model",
            str(folders[0]),
            "--model",
            str(folders[1]),
            "--strict",
            "-o",
            "dtype=float32",
        ],
    )
    assert (result.exit_code, result.exception) == (0, None), result.output
    verdict = verdict_on(records["updated"], folders, strict=True, bound=1e-3)
    assert (verdict.verified, verdict.drawn_again) == (200, 200)


def test_each_lie_is_named(records, folders):
    record = records["edited"]
    ids, logprobs = record.output_ids, record.output_logprobs
    kept = set(record.sampling_mask.at(6))
    other = next(token for token in range(90) if token not in {*kept, *ids})
    routed = record.routed_experts
    row = (len(PROMPT) - 1 + 8) * (len(routed.data) // routed.shape[0])
    flipped = bytearray(routed.data)
    flipped[row] ^= 1
    lies = {
        "token 6 (id": {"output_ids": changed(ids, 6, other)},
        "token 3 (id": {"output_logprobs": changed(logprobs, 3, logprobs[3] - 0.2)},
        "token 8: its experts differ": {
            "routed_experts": msgspec.structs.replace(routed, data=bytes(flipped))
        },
        "no model has the digest 00": {
            "weight_versions": [msgspec.structs.replace(record.weight_versions[0], digest="00" * 16)]
        },
    }
    told = [msgspec.structs.replace(record, **lie) for lie in lies.values()]
    for expected, verdict in zip(lies, verify(told, [str(folders[0])], **OPTIONS), strict=True):
        assert expected in verdict.findings[0].reason, verdict.findings
    assert "the filters keep" in " ".join(
        finding.reason for finding in verdict_on(told[0], folders[:1]).findings if finding.token == 6
    )


def test_changed_weights_are_named(records, folders, tmp_path):
    path = tmp_path / "changed"
    shutil.copytree(folders[0], path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1e-3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (finding,) = verdict_on(records["plain"], [path]).findings
    assert "tokens 0 to 11: no model has the digest" in finding.reason


def test_a_greedy_sample_of_other_tokens_is_named(records, folders):
    record = msgspec.structs.replace(records["greedy"], output_logprobs=None, raw_logprobs=None)
    lie = msgspec.structs.replace(record, output_ids=changed(record.output_ids, 2, 50))
    first = verdict_on(lie, folders[:1]).findings[0]
    assert first.token == 2
    assert "the sample is greedy" in first.reason


def test_adapters_are_found_by_their_digests(tmp_path):
    make_checkpoint(tmp_path / "base", "qwen3")
    paths = [make_adapter(tmp_path / "base", tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2)]
    with launch_scheduler(tmp_path / "base", enable_lora=True, **OPTIONS) as client:
        client.load_adapter("a", paths[1])
        output = client.generate(PROMPT, PARAMS["plain"], adapter="a", return_logprob=True)
    record = RolloutRecord.of(PROMPT, PARAMS["plain"], output)
    assert verdict_on(record, [tmp_path / "base"], adapters=map(str, paths)).findings == []
    (finding,) = verdict_on(record, [tmp_path / "base"], adapters=[str(paths[0])]).findings
    assert "no adapter has the digest" in finding.reason
    assert torch.isfinite(torch.tensor(record.output_logprobs)).all()


def test_a_line_that_is_no_record_is_named(records, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [records["plain"], msgspec.structs.replace(records["plain"], output_logprobs=[0.0])])
    with pytest.raises(ValueError, match="line 2: its lists or spans do not cover its 12 tokens"):
        list(read_rollouts(path))
