"""Reproducible dropout, of modules and of functions: the mask depends on (seed, step, module, global element) alone.

The mask of an element is drawn by hashing its global indices — row of the step's batch, position, feature — with
a key made from the seed, the step and the module's name. The hash is the 32-bit integer mixer of C. Wellons
("Prospecting for hash functions", 2018, ``lowbias32``), folded over the dims; int64 arithmetic keeps it exact on
every device. Recomputing a layer, splitting the batch or the model, or accumulating over micro-batches draws the
same mask again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.context.plan import PositionSplit
from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import configs_of, is_transformers

POSITIONS = 1
"""The dim of activations on which positions lie."""
_MASK = 0xFFFFFFFF
_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_OF_WHOLE_LAYERS = ("layerdrop", "drop_path", "drop_prob", "jitter")
"""What the names of rates hold that no mask of elements is drawn with."""


def _dropout(
    x: torch.Tensor, p: float, site: tuple[str, int], indices: dict[int, torch.Tensor]
) -> torch.Tensor:
    """`x` [B, ...] with a share p of its elements zeroed and the others scaled by 1 / (1 − p). `site`: the module's
    name and the number of the call.

    `indices` gives, for dims that are split, the int64 global indices of what is held; other dims are whole.
    """
    name, call = site
    draw = current_step().draw
    if draw is None:  # it could not be reproduced
        raise HyperParallelError(
            f"{name!r} drops activations, and nothing says for which step and rows; compute the loss inside "
            "`with sharded(model).micro_batch(seed=…, step=…, rows=…):`, or call model.eval()"
        )
    if draw.rows.numel() != x.size(0):
        raise StrategyError(
            f"{name!r} drops activations of {x.size(0)} rows, but the batch has {draw.rows.numel()}: what is no row of "
            "the batch, an image's patches for one, cannot be dropped alike under every strategy; set its rate to 0"
        )
    hashed = torch.full((), key_of(draw.seed, name, call), dtype=torch.int64, device=x.device)
    hashed = _mix(hashed + draw.step)
    for dim in range(x.dim()):
        index = draw.rows.to(x.device) if dim == 0 else indices.get(dim % x.dim())
        if index is None:
            index = torch.arange(x.size(dim), device=x.device)
        hashed = _mix(hashed.unsqueeze(-1) + index * 0x9E3779B9)
    kept = hashed >= int(p * 2**32)
    return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def key_of(seed: int, module: str, call: int = 1) -> int:
    """The number of 32 bits that tells the masks of a module's dropouts from others; `call` as of `Site.drop`."""
    name = module if call == 1 else f"{module}#{call}"
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")


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
    heads: int = 0
    """In an attention, how many heads its queries have on all ranks; 0 where they are not split, or not known."""


