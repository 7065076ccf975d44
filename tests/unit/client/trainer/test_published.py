"""Published versions reach the copy of a checkpoint whole and verified, or not at all."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file
from support.faults import Fault, full_disk
from support.published_weights import publish_skyrl, publish_slime

from caesura.client import CheckpointError, InvalidRequest, Unsupported
from caesura.client.trainer import WeightDelta, published
from caesura.client.trainer.published import pull, skyrl_version, slime_version


def versions(count):
    """Return ``count`` versions of weights, each with few changes."""
    draw = torch.Generator().manual_seed(5)
    found = [
        {
            "embed": torch.randn(50, 8, generator=draw).bfloat16(),
            "layer.0": torch.randn(20, 20, generator=draw).bfloat16(),
            "layer.1": torch.randn(20, 20, generator=draw),
            "norm": torch.ones(20),
        }
    ]
    for number in range(1, count):
        new = {name: tensor.clone() for name, tensor in found[-1].items()}
        for name in list(new)[: 1 + number % 4]:
            new[name].view(-1)[number * 3 % 19] += 1 + number
        found.append(new)
    return found


def save(folder, weights):
    folder.mkdir(parents=True)
    names = list(weights)
    for part in range(2):
        save_file({name: weights[name] for name in names[part::2]}, folder / f"model-{part}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def content(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def same(folder, weights):
    found = content(folder)
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def skyrl_in(folder, number):
    return skyrl_version(folder / f"v{number:08d}", number)


@pytest.fixture
def places(tmp_path):
    """Base checkpoint, folder of the trainer's versions, copy."""
    return save(tmp_path / "base", versions(1)[0]), tmp_path / "source", tmp_path / "local"


@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_slimes_chain_reaches_the_copy(places, encoding, checksum):
    base, source, local = places
    weights = versions(4)
    read = partial(slime_version, source)
    for number in (1, 2, 3):
        publish_slime(
            source, number, weights[number - 1], weights[number], encoding=encoding, checksum=checksum
        )
    delta = pull(local, base, 1, read)
    assert same(local, weights[1]) and same(base, weights[0]) and (local / "config.json").exists()
    assert WeightDelta.load(delta).keys() == WeightDelta.between(weights[0], weights[1]).keys()
    assert pull(local, base, 2, read) and same(local, weights[2])
    assert pull(local, base, 2, read) and same(local, weights[2]), "it is there already"
    assert pull(local, base, 1, read) and same(local, weights[1]), "an earlier one begins again"
    for _ in range(2):
        assert pull(local, base, 3, read) is None, (
            "engines with version 1 have not the base of the last delta"
        )
        assert same(local, weights[3])


@pytest.mark.parametrize("checksum", ["xxh3-128", "sha256"])
def test_skyrls_chain_reaches_the_copy(places, checksum):
    base, source, local = places
    weights = versions(3)
    for number in (1, 2):
        publish_skyrl(source, number, weights[number - 1], weights[number], checksum=checksum)
    assert pull(local, base, 2, partial(skyrl_in, source)) is None and same(local, weights[2])


def test_a_whole_version_restarts_the_chain(places):
    base, source, local = places
    weights = versions(5)
    publish_slime(source, 1, weights[0], weights[1])
    assert pull(local, base, 1, partial(slime_version, source))
    shutil.rmtree(source / "weight_v000001")  # as trainers do with what has been loaded
    save(source / "weight_v000003", weights[3])
    publish_slime(source, 4, weights[3], weights[4])
    assert pull(local, None, 3, partial(slime_version, source)) is None, "a whole checkpoint is no delta"
    assert same(local, weights[3])
    assert pull(local, None, 4, partial(slime_version, source)) and same(local, weights[4])


