"""Dropout whose mask is a function of (seed, step, module, global element), so that no strategy changes it.

The mask of an element is drawn by hashing its global indices — row of the step's batch, position, feature — with
a key made from the seed, the step and the module's name. The hash is the 32-bit integer mixer of C. Wellons
("Prospecting for hash functions", 2018, ``lowbias32``), folded over the dims; int64 arithmetic keeps it exact on
every device. Recomputing a layer, splitting the batch or the model, or accumulating over micro-batches draws the
same mask again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.shard.axis import Axis
from hyper_parallel.shard.context.split import PositionSplit
from hyper_parallel.shard.rules import is_transformers
from hyper_parallel.shard.wrap import Forward, wrap

POSITIONS = 1
"""The dim of activations on which positions lie."""
_MASK = 0xFFFFFFFF
_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ATTENTION_RATES = frozenset({"dropout", "attention_dropout", "attn_dropout"})
ATTENTION = "hyper_parallel_sdpa"
"""The name under which attention with a reproducible dropout is registered with Transformers."""


@dataclass(frozen=True)
class Draw:
    """What is being computed: random numbers are a function of it and of the global element."""

    seed: int
    step: int | torch.Tensor
    """A zero-dim int64 tensor while a step is captured, so that the graph serves every step."""
    rows: torch.Tensor
    """int64[B]: the index in the step's global batch of each row at hand."""


_draw: ContextVar[Draw | None] = ContextVar("draw", default=None)


@contextlib.contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Random numbers in the block are those of `draw`."""
    token = _draw.set(draw)
    try:
        yield
    finally:
        _draw.reset(token)


def draw_at_hand() -> Draw | None:
    """What is being computed; None outside of `drawing`."""
    return _draw.get()


def current_draw(name: str) -> Draw:
    """The draw at hand; refuses dropout outside of one, where it could not be reproduced."""
    draw = _draw.get()
    if draw is None:
        raise HyperParallelError(
            f"{name!r} drops activations, and nothing says for which step and rows; compute the loss inside "
            "`with sharded(model).micro_batch(seed=…, step=…, rows=…):`, or call model.eval()"
        )
    return draw


def _dropout(x: torch.Tensor, p: float, name: str, indices: dict[int, torch.Tensor]) -> torch.Tensor:
    """`x` [B, ...] with a share p of its elements zeroed and the others scaled by 1 / (1 − p).

    `indices` gives, for dims that are split, the int64 global indices of what is held; other dims are whole.
    """
    draw = current_draw(name)
    if draw.rows.numel() != x.size(0):
        raise StrategyError(
            f"{name!r} drops activations of {x.size(0)} rows, but the batch has {draw.rows.numel()}: what is no row of "
            "the batch, an image's patches for one, cannot be dropped alike under every strategy; set its rate to 0"
        )
    digest = hashlib.blake2b(f"{draw.seed}/{name}".encode(), digest_size=4).digest()
    hashed = torch.full((), int.from_bytes(digest, "little"), dtype=torch.int64, device=x.device)
    hashed = _mix(hashed + draw.step)
    for dim in range(x.dim()):
        index = draw.rows.to(x.device) if dim == 0 else indices.get(dim % x.dim())
        if index is None:
            index = torch.arange(x.size(dim), device=x.device)
        hashed = _mix(hashed.unsqueeze(-1) + index * 0x9E3779B9)
    kept = hashed >= int(p * 2**32)
    return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


@dataclass
class Stretch:
    """Whether the activations at hand inside one parent module are split over features, between its colwise
    and its rowwise projections."""

    split: bool = False
    features: int = 0
    """How many features there are on all ranks."""
    inside: bool = False
    """Inside an attention or MLP, where positions are whole even if they are split between layers."""
    dims: Mapping[int, Axis] | None = None
    """While split: dim to the axis that splits it; None is the last dim, by the tensor axis."""


def apply_dropout(
    model: nn.Module,
    tensor: Axis,
    stretches: Mapping[str, Stretch],
    between: Callable[[str], Mapping[int, Axis]],
    positions: Callable[[str], PositionSplit | None] = lambda _: None,
) -> None:
    """Make every nn.Dropout of the model, and the dropout inside its attention, reproducible.

    `between`: module name to the dims, and the axes that split them, of activations outside of stretches.
    `positions`: module name to how the context axis splits its positions.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            parents = [parent for parent in stretches if name.startswith(f"{parent}." if parent else "")]
            stretch = stretches[max(parents, key=len)] if parents else Stretch()
            wrap(module, _dropout_wrapper(name, module, tensor, stretch, between(name), positions(name)))
    if is_transformers(model):
        _apply_attention_dropout(model, tensor)


