"""One engine after the other with the same state file: what the second one knows of the first."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.faults import full_disk
from support.lora import ATTENTION, make_adapter
from support.scripted import EngineDriver, assert_error, ok, tokens_of

from caesura.client.trainer import as_frames, buckets
from caesura.io_struct import (
    AdapterStatus,
    CaesuraError,
    ErrorReply,
    GenerateReqInput,
    LoadAdapterReqInput,
    Message,
    UnloadAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)

PROMPT = [5, 6, 7]
LONG = list(range(3, 60))


@pytest.fixture
def folder(other_model, tmp_path) -> Path:
    return Path(shutil.copytree(other_model, tmp_path / "step-17"))


@pytest.fixture
def start(tiny_model, tmp_path):
    def started(model: Path = tiny_model, **options: object) -> EngineDriver:
        return EngineDriver(str(model), state_file=str(tmp_path / "weights.json"), **options)

    return started


def from_disk(driver: EngineDriver, folder: Path, version: str | None = "step-17") -> None:
    ok(driver.update(folder, weight_version=version))


def from_tensors(driver: EngineDriver, path: Path, count: int | None = None, **fields: object) -> Message:
    named = list(load_file(path / "model.safetensors").items())[:count]
    (bucket,) = buckets(named, 1 << 30)
    specs, frames = as_frames(bucket)
    message = UpdateWeightsFromTensorReqInput(specs=specs, **fields)
    return driver.call(message, buffers=frames)


def found(start: Callable[[], EngineDriver], *names: str) -> Any:
    """Return the status of the next start, or these of its fields."""
    with start() as driver:
        status = driver.status()
    return tuple(getattr(status, name) for name in names) if names else status


def refused(driver: EngineDriver, code: str, **fields: object) -> ErrorReply:
    return assert_error(driver.call(GenerateReqInput(input_ids=PROMPT, **fields)), code)


def test_without_a_state_file_every_start_is_the_first(tiny_model, folder, tmp_path):
    for _ in range(2):
        with EngineDriver(str(tiny_model)) as driver:
            driver.assert_status(weights_epoch=0, weight_version="default")
            assert driver.update(folder, weight_version="step-17").durable is None
    assert {path.name for path in tmp_path.iterdir()} == {"step-17"}


def test_epochs_go_on_when_nothing_was_ever_updated(start):
    incarnations = set()
    for epoch in range(3):
        with start() as driver:
            driver.assert_status(weights="valid", weights_epoch=epoch, weight_version="default")
            incarnations.add(driver.status().incarnation)
            driver.complete(PROMPT)
    assert len(incarnations) == 3


def test_disk_commits_survive_a_restart(start, folder):
    with start() as driver:
        from_disk(driver, folder)
        committed, before = driver.checksum(), driver.status()
        assert before.weights_epoch == 1
    for epoch in (2, 3):  # and again: the second start has committed nothing of its own
        with start() as driver:
            after = driver.status()
            assert (after.weights, after.weight_version, after.weights_epoch) == ("valid", "step-17", epoch)
            assert after.model_path == str(folder)
            assert driver.checksum() == committed
            driver.complete(LONG)
            result = driver.complete(LONG, min_weights_epoch=1)
            assert result.cached_tokens > 0, "prefixes are shared under the first epoch of a restart"
            (span,) = result.weight_versions
            assert (span.epoch, span.version, span.incarnation) == (epoch, "step-17", after.incarnation)
            refused(driver, "epoch_behind", min_weights_epoch=epoch + 1)


@pytest.mark.parametrize("how", ["transport", "gone", "rewritten", "torn"])
def test_lost_weights_serve_nobody_until_an_update(start, folder, other_model, tiny_model, how):
    with start() as driver:
        if how == "transport":
            ok(from_tensors(driver, other_model, weight_version="step-17"))
        else:
            from_disk(driver, folder)
        committed = driver.checksum()
    file = folder / "model.safetensors"
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "rewritten":
        shutil.copyfile(tiny_model / "model.safetensors", file)
    elif how == "torn":
        os.truncate(file, file.stat().st_size // 2)
    for epoch in (2, 3):  # the loss is remembered
        with start() as driver:
            driver.assert_status(weights="invalid", weights_epoch=epoch, weight_version="default")
            assert "'step-17' (epoch 1) was lost" in driver.status().weights_detail
            error = refused(driver, "weights_invalid")
            assert "step-17" in error.message
            assert "complete update" in error.message
    with start() as driver:
        reply = ok(from_tensors(driver, other_model, count=2))
        assert not reply.committed
        refused(driver, "weights_invalid")
        driver.pause("in_place")
        assert_error(driver.go_on(), "weights_invalid")
        reply = ok(from_tensors(driver, other_model, weight_version="step-18"))
        assert (reply.committed, reply.weights_epoch) == (True, 5)
        ok(driver.go_on())
        assert driver.checksum() == committed
        result = driver.complete(PROMPT, min_weights_epoch=1)
        assert len(tokens_of(result)) == 8


def test_the_old_behaviour_refuses_requests_with_an_epoch(start, other_model):
    with start() as driver:
        first = driver.checksum()
        ok(from_tensors(driver, other_model, weight_version="step-17"))
    with start(on_lost_weights="serve_initial") as driver:
        driver.assert_status(weights="valid", weights_epoch=2, weight_version="default")
        assert driver.checksum() == first
        assert len(tokens_of(driver.complete(PROMPT))) == 8
        assert len(tokens_of(driver.complete(PROMPT, min_weights_epoch=0))) == 8  # as good as naming none
        for epoch in (1, 2):
            assert "step-17" in refused(driver, "epoch_behind", min_weights_epoch=epoch).message
        session = driver.begin()
        assert ok(driver.end(session_id=session, weight_version="renamed")).weights_epoch == 3
        refused(driver, "epoch_behind", min_weights_epoch=1)  # a new label is no new weights
    with start(on_lost_weights="serve_initial") as driver:
        refused(driver, "epoch_behind", min_weights_epoch=1)
        ok(from_tensors(driver, other_model))
        driver.complete(PROMPT, min_weights_epoch=4)


def test_a_new_label_alone_keeps_the_folder(start, folder, other_model):
    with start() as driver:
        from_disk(driver, folder)
        session = driver.begin()
        ok(driver.end(session_id=session, weight_version="renamed"))
    with start() as driver:
        driver.assert_status(weights="valid", weight_version="renamed")
        ok(from_tensors(driver, other_model, count=2))
    assert found(start).weights == "invalid"


def test_the_last_source_of_a_session_decides(start, folder, other_model):
    for last_from_disk in (True, False):
        with start() as driver:
            session = driver.begin()
            disk = UpdateWeightFromDiskReqInput(model_path=str(folder), session_id=session)
            if not last_from_disk:
                ok(driver.call(disk))
            ok(from_tensors(driver, other_model, count=2, session_id=session))
            if last_from_disk:
                ok(driver.call(disk))
            ok(driver.end(session_id=session))
        assert found(start).weights == ("valid" if last_from_disk else "invalid")


def test_a_folder_that_changes_before_the_commit_is_lost(start, folder, tiny_model):
    with start() as driver:
        session = driver.begin()
        ok(driver.update(folder, session_id=session))
        shutil.copyfile(tiny_model / "model.safetensors", folder / "model.safetensors")
        ok(driver.end(session_id=session))
    assert found(start).weights == "invalid"


def test_uncommitted_updates_are_not_remembered(start, folder, other_model):
    with start() as driver:
        from_disk(driver, folder)
        committed = driver.checksum()
        session = driver.begin()
        ok(from_tensors(driver, other_model, count=2, session_id=session))
        ok(driver.end(session_id=session, commit=False))
        assert driver.status().weights == "poisoned"
    with start() as driver:
        driver.assert_status(weights="valid", weight_version="step-17")
        assert driver.checksum() == committed


@pytest.mark.parametrize("came", ["disk", "tensors"])
def test_commits_that_a_full_disk_has_not_recorded_are_lost(start, folder, other_model, came, caplog):
    with start() as driver:
        assert driver.update(folder).durable is True
        with full_disk():
            for epoch in range(2, 7):
                reply = ok(driver.update(folder) if came == "disk" else from_tensors(driver, other_model))
                assert (reply.committed, reply.weights_epoch, reply.durable) == (True, epoch, False)
    assert "could not be written" in caplog.text
    with start() as driver:
        lost = driver.status()
        assert (lost.weights, lost.weight_version) == ("invalid", "default")
        assert lost.weights_epoch > 6, "epochs do not repeat"
        assert "is not on record" in lost.weights_detail
        refused(driver, "weights_invalid", min_weights_epoch=2)
    with start() as driver:  # the loss is remembered until an update is complete
        assert driver.status().weights == "invalid"
        assert driver.status().weights_epoch == lost.weights_epoch + 1
        reply = ok(driver.update(folder))
        assert (reply.weights_epoch, reply.durable) == (lost.weights_epoch + 2, True)
    assert found(start).weights == "valid"


def test_a_commit_after_the_disk_is_mended_is_on_record(start, folder, other_model):
    with start() as driver:
        with full_disk():
            assert ok(from_tensors(driver, other_model)).durable is False
        assert driver.update(folder).durable is True
    assert found(start, "weights", "weights_epoch") == ("valid", 3)


def test_a_commit_that_cannot_even_be_marked_is_refused(start, folder, caplog):
    with start() as driver:
        from_disk(driver, folder)
        with full_disk(limit=0):
            reply = driver.update(folder)
        assert_error(reply, "state_file_error")
        assert driver.status().weights_epoch == 1
    assert found(start, "weights", "weight_version") == ("valid", "step-17")


def test_a_replaced_file_of_equal_size_and_time_is_noticed(start, folder, tiny_model):
    with start() as driver:
        from_disk(driver, folder)
    for replace_file in (True, False):
        file = folder / "model.safetensors"
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        if replace_file:
            file.unlink()
        file.write_bytes((tiny_model / "model.safetensors").read_bytes())
        os.utime(file, ns=times)
        with start() as driver:
            assert driver.status().weights == "invalid"
            assert "have changed" in driver.status().weights_detail
            from_disk(driver, folder)


NO_RECORDS = [
    b"", b"{", b"\0" * 300, b"[1]", b'{"caesura_weights_record": 2, "weights_epoch": 7}', b"\xff" * 99,
    b"[" * 50_000, b"7" * 99_999,
]  # fmt: skip


def test_a_file_that_is_no_record_is_put_aside(start, folder, tmp_path, caplog):
    for content in NO_RECORDS:
        caplog.clear()
        (tmp_path / "weights.json").write_bytes(content)
        with start() as driver:
            first = driver.status()
            assert first.weights == "invalid"
            assert first.weights_epoch > 1_700_000_000_000
            assert "is no record of weights" in first.weights_detail
        assert "is no record of weights" in caplog.text
        assert (tmp_path / "weights.json.unreadable").read_bytes() == content
        (tmp_path / "weights.json.unreadable").unlink()
    with start() as driver:
        assert driver.status().weights == "invalid"
        from_disk(driver, folder)
        assert driver.status().weights_epoch == first.weights_epoch + 2
    assert found(start).weights == "valid"


def test_a_record_of_another_model_gives_its_epoch_alone(start, folder, other_model, caplog):
    with start() as driver:
        from_disk(driver, folder)
    with start(other_model) as driver:
        status = driver.status()
        assert (status.weights, status.weights_epoch, status.weight_version) == ("valid", 2, "default")
        assert status.model_path == str(other_model)
    assert "is ignored but for its epoch" in caplog.text


def test_what_cannot_be_a_state_file_refuses_the_start(tiny_model, tmp_path):
    """Replacing the file, as a record is, would take /dev/null from a machine whose engine runs as root."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("missing/weights.json", "state_file"), ("folder", "state_file"), ("pipe", "is no regular file"),
    ):  # fmt: skip
        with pytest.raises(CaesuraError, match=words) as caught:
            EngineDriver(str(tiny_model), state_file=str(tmp_path / name))
        assert caught.value.code == "state_file_error"
    assert (tmp_path / "pipe").is_fifo()


