"""PNG (ISO/IEC 15948) of 8-bit RGB pixels, and pictures made small.

Invariant: rows are unfiltered, so the same pixels give the same bytes.
"""

import struct
import zlib

from ..connection.images import ImageTensor


def png_of(image: ImageTensor) -> bytes:
    """A PNG of uint8 [height, width, 3]."""
    height, width, _ = image.shape
    stride, data = 3 * width, memoryview(image.data)
    rows = b"".join(
        b"\0" + bytes(data[start : start + stride]) for start in range(0, height * stride, stride)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def shrunk(image: ImageTensor, longest: int) -> ImageTensor:
    """Every k-th pixel of every k-th row of uint8 [height, width, 3], so that no side is over ``longest``; a copy."""
    height, width, _ = image.shape
    step = max(1, -(-max(height, width) // longest))
    data, stride = bytes(image.data), 3 * width
    rows = []
    for start in range(0, height * stride, step * stride):
        row = data[start : start + stride]
        kept = bytearray(3 * -(-width // step))
        for channel in range(3):
            kept[channel::3] = row[channel :: 3 * step]
        rows.append(bytes(kept))
    return ImageTensor("U8", (len(rows), -(-width // step), 3), b"".join(rows))
