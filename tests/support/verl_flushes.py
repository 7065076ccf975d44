"""Flushes in the form of verl's ``delta_sharded`` engine, written by hand after its sender."""

import json
from itertools import chain

import torch


def as_bytes(value):
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def flush(entries, *, encoding="indices", dtype=torch.bfloat16, width=4, **fields):
    """Return the tensors of a flush of (name, shape, positions, values)."""
    params, places, numbers = [], [], []
    for name, shape, at, values in entries:
        starts = 4 * sum(map(len, places)), sum(map(len, numbers))
        places.append([] if at is None else at)
        numbers.append(values)
        params.append(
            {
                "name": name, "dtype": str(dtype).removeprefix("torch."), "shape": shape,
                "pos_start": starts[0], "pos_end": 4 * sum(map(len, places)), "pos_width": width,
                "val_start": starts[1], "val_end": sum(map(len, numbers)),
            }
        )  # fmt: skip
    positions = torch.tensor([*chain(*places)], dtype=torch.int32).view(torch.uint8)
    values = torch.tensor([*chain(*numbers)], dtype=dtype)
    hashes = [int(torch.hash_tensor(each).item()) if each.numel() else 0 for each in (positions, values)]
    spec = {"encoding": encoding, "params": params, "checksum": hashes[0] ^ (hashes[1] << 1), **fields}
    named = [("__delta_spec__", as_bytes(json.dumps(spec).encode())), ("__values__", values)]
    return named if encoding == "dense" else [*named, ("__positions__", positions)]
