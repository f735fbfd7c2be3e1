"""Errors that disks make change the checksum."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.offloading.tiers.file_io import BLOCK, MOST, checksum
from hyper_parallel.offloading.tiers.flash import PART


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_part_fits() -> None:
    assert PART <= MOST
    assert checksum(noise(0)) == checksum(noise(0))
    assert checksum(noise(MOST)) != checksum(noise(MOST, 1))


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_counts(bit: int) -> None:
    x = noise(8 * BLOCK)
    before = checksum(x)
    for at in range(0, x.numel(), 97):
        x[at] ^= 1 << bit
        assert checksum(x) != before
        x[at] ^= 1 << bit
    assert checksum(x) == before


def test_two_flipped_bits_in_a_block_count() -> None:
    x = noise(2 * BLOCK)
    before = checksum(x)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2000):
        a, b = torch.randint(BLOCK, 2 * BLOCK, (2,), generator=draw).tolist()
        x[a] ^= 0x80
        x[b] ^= 0x80
        assert a == b or checksum(x) != before
        x[a] ^= 0x80
        x[b] ^= 0x80


def test_misplaced_and_missing_blocks_count() -> None:
    x = noise(64 * BLOCK)
    before, blocks = checksum(x), x.view(64, BLOCK)
    for first in range(64):
        for second in range(first):
            order = list(range(64))
            order[first], order[second] = second, first
            assert checksum(blocks[order].reshape(-1)) != before
        torn = x.clone()
        torn[first * BLOCK :] = 0
        assert checksum(torn) != before
