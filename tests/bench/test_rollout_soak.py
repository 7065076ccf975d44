"""The soak in small: rollouts are what their spans say, and one whose spans lied would be noticed."""

import asyncio
import json
from dataclasses import asdict

import pytest
import rollout_soak
from checkpoints import write_checkpoint
from harness.rescore import Rescorer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [
        write_checkpoint(tmp_path_factory.mktemp("soak") / str(seed), "tiny", seed=seed) for seed in (0, 1)
    ]


def test_every_transport_and_mode_leaves_rollouts_that_score_the_same_again(folders, monkeypatch):
    monkeypatch.setattr(rollout_soak, "RESCORED_EVERY", 5)
    monkeypatch.setattr(rollout_soak, "UPDATE_EVERY_S", 0.2)
    found = asyncio.run(rollout_soak.soak(folders, 0.12))
    assert set(found.updates) == set(rollout_soak.TRANSPORTS)
    assert json.loads(json.dumps(asdict(found)))["rollouts"] == sum(found.endings.values()) > 0
    assert found.rescored_spans > found.rescored > 5, "some rollout has lived through an update"
    assert found.largest_gap < 1e-4
    assert all(len(readings) == len(found.at) for readings in found.readings.values())


def test_a_span_of_the_wrong_version_does_not_score_the_same(folders):
    rescorer = Rescorer(dict(zip("01", folders, strict=True)))
    prompt, output = [1, 2, 3], [10, 20, 30, 40]
    first, second = ({"version": label, "start": 0, "end": 4, "stale_kv": False} for label in "01")
    gaps = [
        abs(a - b)
        for a, b in zip(*(rescorer.logprobs(prompt, output, [s]) for s in (first, second)), strict=True)
    ]
    assert max(gaps) > 0.01


def test_a_stale_span_goes_on_with_the_cache_of_other_weights(folders):
    rescorer = Rescorer(dict(zip("01", folders, strict=True)))
    prompt, output = [1, 2, 3], [10, 20, 30, 40]
    fresh = {"version": "1", "start": 2, "end": 4, "stale_kv": False}
    early = {"version": "0", "start": 0, "end": 2, "stale_kv": False}
    one, two = (
        rescorer.logprobs(prompt, output, [early, {**fresh, "stale_kv": stale}]) for stale in (True, False)
    )
    assert one[:2] == two[:2]
    assert max(abs(a - b) for a, b in zip(one[2:], two[2:], strict=True)) > 1e-4