@dataclass(frozen=True)
class Site:
    """A module that drops activations: which of their elements this rank holds."""

    name: str
    tensor: Axis
    stretch: Stretch
    between: Mapping[int, Axis]
    """Dims of activations outside of stretches, and the axes that split them."""
    positions: PositionSplit | None
    """How the context axis splits them."""

    def drop(self, x: torch.Tensor, p: float, call: int = 1) -> torch.Tensor:
        """`x` without a share p of its elements; `call` tells the dropouts of one forward pass of a module apart."""
        if x.dim() == 4 and self._splits_heads and x.size(1) * self.tensor.size == self.stretch.heads:
            return self.drop_weights(x, p, call)
        return _dropout(x, p, (self.name, call), self._indices(x))

    def drop_weights(self, weights: torch.Tensor, p: float, call: int = 1) -> torch.Tensor:
        """Attention weights [batch, heads, queries, keys], likewise."""
        if self.positions is not None:
            raise StrategyError(
                f"{self.name!r} drops attention weights, and attention that is spread over ranks drops none; "
                "set its rate to 0, or axes.context to 1"
            )
        heads = {}
        if self._splits_heads:
            heads = {1: self.tensor.indices(weights.size(1) * self.tensor.size, weights.device)}
        return _dropout(weights, p, (self.name, call), heads)

    @property
    def _splits_heads(self) -> bool:
        return self.tensor.size > 1 and (self.stretch.heads > 0 or self.stretch.split)

    def _indices(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        stretch, indices = self.stretch, {}
        inside = stretch.dims if stretch.dims is not None else {-1: self.tensor}
        split = inside if stretch.split else {} if stretch.inside else self.between
        for dim, axis in split.items():
            if axis.size > 1:
                length = stretch.features if stretch.split and dim == -1 else x.size(dim) * axis.size
                index = axis.indices(length, x.device)
                if index.numel() != x.size(dim):
                    raise StrategyError(
                        f"{self.name!r} drops activations whose features the tensor axes cannot locate; "
                        "set its rate to 0"
                    )
                indices[dim % x.dim()] = index
        if self.positions is not None:
            rest = split[POSITIONS].size if POSITIONS in split else 1
            length = x.size(POSITIONS) * rest * self.positions.context.size
            mine = self.positions.indices(length, x.device)
            indices[POSITIONS] = mine[indices[POSITIONS]] if POSITIONS in indices else mine
        return indices


def sites_of(
    tensor: Axis,
    stretches: Mapping[str, Stretch],
    between: Callable[[str], Mapping[int, Axis]],
    positions: Callable[[str], PositionSplit | None] = lambda _: None,
) -> Callable[[str], Site]:
    """Module name to what it is as a site: what it drops, it drops of activations inside of it.

    `between`: module name to the dims, and the axes that split them, of activations outside of stretches.
    `positions`: module name to how the context axis splits its positions.
    """

    def site(name: str) -> Site:
        around = [n for n in stretches if n == name or name.startswith(f"{n}." if n else "")]
        stretch = stretches[max(around, key=len)] if around else Stretch()
        inside = f"{name}." if name else name
        return Site(name, tensor, stretch, between(inside), positions(inside))

    return site


def apply_dropout(model: nn.Module, site: Callable[[str], Site]) -> None:
    """Make every nn.Dropout of the model reproducible."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            wrap(module, _dropped(site(name), module))


def _dropped(site: Site, module: nn.Dropout) -> Callable[..., torch.Tensor]:
    def wrapper(forward: Forward, x: torch.Tensor) -> torch.Tensor:
        return site.drop(x, module.p) if module.training else x

    return wrapper


def refuse_other_draws(model: nn.Module) -> None:
    """Refuse what is known to draw random numbers in other ways than by dropping single elements."""
    for name, module in model.named_modules():
        if isinstance(module, _OTHER_DROPOUTS) and module.p > 0:
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; only nn.Dropout is the same under every strategy"
            )
        for attribute, rate in vars(module).items():
            whole = any(part in attribute for part in _OF_WHOLE_LAYERS)
            if whole and isinstance(rate, float) and rate > 0:
                raise StrategyError(
                    f"{name + '.' if name else ''}{attribute} is {rate}: this model draws random numbers in a way that "
                    "cannot be made the same under every strategy; set it to 0 in model.config"
                )


# Dropout that a module's own code calls as a function.
#
# A model keeps the rates of such dropouts where it likes: in an attribute, in its config, in the ``nn.Dropout`` whose
# rate it hands to attention, in a number in its code. So it is not looked for in the model; while a forward pass runs,
# what torch is asked to drop is dropped by a mask that is the same under every strategy (`dropout`). What draws random
# numbers in other ways is found by `check.randomness`.

_FUSED = ("flash", "flex", "paged", "kernels-")
"""How the names of those attention functions of Transformers begin that drop inside of kernels of their own."""


@dataclass
class _Running:
    """A forward pass of a module."""

    site: Site
    calls: int = 0
    """Its dropouts so far; modules below have their own."""


_running: ContextVar[_Running | None] = ContextVar("running", default=None)


def apply_functional_dropout(model: nn.Module, site: Callable[[str], Site]) -> None:
    """Make what the model's own code drops reproducible, where it may drop anything."""
    if not _may_drop(model):
        return
    for config in configs_of(model):
        if str(getattr(config, "_attn_implementation", None)).startswith(_FUSED):
            config._attn_implementation = "sdpa"
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            wrap(module, _seeing(site(name)))


def _may_drop(model: nn.Module) -> bool:
    """Whether any rate is above 0. Nobody knows where a module that is not Transformers' keeps them."""
    if not is_transformers(model):
        return True
    kept = [vars(module) for module in model.modules()]
    rates = [value for held in kept for key, value in held.items() if "drop" in key]
    rates += [value for config in configs_of(model) for key, value in vars(config).items() if "drop" in key]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _seeing(site: Site) -> Wrapper:
    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        outer = _running.get()
        token = _running.set(_Running(site))
        try:
            # One mode serves all modules: torch asks each that is entered. A backward pass that computes a layer again
            # comes here by the layer.
            if outer is not None and _Dropping.entered():
                return forward(*args, **kwargs)
            with _Dropping():
                return forward(*args, **kwargs)
        finally:
            _running.reset(token)

    return wrapper


class _Dropping(TorchFunctionMode):
    """Drops by masks that are the same under every strategy."""

    @staticmethod
    def entered() -> bool:
        """Whether a mode of this class sees what torch is asked now."""
        return any(isinstance(mode, _Dropping) for mode in torch.overrides._get_current_function_mode_stack())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        found = handler(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


def _site() -> tuple[Site, int]:
    running = _running.get()
    assert running is not None
    running.calls += 1
    return running.site, running.calls


def _functional_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    if not training or p == 0:
        return None
    site, call = _site()
    dropped = site.drop(input, p, call)
    return input.copy_(dropped) if inplace else dropped


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """query [B, H, S, D], key and value [B, K, T, D]. Boolean masks are True where seen."""
    if dropout_p == 0:
        return None
    site, call = _site()
    if query.dim() != 4:
        raise StrategyError(
            f"{site.name!r} drops the weights of an attention of {query.dim()} dims; [batch, heads, positions, "
            "features] can be dropped alike under every strategy; set its rate to 0"
        )
    groups = query.size(1) // key.size(1)
    if enable_gqa and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scale if scale is not None else query.size(-1) ** -0.5)
    least = torch.finfo(scores.dtype).min
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, least)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, least) if attn_mask.dtype == torch.bool else scores + attn_mask
        )
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return site.drop_weights(wide.softmax(-1).to(query.dtype), dropout_p, call) @ value


_HANDLERS: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.dropout: _functional_dropout,
    torch.dropout: lambda input, p, train: _functional_dropout(input, p, train),
    functional.scaled_dot_product_attention: _attention,
}
"""What each returns in place of torch's own; None where nothing is dropped."""