def refuse_other_draws(model: nn.Module) -> None:
    """Refuse what draws random numbers in other ways.

    Modules that call ``torch.nn.functional.dropout`` keep its rate as a number: there is nothing to wrap.
    """
    for name, module in model.named_modules():
        if isinstance(module, _OTHER_DROPOUTS) and module.p > 0:
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; only nn.Dropout is the same under every strategy"
            )
        # What an attention hands to its kernel goes through `_attention`.
        handled = _ATTENTION_RATES if hasattr(module, "head_dim") else frozenset()
        for attribute, rate in vars(module).items():
            random = "drop" in attribute or "jitter" in attribute
            if random and attribute not in handled and isinstance(rate, float) and rate > 0:
                raise StrategyError(
                    f"{name + '.' if name else ''}{attribute} is {rate}: this model draws random numbers in a way that "
                    "cannot be made the same under every strategy; set it to 0 in model.config"
                )


def _dropout_wrapper(
    name: str,
    module: nn.Dropout,
    tensor: Axis,
    stretch: Stretch,
    between: Mapping[int, Axis],
    positions: PositionSplit | None,
) -> Callable[..., torch.Tensor]:
    inside = stretch.dims if stretch.dims is not None else {-1: tensor}

    def wrapper(forward: Forward, x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return x
        indices = {}
        split = inside if stretch.split else {} if stretch.inside else between
        for dim, axis in split.items():
            if axis.size > 1:
                length = stretch.features if stretch.split and dim == -1 else x.size(dim) * axis.size
                index = axis.indices(length, x.device)
                if index.numel() != x.size(dim):
                    raise StrategyError(
                        f"{name!r} drops activations of which the tensor axes cannot tell the features"
                    )
                indices[dim % x.dim()] = index
        if positions is not None:
            rest = split[POSITIONS].size if POSITIONS in split else 1
            mine = positions.indices(x.size(POSITIONS) * rest * positions.context.size, x.device)
            indices[POSITIONS] = mine[indices[POSITIONS]] if POSITIONS in indices else mine
        return _dropout(x, module.p, name, indices)

    return wrapper


def _apply_attention_dropout(model: Any, tensor: Axis) -> None:
    """Attention with dropout > 0 is computed step by step; without it, by the kernel that was asked for."""
    if not any(getattr(model.config, key, None) for key in ("attention_dropout", "attn_pdrop")):
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = ATTENTION
    for name, module in model.named_modules():
        if hasattr(module, "head_dim"):
            module.__dict__["_hyper_parallel_name"] = name
            module.__dict__["_hyper_parallel_tensor"] = tensor


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, S, D], key and value [B, K, S, D]; returns [B, S, H, D]. Boolean masks are True where seen."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if dropout == 0.0:
        kernel: Any = sdpa_attention_forward
        output, _ = kernel(module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs)
        return output, None
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unsupported:
        raise StrategyError(
            f"attention dropout beside {', '.join(unsupported)} is not supported; set attention_dropout to 0"
        )
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scaling if scaling is not None else query.size(-1) ** -0.5)
    if attention_mask is None:
        if getattr(module, "is_causal", True):
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    tensor: Axis = module._hyper_parallel_tensor
    heads = {1: tensor.indices(weights.size(1) * tensor.size, weights.device)} if tensor.size > 1 else {}
    weights = _dropout(weights, dropout, module._hyper_parallel_name, heads)
    return (weights @ value).transpose(1, 2).contiguous(), None
