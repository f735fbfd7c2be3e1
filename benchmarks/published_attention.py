"""Attention with sinks and sliding windows as one kernel, for models that Transformers writes out operator by operator.

A window is a mask in Transformers' call of fused attention, under which all scores are computed; the published
frameworks' kernels skip what it hides. GPT-OSS adds to each head's softmax a learnt logit without a value, a sink, and
every other layer sees 128 positions back. Transformers has both without a fused kernel only; Transformer Engine and
FlashAttention 3, which the published frameworks call, compute them in the kernel. Here attention is captured as that
kernel with its window. The sink enters the normalization within the kernel and is no operator of its own: times are
right, numbers are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "published_attention"


def fuse(model: nn.Module) -> None:
    """Have a model's attention captured as one kernel, where the family has none in Transformers, or has a window."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = getattr(model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if not eager and getattr(config, "sliding_window", None) is None:
        return
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    config._attn_implementation = NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """The kernel knows its causal mask and its window."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[B, S, H, D] of queries [B, H, S, D], keys and values [B, K, S, D]."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        q.size(1),
        k.size(1),
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=None if sliding_window is None else sliding_window - 1,
        window_size_right=None if sliding_window is None else 0,
    )[0]
    return out, None