def test_leftover_of_the_next_record_is_replaced(start, folder, tmp_path):
    """A FIFO would hold up the commit for ever, and a file of somebody else would stay writable for them."""
    path, temporary = tmp_path / "weights.json", tmp_path / ".weights.json.new"
    with start() as driver:
        os.mkfifo(temporary)
        # A writer that opens it is seen, and not stuck.
        reader = os.open(temporary, os.O_RDONLY | os.O_NONBLOCK)
        try:
            from_disk(driver, folder)
            assert os.read(reader, 1) == b""
        finally:
            os.close(reader)
        assert stat.S_ISREG(path.lstat().st_mode)
        temporary.touch(0o666)
        from_disk(driver, folder)
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_bytes())["weights_epoch"] == 2


def test_two_engines_do_not_share_a_file(start):
    with start(), pytest.raises(CaesuraError, match="another engine writes it"):
        start()
    assert found(start).weights_epoch == 1


def test_the_file_is_private_small_and_complete(start, folder, tmp_path):
    path = tmp_path / "weights.json"
    with start() as driver:
        from_disk(driver, folder)
        status = driver.status()
        record = json.loads(path.read_bytes())  # by the time the reply is there
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 1024
    assert record["incarnation"] == status.incarnation
    assert (record["weights_epoch"], record["weight_version"]) == (1, "step-17")
    assert record["source"] == str(folder)
    assert len(record["digest"]) == 64


