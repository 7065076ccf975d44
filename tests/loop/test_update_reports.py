"""Reports of what an update changed, and bounds that warn of it or refuse it."""

from math import sqrt

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.buckets_by_hand import Sender
from support.checkpoints import copy_configs
from support.deltas import SentDelta, by_tensor
from support.properties import examples
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import DeltaBase
from caesura.scheduler.weights import changes
from caesura.transfer import words

GROUPS = {"attention": "attn", "mlp": "mlp", "norms": "norm", "embeddings": "embed"}
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def changed_model(tiny_model, tmp_path):
    """Return a folder whose weights differ from the tiny model's in some elements of two tensors."""
    tensors = load_file(tiny_model / "model.safetensors")
    tensors[Q_PROJ][::3] *= 1.5
    tensors[UP_PROJ].view(-1)[5] += 1
    copy_configs(tiny_model, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def expected(old, new, dtype):
    """Return (elements, share that changed, norm, relative norm) by group."""
    found = {}
    for group, part in GROUPS.items():
        names = [name for name in old if part in name and (group == "norms" or "norm" not in name)]
        before = torch.cat([old[name].to(dtype).view(-1) for name in names]).double()
        after = torch.cat([new[name].to(dtype).view(-1) for name in names]).double()
        norm = float((after - before).norm())
        share = float((after != before).double().mean())
        found[group] = (len(before), share, norm, norm / float(before.norm()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_a_report_says_what_was_changed(tiny_model, changed_model, dtype, kind):
    old, new = (load_file(folder / "model.safetensors") for folder in (tiny_model, changed_model))
    with EngineDriver(str(tiny_model), dtype=str(dtype).removeprefix("torch.")) as driver:
        report = driver.update(changed_model, report=kind).report
        assert driver.update(changed_model).report is None
        again = driver.update(changed_model, report=kind).report
    found = {
        name: (each.elements, each.changed, each.norm, each.rel_norm) for name, each in report.groups.items()
    }
    for name, figures in expected(old, new, dtype).items():
        assert found[name] == pytest.approx(figures, rel=1e-3), name
    assert report.total.norm == pytest.approx(sqrt(sum(each.norm**2 for each in report.groups.values())))
    assert report.unchanged_tensors == again.unchanged_tensors - 2
    assert len(report.unchanged) == min(20, report.unchanged_tensors)
    assert not {Q_PROJ, UP_PROJ} & {*report.unchanged}
    assert (again.total.changed, again.total.norm) == (0, 0)


def test_a_selection_estimates_the_whole(driver, tiny_model, other_model, monkeypatch):
    monkeypatch.setattr(changes, "_SMALL", 0)
    sampled = driver.update(other_model, report="sampled").report
    driver.update(tiny_model)
    full = driver.update(other_model, report="full").report
    assert (sampled.sampled, full.sampled) == (True, False)
    for name in ("attention", "mlp", "embeddings"):
        assert sampled.groups[name].elements == full.groups[name].elements
        assert sampled.groups[name].norm == pytest.approx(full.groups[name].norm, rel=0.3)
        assert sampled.groups[name].norm != full.groups[name].norm


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"min_changed": 0.5}, "of the elements changed, less than 50.000%"),
        ({"max_rel_norm": 0.01}, "the change of attention has"),
    ],
)
def test_bounds_warn_or_refuse_before_the_first_byte(driver, changed_model, caplog, bounds, reason):
    before, epoch = driver.checksum(), driver.status().weights_epoch
    refused = assert_error(driver.update(changed_model, refuse_beyond=True, **bounds), "update_refused")
    assert reason in refused.message
    assert (driver.status().weights, driver.status().weights_epoch) == ("valid", epoch)
    assert driver.checksum() == before
    caplog.clear()
    assert driver.update(changed_model, **bounds).committed
    assert any(reason in message for message in caplog.messages)
    usual = driver.update(changed_model, refuse_beyond=True, min_changed=0.0, max_rel_norm=1.0)
    assert usual.report.total.changed == 0


def test_a_session_is_refused_at_its_commit(driver, tiny_model, other_model):
    driver.pause("abort")
    *_, last = Sender(driver, other_model, refuse_beyond=True, max_rel_norm=0.01).send_all()
    assert_error(last, "update_refused")
    assert driver.status().weights == "poisoned"
    assert driver.update(tiny_model).committed


def test_bounds_of_the_engine_count_unless_a_call_has_its_own(tiny_model, changed_model):
    with EngineDriver(str(tiny_model), min_changed=0.5, refuse_beyond=True) as driver:
        assert_error(driver.update(changed_model), "update_refused")
        assert driver.update(changed_model, min_changed=0.0).committed


@settings(max_examples=examples(40))
@given(st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 3000), st.integers(0, 1 << 30))
def test_compiled_differences_are_those_of_torch(dtype, size, seed):
    if words.library() is None:
        pytest.skip("words.cpp was not compiled")
    generator = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    new = torch.where(torch.rand(size, generator=generator) < 0.5, old, new)
    found = words.difference(old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "library", lambda: None)
        assert found == pytest.approx(words.difference(old, new), rel=1e-5)


def test_a_delta_is_reported_and_refused_before_it_is_written(driver, tiny_model, changed_model, tmp_path):
    old, new = (load_file(folder / "model.safetensors") for folder in (tiny_model, changed_model))
    sent = SentDelta(*({name: each[name] for name in (Q_PROJ, UP_PROJ)} for each in (old, new)))
    before, base = driver.checksum(), DeltaBase(base_epoch=driver.status().weights_epoch)
    bounds = {"refuse_beyond": True, "min_changed": 0.5}
    assert_error(by_tensor(driver, sent, base, tmp_path, **bounds), "update_refused")
    assert (driver.status().weights, driver.checksum()) == ("valid", before)
    found = by_tensor(driver, sent, base, tmp_path, report="full").report
    driver.update(tiny_model)
    whole = driver.update(changed_model, report="full").report
    for name, group in whole.groups.items():
        figures = [msgspec.structs.astuple(each) for each in (found.groups[name], group)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4), name


@pytest.mark.slow  # its worker takes a second to start
@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_two_ranks_report_what_one_does(tiny_model, other_model, changed_model, tmp_path, kind):
    def found(driver):
        reports = [driver.update(each, report=kind).report for each in (changed_model, other_model)]
        reports.append(driver.update(tiny_model, report=kind, refuse_beyond=True, min_changed=0.1).report)
        old, new = (load_file(folder / "model.safetensors") for folder in (tiny_model, changed_model))
        sent = SentDelta(*({name: each[name] for name in (Q_PROJ, UP_PROJ)} for each in (old, new)))
        base = DeltaBase(base_epoch=driver.status().weights_epoch)
        refused = by_tensor(driver, sent, base, tmp_path, refuse_beyond=True, min_changed=0.5)
        reports.append(by_tensor(driver, sent, base, tmp_path, report=kind).report)
        return reports, refused.message

    model = str(tiny_model)
    with EngineDriver(model) as alone, EngineDriver(model, scripted=False, tp=2) as ranks:
        (one, one_refused), (two, two_refused) = found(alone), found(ranks)
    assert one_refused == two_refused
    for ours, theirs in zip(two, one, strict=True):
        assert (ours.unchanged, ours.unchanged_tensors) == (theirs.unchanged, theirs.unchanged_tensors)
        for name, group in theirs.groups.items():
            ours_too = msgspec.structs.astuple(ours.groups[name])
            assert ours_too == pytest.approx(msgspec.structs.astuple(group), rel=1e-6), name
