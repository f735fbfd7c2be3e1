"""Checksums of data on flash.

A part is rows of blocks of 4 KiB, each block 1,024 words of 32 bits, x[row, lane]. With fixed odd weights w,

    sum[lane] = Σ_row w[row] · x[row, lane]  mod 2³²            checksum = crc32 of the 1,024 sums

An odd number has an inverse mod 2³², so that an error within one block changes the sums wherever it changes a word, and
is missed with the odds of a CRC, 2⁻³²; so is, the weights being random, an error in several blocks (a stale, a
misplaced, a torn one), but for one that in the same lanes of two blocks changes nothing other than the highest bits.
CRC-32 alone (`zlib`) would miss nothing of that kind; it takes several times as long as this, whose speed
`benchmarks/tiers.py` measures, and so a good part of what a fast disk takes.
"""

from __future__ import annotations

import random
import zlib

import numpy as np
import torch

BLOCK = 4096
"""Bytes; parts are a multiple of it."""
_LANES = BLOCK // 4
_draw = random.Random(0)
_WEIGHTS = np.array([_draw.getrandbits(32) | 1 for _ in range(1024)], dtype=np.uint32)
MOST = BLOCK * len(_WEIGHTS)
"""Bytes of the largest part."""


def checksum(part: torch.Tensor) -> int:
    """Of uint8 [n] on the host, n a multiple of `BLOCK` and at most `MOST`."""
    assert part.numel() in range(0, MOST + 1, BLOCK), part.shape
    blocks = part.numpy().view(np.uint32).reshape(-1, _LANES)
    return zlib.crc32(np.einsum("r,rl->l", _WEIGHTS[: len(blocks)], blocks))