def test_adapters_of_folders_are_loaded_again(start, tiny_model, tmp_path, caplog):
    paths = [make_adapter(tiny_model, tmp_path / str(seed), ATTENTION, seed=seed) for seed in range(2)]
    changed = Path(shutil.copytree(paths[0], tmp_path / "changed"))
    options = {"scripted": False, "enable_lora": True, "max_loras": 6}

    def loaded(driver: EngineDriver) -> list[AdapterStatus]:
        return [each for each in driver.status().adapters if not each.replaced]

    with start(**options) as driver:
        for name, path in (
            ("gone", paths[0]),
            ("a", paths[0]),
            ("b", paths[1]),
            ("changed", changed),
            ("a", paths[1]),
        ):
            ok(driver.call(LoadAdapterReqInput(name=name, path=str(path), pinned=name == "b")))
        named = load_file(paths[0] / "adapter_model.safetensors")
        specs, frames = as_frames(next(iter(buckets(list(named.items()), 1 << 30))))
        config = json.loads((paths[0] / "adapter_config.json").read_text())
        ok(driver.call(LoadAdapterReqInput(name="sent", specs=specs, config=config), buffers=frames))
        ok(driver.call(UnloadAdapterReqInput(name="gone")))
        ok(driver.update(tiny_model))
        before = {each.name: each for each in loaded(driver)}
        tokens = tokens_of(driver.complete(PROMPT, adapter="a"))
    shutil.copytree(paths[1], changed, dirs_exist_ok=True)
    for _ in range(2):
        with start(**options) as driver:
            assert {each.name: each for each in loaded(driver)} == {name: before[name] for name in "ab"}
            assert tokens_of(driver.complete(PROMPT, adapter="a")) == tokens
            refused(driver, "unknown_adapter", adapter="changed")
            assert ok(driver.call(LoadAdapterReqInput(name="a", path=str(paths[1])))).adapter_epoch in (7, 8)
            before |= {each.name: each for each in loaded(driver)}
    assert (
        "adapter 'sent' of before the restart is lost: its tensors were sent, which leaves no copy"
        in caplog.text
    )
    assert "adapter 'changed' of before the restart is lost" in caplog.text
    with start(scripted=False) as driver:
        assert loaded(driver) == []
    assert "adapter 'a' of before the restart is lost: this engine serves no adapters" in caplog.text