def spoil_payload(folder):
    path = min(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x55
    path.write_bytes(data)


def cut(folder):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def lose(folder):
    min(folder.glob("*.safetensors")).unlink()


def change_metadata(folder, entry="metadata", **fields):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index[entry] |= fields
    path.write_text(json.dumps(index))


def put_a_pipe(folder):
    path = min(folder.glob("*.safetensors"))
    path.unlink()
    os.mkfifo(path)


def empty_payload(folder):
    save_file({"norm": packed(b"")}, folder / "model.safetensors")


def packed(content):
    return torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(content)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (spoil_payload, CheckpointError, "is torn"),
        (cut, CheckpointError, "truncated"),
        (lose, CheckpointError, "No such file"),
        (shutil.rmtree, CheckpointError, "has not been published"),
        (partial(change_metadata, base_version="000000"), CheckpointError, "changes version 0, not 1"),
        (partial(change_metadata, version="000005"), CheckpointError, "says that it is version 000005"),
        (partial(change_metadata, version="x"), CheckpointError, "says that it is version x"),
        (partial(change_metadata, base_version=[]), CheckpointError, "changes version -1, not 1"),
        (partial(change_metadata, entry="weight_map", a="x\0y"), CheckpointError, "names a file outside"),
        (put_a_pipe, CheckpointError, "is not a regular file"),
        (empty_payload, CheckpointError, "has 0 bytes for 80 of 'norm'"),
        (partial(change_metadata, delta_encoding="add"), Unsupported, "'add' is not known"),
        (partial(change_metadata, compression_format="lz4"), Unsupported, "must be zstd"),
        (partial(change_metadata, checksum_format="crc"), Unsupported, "'crc' is not known"),
    ],
)
def test_a_version_that_is_not_whole_changes_nothing(places, spoil, error, words):
    base, source, local = places
    weights = versions(3)
    for number in (1, 2):
        publish_slime(source, number, weights[number - 1], weights[number], encoding="xor")
    read = partial(slime_version, source)
    pull(local, base, 1, read)
    spoil(source / "weight_v000002")
    with pytest.raises(error, match=words):
        pull(local, base, 2, read)
    assert same(local, weights[1])
    shutil.rmtree(source / "weight_v000002", ignore_errors=True)
    publish_slime(source, 2, weights[1], weights[2])
    assert pull(local, base, 2, read) and same(local, weights[2])


def test_a_delta_of_another_base_changes_nothing(places):
    base, source, local = places
    weights = versions(3)
    publish_slime(source, 1, weights[1], weights[2])
    with pytest.raises(CheckpointError, match="of another base"):
        pull(local, base, 1, partial(slime_version, source))
    assert same(local, weights[0])


def test_a_pull_that_died_while_writing_is_completed(places):
    base, source, local = places
    weights = versions(5)
    for number in (1, 2, 3, 4):
        publish_slime(source, number, weights[number - 1], weights[number])
    read = partial(slime_version, source)
    pull(local, base, 2, read)

    with Fault(published.words, "scatter", MemoryError(), calls={1}), pytest.raises(MemoryError):
        pull(local, base, 3, read)  # the first tensor has been written
    assert not same(local, weights[2])
    assert pull(local, base, 3, read) and same(local, weights[3])
    assert pull(local, base, 4, read) and same(local, weights[4])


def test_a_frame_that_claims_too_much_is_refused(places):
    base, source, local = places
    weights = versions(2)
    folder = publish_slime(source, 1, weights[0], weights[1])
    name = next(iter(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]))
    small = {name: weights[0][name].view(-1)[:4].clone()}
    save_file(small, base / "model-0.safetensors")
    (base / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds \d+ bytes for .*, of at most 8"):
        pull(local, base, 1, partial(slime_version, source))


def test_a_manifest_names_no_file_outside(places):
    base, source, local = places
    weights = versions(2)
    folder = publish_skyrl(source, 1, weights[0], weights[1])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"][0]["payload_file"] = "../../base/model-0.safetensors"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="names a file outside"):
        pull(local, base, 1, partial(skyrl_in, source))


def test_versions_and_bases_that_are_not_there(places):
    base, source, local = places
    with pytest.raises(InvalidRequest, match="must not be negative"):
        pull(local, base, -1, partial(slime_version, source))
    with pytest.raises(CheckpointError, match="no checkpoint to begin with"):
        pull(local, None, 0, partial(slime_version, source))
    assert pull(local, base, 0, partial(slime_version, source)) is None and same(local, versions(1)[0])
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        pull(local, base, 1, partial(skyrl_in, source))


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_base_is_not_its_own_copy(places, is_linked):
    base, source, local = places
    if is_linked:
        local.symlink_to(base)
    with pytest.raises(CheckpointError, match="needs a folder of its own"):
        pull(local if is_linked else base, base, 0, partial(slime_version, source))
    assert same(base, versions(1)[0])


def test_files_that_no_pull_has_made_stay(places):
    base, _, local = places
    save(local, versions(2)[1])
    for number, begin in ((0, base), (0, local.with_name("typo")), (3, None)):
        with pytest.raises(CheckpointError, match="that no pull has made"):
            pull(local, begin, number, lambda _: published.Version(base, None))
    assert same(local, versions(2)[1])


def test_a_checkpoint_that_is_not_whole_is_not_copied(places):
    base, source, local = places
    read = partial(slime_version, source)
    pull(local, base, 0, read)
    whole = save(source / "weight_v000002", versions(3)[2])
    names = dict.fromkeys(versions(1)[0], "model-0.safetensors") | {"layer.0": "model-9.safetensors"}
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"model-9\.safetensors"):
        pull(local, base, 2, read)
    (source / "weight_v000003").mkdir()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        pull(local, base, 3, read)
    assert same(local, versions(1)[0])


