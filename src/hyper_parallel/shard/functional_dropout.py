"""Dropout that a module's own code calls as a function.

A model keeps the rates of such dropouts where it likes: in an attribute, in its config, in the ``nn.Dropout`` whose
rate it hands to attention, in a number in its code. So it is not looked for in the model; while a forward pass runs,
what torch is asked to drop is dropped by a mask that is the same under every strategy (`dropout`). What draws random
numbers in other ways is found by `check.randomness`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.dropout import Site
from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.rules import is_transformers

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
    for config in _configs(model):
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
    rates += [value for config in _configs(model) for key, value in vars(config).items() if "drop" in key]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configs that modules hold, and those inside of them: of the text, of a tower, of the two stacks."""
    seen: set[int] = set()
    pending = [c for module in model.modules() if (c := getattr(module, "config", None)) is not None]
    while pending:
        config = pending.pop()
        if id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            pending += [value for key, value in vars(config).items() if key.endswith("config")]
            yield config


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


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    if not training or p == 0:
        return None
    site, call = _site()
    dropped = site.drop(input, p, call)
    return input.copy_(dropped) if inplace else dropped


def _torch_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor | None:
    return _dropout(input, p, train)


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
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    functional.scaled_dot_product_attention: _attention,
}
"""What each returns in place of torch's own; None where nothing is dropped."""
