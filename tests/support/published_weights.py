"""Folders of published weights, written from the formats' descriptions alone: slime's and SkyRL's."""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}


def octets(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def encoded(old: torch.Tensor, new: torch.Tensor, encoding: str) -> torch.Tensor:
    before, after = octets(old), octets(new)
    if encoding == "xor":
        content = (before ^ after).tobytes()
    else:
        places = np.flatnonzero(before != after).astype("<u4")
        content = np.array([len(places)], "<u4").tobytes() + places.tobytes() + after[places].tobytes()
    return torch.frombuffer(bytearray(zstandard.ZstdCompressor(level=1).compress(content)), dtype=torch.uint8)


def changed(old: Weights, new: Weights) -> list[str]:
    return [name for name in new if not np.array_equal(octets(old[name]), octets(new[name]))]


def publish_slime(
    source: Path,
    number: int,
    old: Weights,
    new: Weights,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    **metadata: object,
) -> Path:
    """Write ``weight_v{number:06d}``, the delta of ``new`` to ``old``, in up to two files."""
    folder = source / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    names = changed(old, new)
    weight_map = {}
    for part in range(min(2, len(names))):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        mine = names[part::2]
        sums = {name: CHECKSUMS[checksum](octets(new[name])) for name in mine}
        save_file(
            {name: encoded(old[name], new[name], encoding) for name in mine}, folder / file, metadata=sums
        )
        weight_map |= dict.fromkeys(mine, file)
    described = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    index = {"metadata": {**described, **metadata}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def publish_skyrl(
    sync_dir: Path, number: int, old: Weights, new: Weights, *, checksum: str = "xxh3-128", **manifest: object
) -> Path:
    """Write ``v{number:08d}``: payloads, then the manifest."""
    folder = sync_dir / f"v{number:08d}"
    folder.mkdir(parents=True)
    file = "payload-rank000000-file000000.safetensors"
    payload, records = {}, []
    for name in changed(old, new):
        payload[name] = encoded(old[name], new[name], "xor")
        record = {
            "name": name,
            "dtype": str(new[name].dtype).removeprefix("torch."),
            "shape": list(new[name].shape),
            "uncompressed_num_bytes": new[name].nbytes,
            "compressed_num_bytes": payload[name].nbytes,
            "payload_file": file,
            "payload_key": name,
            "checksum": CHECKSUMS[checksum](octets(new[name])),
            "checksum_algorithm": checksum,
        }
        records.append(record)
    save_file(payload, folder / file)
    described = {
        "version": number,
        "base_version": number - 1,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(record["uncompressed_num_bytes"] for record in records),
        "total_compressed_num_bytes": sum(record["compressed_num_bytes"] for record in records),
        "payload_files": [file],
    }
    (folder / "manifest.json").write_text(json.dumps({**described, **manifest}))
    return folder
