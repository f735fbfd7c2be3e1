"""Tensor digests: the bits of a tensor, and random projections that measure how far two tensors differ.

‖a − b‖² ≈ mean_k ⟨s_k, a − b⟩²,        s_k: signs                            Achlioptas, JCSS 66 (2003)
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.offloading.runtime.executor import whole

SEED = 0x5EED
TOLERANCE = 1e-5
"""Of a tensor's norm, or 3 units in the last place of its dtype where that is more."""
_CHUNK = 1 << 16
"""Elements that are looked at at once; fewer of small tensors."""
_PROJECTIONS = 8
HOST_DEVICE = "cpu"
"""Whose memory this process reads."""


@dataclass(frozen=True)
class TensorDigest:
    """Digest of one tensor: its bits, its norm and its random projections."""

    digest: bytes
    dtype: torch.dtype
    norm: float = 0.0
    projections: tuple[float, ...] = ()

    def off(self, other: TensorDigest) -> float:
        """How far the other is off, of this one's norm."""
        if self.digest == other.digest:
            return 0.0
        if self.dtype != other.dtype or not math.isfinite(self.norm + other.norm):
            return math.inf
        apart = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(apart) / len(apart)) / max(self.norm, 1e-300)

    @property
    def tolerance(self) -> float:
        """What rounding explains."""
        return max(TOLERANCE, 3 * torch.finfo(self.dtype).eps) if self.dtype.is_floating_point else 0.0


def digest_of(x: Tensor, closely: bool) -> TensorDigest:
    """A digest of a tensor's bits, whatever its strides; `closely`: its projections too."""
    digest = hashlib.blake2b(str((tuple(x.shape), x.dtype)).encode(), digest_size=16)
    norm, projections, at = 0.0, [0.0] * _PROJECTIONS, 0
    direct = x.device.type == HOST_DEVICE and not closely
    for part in _parts(x.detach(), x.numel() if direct else max(256, min(_CHUNK, x.numel() // 16))):
        # NumPy's view of a storage would forbid ever to give its memory up.
        there = part.contiguous() if direct else part.to(HOST_DEVICE, copy=True)
        if there.numel():
            digest.update((ctypes.c_char * there.nbytes).from_address(there.data_ptr()))
        if closely:
            values = there.to(torch.float64)
            norm += float(values.square().sum())
            for k, signs in enumerate(_signs(at, values.numel())):
                projections[k] += float((values * signs).sum())
            at += values.numel()
    return TensorDigest(digest.digest(), x.dtype, math.sqrt(norm), tuple(projections))


def fingerprint(x: Tensor) -> tuple[int, ...]:
    """Numbers that change when a tensor's storage does, at the speed of its memory: the sum of its words, which any one
    change alters, that of every seventh word, which knows the order too, and the bytes behind the last word."""
    with outside_modes():
        storage = whole(x.detach())
        words = storage[: storage.numel() // 8 * 8].view(torch.int64)
        # Number by number: what is kept on the device would be there beside the budget.
        return (int(words.sum()), int(words[::7].sum()), *storage[words.numel() * 8 :].tolist())


def _parts(x: Tensor, count: int) -> Iterator[Tensor]:
    """The elements in order, at most `count` at a time, in one dim."""
    if x.is_contiguous():
        yield from x.view(-1).split(max(count, 1))
    elif x.dim() <= 1:
        yield from x.split(max(count, 1))
    else:
        for row in x.unbind(0):
            yield from _parts(row, count)


def _signs(first: int, count: int) -> Iterator[Tensor]:
    """Of the elements from `first` on, for each projection: 1 or −1, a hash of the element's place."""
    place = torch.arange(first, first + count, dtype=torch.int64)
    for factor in _FACTORS:
        mixed = place * factor
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[0]
        yield 1 - 2 * ((mixed >> 41) & 1).to(torch.float64)


_draw = random.Random(SEED)
_FACTORS = tuple(_draw.getrandbits(62) | 1 for _ in range(_PROJECTIONS))