def test_a_copy_that_finds_no_room_keeps_what_it_has(places):
    base, source, local = places
    read = partial(slime_version, source)
    pull(local, base, 0, read)
    save(source / "weight_v000002", versions(3)[2])
    with full_disk(50), pytest.raises(CheckpointError, match="File too large"):
        pull(local, base, 2, read)
    assert same(local, versions(1)[0])
    assert pull(local, base, 0, read) is None and pull(local, base, 2, read) is None
    assert same(local, versions(3)[2])


def test_a_copy_interrupted_between_files_begins_again(places):
    base, source, local = places
    read = partial(slime_version, source)
    pull(local, base, 0, read)
    save(source / "weight_v000002", versions(3)[2])
    fault = Fault(published, "_sync", MemoryError(), only=lambda path: path == local)
    with fault, pytest.raises(MemoryError):
        pull(local, base, 2, read)
    pull(local, base, 0, read)
    assert same(local, versions(1)[0])


def test_a_whole_version_leaves_no_old_index_and_no_link(places):
    base, source, local = places
    read = partial(slime_version, source)
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "model-1.safetensors"}}')
    pull(local, base, 0, read)
    (local / "config.json").unlink()
    (local / "config.json").symlink_to(base / "config.json")
    whole = save(source / "weight_v000001", versions(2)[1])
    (whole / "model-0.safetensors").rename(whole / "other.safetensors")
    (whole / "config.json").write_text("[]")
    pull(local, base, 1, read)
    names = {".weight_sync", "config.json", "model-1.safetensors", "other.safetensors"}
    assert {path.name for path in local.iterdir()} == names
    assert (local / "config.json").read_text() == "[]" and (base / "config.json").read_text() == "{}"


def test_a_saved_delta_that_is_lost_begins_anew(places):
    base, source, local = places
    weights = versions(2)
    publish_slime(source, 1, *weights)
    delta = pull(local, base, 1, partial(slime_version, source))
    shutil.rmtree(delta)
    state = local / ".weight_sync" / "state.json"
    state.write_text('{"version": "000000", "applying": "000001"}')
    assert pull(local, base, 1, partial(slime_version, source)) and same(local, weights[1])
    state.write_text('{"version": "first"}')
    with pytest.raises(CheckpointError, match="cannot be read"):
        pull(local, base, 1, partial(slime_version, source))


def test_tensors_of_no_elements_and_digits_in_capitals(places):
    base, source, local = places
    old, new = ({"empty": torch.zeros(0, 4), "norm": torch.full([9], value)} for value in (1.0, 2.0))
    shutil.rmtree(base)
    base.mkdir()
    save_file(old, base / "model.safetensors")
    folder = publish_slime(source, 1, old, new)
    file = folder / "model-00001-of-00002.safetensors"
    norm = load_file(file)["norm"]
    sums = {"norm": published.checksum("xxh3-128", published._data(new["norm"])).upper()}
    sums["empty"] = published.checksum("xxh3-128", b"")
    save_file({"empty": packed(b""), "norm": norm}, file, metadata=sums)
    assert pull(local, base, 1, partial(slime_version, source)) and same(local, new)
