"""Stored images are made again, and the step that is not what it claims is named."""

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from caesura.client import ImageRecord, InvalidRequest, launch_scheduler, read_rollouts, save_rollouts
from caesura.client.cli import cli
from caesura.client.verify import verify

pytest.importorskip("diffusers")
from support.pipelines import make_sd3

ENGINE = {"device": "cpu", "num_threads": 1}
OPTIONS = {
    "width": 16, "height": 16, "num_inference_steps": 4, "seed": 3, "max_sequence_length": 8,
    "return_steps": [1, 2, 3], "sde": {"type": "sde", "noise_level": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return make_sd3(tmp_path_factory.mktemp("pipelines") / "sd3")


@pytest.fixture(scope="module")
def records(sd3):
    with launch_scheduler(str(sd3), **ENGINE) as client:
        made = client.generate_images("a red", n=2, **OPTIONS)
    return [ImageRecord.of("a red", {**OPTIONS, "n": 2}, each) for each in made]


def test_true_images_pass(records, sd3, tmp_path):
    path = tmp_path / "images.jsonl"
    save_rollouts(path, records)
    assert [*read_rollouts(path)] == records
    arguments = ["verify", str(path), "--model", str(sd3), "-o", "device=cpu", "-o", "num_threads=1"]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.exception) == (0, None), result.output


def edited(record, **fields):
    return msgspec.structs.replace(record, **fields)


def test_a_step_that_is_not_what_it_claims_is_named(records, sd3):
    first, second = records
    latent = np.frombuffer(first.latents[2], "<f4").copy()
    latent[7] += 1.0
    span = first.weight_versions[0]
    parts = [edited(span, end=2), edited(span, start=2, digest="0" * 32)]
    given = [
        second,
        edited(first, log_probs=[first.log_probs[0], first.log_probs[1] + 0.5, first.log_probs[2]]),
        edited(first, latents=[*first.latents[:2], latent.tobytes(), *first.latents[3:]]),
        edited(first, seed=4),
        edited(first, weight_versions=parts),
        edited(first, weight_versions=[edited(span, digest="0" * 32)]),
    ]
    verdicts = verify(given, [str(sd3)], **ENGINE)
    steps = [{finding.token for finding in each.findings} for each in verdicts]
    assert steps[:3] == [set(), {2}, {2}] and steps[3] >= {0, 1, 2}
    assert "logprob" in verdicts[1].findings[0].reason and "after it" in verdicts[2].findings[0].reason
    assert [(each.verified, each.stale) for each in verdicts] == [(4, 0)] * 4 + [(2, 2), (0, 0)]
    assert verdicts[1].drawn_again == 3
    assert not verdicts[4].findings
    assert "no model has the digest" in verdicts[5].findings[0].reason


def test_a_record_has_no_embeddings(records, sd3):
    with pytest.raises(InvalidRequest, match="embeddings"):
        ImageRecord.of(None, {"embeds": {"prompt_embeds": []}}, None)
