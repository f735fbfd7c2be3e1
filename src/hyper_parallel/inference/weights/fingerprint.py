"""A fingerprint of a model's weights, by which a change between two runs is noticed.

For each parameter and buffer: its identity and address, the version that autograd counts, and sums over its bits; for
each module its settings (as adapters have). The version misses writes through `.data` and by kernels of one's own, and
the sums see these: of words x[row, lane],

    lanes[lane] = Σ_row x[row, lane],   rows[row] = Σ_lane x[row, lane]   mod 2⁶⁴

are hashed, so that a changed word changes both, and so does an exchange of rows or of lanes. Reading all weights once
costs about as much as the generation of one token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.shard.sharded_model import is_sharded

_LANES = 1024
_ROWS = 128
"""That are summed at once: sums of 32-bit words are made from a copy with 64 bits."""


def fingerprint(model: nn.Module, constant: Container[int] = ()) -> object:
    """Equal for equal weights. `constant`: identities of parameters whose values nobody can change. None where weights
    cannot be compared: they are not here, or other ranks have a part of them, which may have changed where this one's
    has not."""
    if is_sharded(model):
        return None
    found: list[Any] = []
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if id(x) in constant:
                found.append((name, id(x)))
                continue
            if x.is_meta or x.untyped_storage().size() < x.nbytes or type(x) not in (Tensor, nn.Parameter):
                return None
            found.append((name, id(x), x.data_ptr(), x._version, tuple(x.shape), x.dtype, _sums(x)))
    for name, module in model.named_modules():
        settings = {key: repr(value) for key, value in vars(module).items() if _plain(value)}
        found.append((name, type(module), {**settings, "training": None}))
    config = getattr(model, "config", None)
    return (*found, repr(config.to_dict()) if config is not None else None)


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _sums(x: Tensor) -> bytes:
    if x.storage_offset() * x.itemsize % 4:
        x = x.clone()
    words = x.detach().contiguous().view(-1).view(torch.uint8)
    even = words.numel() // (4 * _LANES) * 4 * _LANES
    digest = hashlib.blake2b(words[even:].cpu().numpy().tobytes(), digest_size=16)
    if even:
        table = words[:even].view(torch.int32).view(-1, _LANES)
        lanes = torch.zeros(_LANES, dtype=torch.int64, device=x.device)
        for part in table.split(_ROWS):
            lanes += part.sum(0, dtype=torch.int64)
            digest.update(part.sum(1, dtype=torch.int64).cpu().numpy().tobytes())
        digest.update(lanes.cpu().numpy().tobytes())
    return digest.digest()
