"""Checkpoint folders: every byte of every tensor as the files have it, or a typed refusal.

The first byte says how many files there are and whether there is an index; the rest is cut into them at
``SEPARATOR``.
"""

import tempfile
from functools import cache
from pathlib import Path

from caesura.io_struct import CaesuraError
from caesura.scheduler.weights.transports.disk import open_checkpoint

SEPARATOR = b"\xff--\xff"
BUCKET_BYTES = 64
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "x.safetensors",
)


def target(data: bytes) -> None:
    if not data:
        return
    folder = _folder()
    for number, name in enumerate(NAMES):
        (folder / name).unlink(missing_ok=True)
        if data[0] >> number & 1:
            parts = data[1:].split(SEPARATOR)
            (folder / name).write_bytes(parts[min(number, len(parts) - 1)])
    try:
        checkpoint = open_checkpoint(folder)
        read = sum(piece.rows.nbytes for piece in checkpoint.pieces(BUCKET_BYTES))
    except CaesuraError as error:
        assert error.code == "checkpoint_error", error
        return
    assert read == checkpoint.total_bytes
    assert all(spec.offset >= 0 and spec.nbytes >= 0 for spec in checkpoint.specs)


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="caesura-fuzz-"))


WORDS = [
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "weight_map",
    "BF16",
    "F32",
    "I64",
    "BOOL",
    *NAMES[2:],
]
