"""The attention that is registered with Transformers: heads swapped for positions (Ulysses), then rings.

DeepSpeed-Ulysses (arXiv 2309.14509): u ranks that hold S / u positions of all H heads exchange them for all positions
of H / u heads. With fewer key-value heads than u each is sent to the several ranks whose query heads attend with it,
and their gradients are summed. The hybrid runs Ulysses inside and rings outside (USP, arXiv 2405.07719).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.context.mask import ContextMask
from hyper_parallel.shard.context.ring_attention import Ring
from hyper_parallel.shard.mesh_axis import Axis

NAME = "hyper_parallel_context"
"""The name under which attention and its mask are registered with Transformers."""

_AXES = "_hyper_parallel_context_axes"

PASSED_ON = frozenset({"cache_position", "shift_labels", "num_items_in_batch"})
"""Tensors that a call may hand to every layer and that say nothing about attention."""

_KNOWN = PASSED_ON | {"position_ids"}


def give_axes(module: torch.nn.Module, ring: Axis, ulysses: Axis) -> None:
    """Tell an attention module the axes that its positions and heads are split over."""
    module.__dict__[_AXES] = (ring, ulysses)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key [B, K, S, D], value [B, K, S, Dv], of this rank's positions; returns [B, S, H, Dv].

    `s_aux` [H] are sinks. Raises StrategyError for what context parallelism does not compute.
    """
    what = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise StrategyError(
            f"{what} attends with a mask that was not made by Transformers' mask functions ({_kind(attention_mask)}); "
            "axes.context cannot tell what it hides; set axes.context to 1 for this model"
        )
    if dropout > 0:
        raise StrategyError(f"{what} drops attention weights, which axes.context does not; set its rate to 0")
    if is_causal is False or others.get("position_bias") is not None:
        asked = "attention in both directions" if is_causal is False else "a bias by position"
        raise StrategyError(
            f"{what} asks for {asked}, which axes.context does not compute; set axes.context to 1"
        )
    unknown = sorted(k for k, x in others.items() if isinstance(x, Tensor) and k not in _KNOWN)
    if unknown:
        raise StrategyError(
            f"{what} hands {', '.join(unknown)} to its attention, which axes.context does not know; "
            "set axes.context to 1 for this model"
        )
    ring, ulysses = module.__dict__[_AXES]
    attention_mask.positions.attentions += 1
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    keys, heads = key.size(-1), query.size(1)
    kv = torch.cat([key, value], -1)
    if ulysses.size > 1:
        query, kv, s_aux = _to_heads(what, ulysses, query, kv, s_aux)
    out = Ring(ring, attention_mask, keys, scale, softcap).attention(query, kv, s_aux)
    if ulysses.size > 1:
        out = ulysses.swap(out, 2, 1)
    assert out.size(1) == heads
    return out.transpose(1, 2).contiguous(), None


def _to_heads(
    what: str, ulysses: Axis, query: Tensor, kv: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    heads, pairs = query.size(1), kv.size(1)
    if heads % ulysses.size:
        raise StrategyError(
            f"{what} has {heads} query heads here, which Ulysses over {ulysses.size} ranks does not divide; "
            "set context.method: ring"
        )
    copies = ulysses.size // math.gcd(pairs, ulysses.size)
    kv = kv.repeat_interleave(copies, 1) if copies > 1 else kv
    if sinks is not None:
        sinks = sinks.index_select(0, ulysses.indices(heads, sinks.device))
    return ulysses.swap(query, 1, 2), ulysses.swap(kv, 1, 2), sinks


def _kind(mask: Any) -> str:
    return f"a tensor {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
