"""A fingerprint of a model's weights, by which a change between two runs is noticed.

For each parameter and buffer: its identity and address, the version that autograd counts, and sums over its bits; for
each module its settings (as adapters have); for hooks, closures, attributes and what else the model's code reads, what
a captured graph would assume of them (`PythonState`), and the values of tensors there. The version misses writes
through `.data` and by kernels of one's own, and the sums see these: of words x[row, lane],

    lanes[lane] = Σ_row x[row, lane],   rows[row] = Σ_lane x[row, lane]   mod 2⁶⁴

are hashed, so that a changed word changes both, and so does an exchange of rows or of lanes. Reading all weights once
costs about as much as the generation of one token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import CaptureError
from hyper_parallel.offloading.autograd.python_state import PythonState
from hyper_parallel.offloading.autograd.state_snapshot import Identity
from hyper_parallel.shard.sharded_model import is_sharded

_LANES = 1024
_ROWS = 128
"""That are summed at once: sums of 32-bit words are made from a copy with 64 bits."""


class Fingerprint:
    """Called, gives something that is equal only for equal models."""

    def __init__(self, model: nn.Module, constant: Callable[[], Container[int]] | None = None) -> None:
        """`constant`: for a model whose weights come and go, gives the identities of parameters whose values nobody can
        change."""
        self._model, self._constant = model, constant or tuple
        # What it knows holds weights, and saves most of the time of the next look.
        self._state = PythonState(model) if constant is None else None

    def __call__(self) -> object:
        """None where models cannot be compared: weights are not here, or other ranks have a part of them, which may
        have changed where this one's has not."""
        if is_sharded(self._model):
            return None
        weights = _weights(self._model, self._constant())
        try:
            state = (self._state or PythonState(self._model)).now()
        except CaptureError:  # too much to compare
            return None
        with torch.no_grad():
            tensors = [_sums(x) for place in state.tensors.values() if _has_values(x := place.get())]
        return None if weights is None else (*weights, _of_users(state.entries), tensors)


_HOOK = re.compile(r".*\._forward(?:_pre)?_hooks\[\d+\]")
_COUNT = re.compile(r".*\._forward(?:_pre)?_hooks")
"""How many hooks a module has; each has its own entries."""


def _of_users(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Without the hooks of this package, by which a budget's weights arrive."""
    hooks = {path: found[0] for path in entries if (found := _HOOK.match(path))}
    ours = {hooks[path] for path in hooks if _is_ours(entries[path])}
    return {
        path: entry
        for path, entry in entries.items()
        if hooks.get(path) not in ours and not _COUNT.fullmatch(path)
    }


def _is_ours(token: Any) -> bool:
    if isinstance(token, tuple):
        return any(map(_is_ours, token))
    value = token.value if isinstance(token, Identity) else None
    return str(getattr(value, "__module__", "")).startswith("hyper_parallel.")


def _weights(model: nn.Module, constant: Container[int]) -> tuple[Any, ...] | None:
    found: list[Any] = []
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if id(x) in constant:
                found.append((name, id(x)))
                continue
            if not _has_values(x):
                return None
            found.append((name, id(x), x.data_ptr(), x._version, tuple(x.shape), x.dtype, _sums(x)))
    for name, module in model.named_modules():
        settings = {key: repr(value) for key, value in vars(module).items() if _plain(value)}
        found.append((name, type(module), {**settings, "training": None}))
    config = getattr(model, "config", None)
    return (*found, repr(config.to_dict()) if config is not None else None)


def _has_values(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.untyped_storage().size() >= x.nbytes


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
