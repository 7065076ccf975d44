"""The machine's own speed at reading and copying a checkpoint: the floor of a disk update."""

import os
import statistics
import time
from pathlib import Path

BUCKET_BYTES = 8 << 20


def plain_read_and_copy(checkpoint: Path, repeats: int = 5) -> dict[str, float]:
    """Read every weight file in buckets and copy each bucket into memory that is already resident.

    Returns:
        ``seconds``, the median of ``repeats`` passes, and ``bytes``. The files come from the page cache:
        whoever writes a checkpoint for an engine to load has just written it.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    destination = memoryview(bytearray(total))
    bucket = memoryview(bytearray(BUCKET_BYTES))
    seconds = [_one_pass(files, bucket, destination) for _ in range(repeats + 1)]
    return {"seconds": statistics.median(seconds[1:]), "bytes": float(total)}


def _one_pass(files: list[Path], bucket: memoryview, destination: memoryview) -> float:
    start = time.perf_counter()
    written = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            offset = 0
            while count := os.preadv(descriptor, [bucket], offset):
                destination[written : written + count] = bucket[:count]
                offset += count
                written += count
        finally:
            os.close(descriptor)
    return time.perf_counter() - start