def test_a_lost_adapter_is_named_until_it_is_loaded(start, tiny_model, tmp_path):
    path = make_adapter(tiny_model, tmp_path / "a", ATTENTION)
    load = LoadAdapterReqInput(name="a", path=str(path))
    with start(scripted=False, enable_lora=True) as driver:
        ok(driver.call(load))
    path.rename(tmp_path / "away")
    with start(scripted=False, enable_lora=True) as driver:
        error = refused(driver, "unknown_adapter", adapter="a")
        assert "adapter 'a' was lost in a restart, load it again" in error.message
        (tmp_path / "away").rename(path)
        ok(driver.call(load))
        driver.complete(PROMPT, adapter="a")
        ok(driver.call(UnloadAdapterReqInput(name="a")))
        assert "no adapter 'a' is loaded: none is" in refused(driver, "unknown_adapter", adapter="a").message


def test_an_adapter_that_cannot_be_recorded_is_not_published(start, tiny_model, tmp_path):
    paths = [make_adapter(tiny_model, tmp_path / str(seed), ATTENTION, seed=seed) for seed in range(2)]
    with start(scripted=False, enable_lora=True) as driver:
        ok(driver.call(LoadAdapterReqInput(name="a", path=str(paths[0]))))
        (tmp_path / ".weights.json.new").mkdir()
        for request in (LoadAdapterReqInput(name="a", path=str(paths[1])), UnloadAdapterReqInput(name="a")):
            assert_error(driver.call(request), "state_file_error")
            assert [each.path for each in driver.status().adapters] == [str(paths[0])]
        (tmp_path / ".weights.json.new").rmdir()
        ok(driver.update(tiny_model))
    with start(scripted=False, enable_lora=True) as driver:
        assert [each.path for each in driver.status().adapters] == [str(paths[0])]
