"""Rotary embeddings with length-dependent frequencies, computed from whole rows.

With ``dynamic`` and ``longrope`` scaling Transformers reads the longest position off those that it is given, which
after the cut differ from rank to rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.shard.context.mask import running_positions
from hyper_parallel.shard.hooks import Forward, wrap

_BY_LENGTH = ("dynamic", "longrope")


def apply_whole_rotary(decoder: nn.Module) -> None:
    """Let such embeddings see the whole rows' positions, and cut what they give."""
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in _BY_LENGTH for kind in kinds):
            wrap(module, _whole)


def _whole(forward: Forward, x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
    here = running_positions()
    assert here is not None, "rotary embeddings are made in the decoder's own forward pass"
    cos, sin = forward(x, here.position_ids, *args, **kwargs)
    return here.split.cut(cos, -2), here.split.cut(sin, -2)
