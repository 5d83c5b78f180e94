"""Lossless compression of states: their bytes shuffled, then zstd.

The high bytes of neighbouring floats, sign and exponent, are much alike, the low ones are noise; apart they compress,
mixed they hardly do. A block stands alone, so that one sample is read without the others and blocks decode in parallel:
zstd and large copies run without Python's lock.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard
from torch import Tensor

LEVEL = 1  # higher ones find little more in what the shuffle leaves
BLOCK_BYTES = 2**20  # before compression; about what a core's cache holds


def block_rows(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def compress(rows: Tensor) -> bytes:
    """One block of contiguous rows."""
    values = rows.view(torch.uint8).numpy().reshape(-1, rows.element_size())  # [n, bytes of a value]
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(values.T).data)


def decompress(block: Tensor, rows: Tensor) -> None:
    """The block's values into `rows`, which are contiguous and as many. ValueError where the block holds others."""
    values = rows.view(torch.uint8).numpy().reshape(-1, rows.element_size())  # [n, bytes of a value]
    data = block.numpy().data
    if zstandard.frame_content_size(data) != values.size:  # asked first: so much is allocated, whatever is there
        raise ValueError(f"a block is not of {values.size} bytes")
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    for byte, plane in enumerate(planes.reshape(values.shape[::-1])):  # eight times as fast as all at once
        values[:, byte] = plane
