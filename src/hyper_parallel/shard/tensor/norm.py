"""RMSNorm and LayerNorm over features that are split: the module's own formula with its sums taken over ranks.

    RMSNorm (arXiv 1910.07467, eq. 4)     x / sqrt(Σ x² / h + ε) · w              `_root_mean_square`
    LayerNorm (arXiv 1607.06450, eq. 4)   (x − μ) / sqrt(Σ (x − μ)² / h + ε) · w + b      `_mean_and_variance`

Families differ in the dtype of the statistics, in where they cast back, and in whether the weight is w or 1 + w. Which
of these a module does is found by trying: its forward on random input, at full width and in three dtypes, against
each formula here. A module that none reproduces is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import one_device
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.mesh_axis import Axis

Sum = Callable[[torch.Tensor], torch.Tensor]
"""The sum over ranks of what each has summed over its own features."""

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
"""Epsilons to try where the module does not say its own."""
_ROWS = 8
# A formula that is the module's own differs from it in the order of a sum. One unit in the last place of bfloat16 is
# 4e-3, and a cast in another place changes a tenth of the elements by that much.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Formula:
    """How a norm is computed."""

    kind: Literal["rms", "layer"]
    epsilon: float
    statistics: Literal["float32", "own", "at least float32"]
    """The dtype that the input is cast to first."""
    cast: Literal["before", "after"]
    """Whether the cast back to the input's dtype comes before the weight or after it."""
    offset: float = 0.0
    """1 where the weight is 1 + w."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, total: Sum
    ) -> torch.Tensor:
        """The norm of `x` [.., features here], whose features are `width` on all ranks."""
        own = x.dtype
        wide = self._wide(x)
        if self.kind == "rms":
            normed = _root_mean_square(wide, self.epsilon, width, total)
        else:
            normed = _mean_and_variance(wide, self.epsilon, width, total)
        if self.cast == "before":
            normed = normed.to(own)
        if weight is not None:
            if self.cast == "after":
                weight = weight.to(normed.dtype)
            normed = normed * (weight + self.offset if self.offset else weight)
        if bias is not None:
            normed = normed + (bias.to(normed.dtype) if self.cast == "after" else bias)
        return normed.to(own) if self.cast == "after" else normed

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        if self.statistics == "own" or (self.statistics != "float32" and x.dtype == torch.float64):
            return x
        return x.float()


def _root_mean_square(x: torch.Tensor, epsilon: float, width: int, total: Sum) -> torch.Tensor:
    return x * torch.rsqrt(total(x.pow(2).sum(-1, keepdim=True)) / width + epsilon)


def _mean_and_variance(x: torch.Tensor, epsilon: float, width: int, total: Sum) -> torch.Tensor:
    # Two sums, because the variance as a difference of two large numbers is not one.
    centred = x - total(x.sum(-1, keepdim=True)) / width
    return centred * torch.rsqrt(total(centred.pow(2).sum(-1, keepdim=True)) / width + epsilon)


def distributed_norm(formula: Formula, module: nn.Module, width: int, x: Axis) -> Callable[..., torch.Tensor]:
    """A wrapper of a norm's forward whose features are split over `x`: the formula instead of the module's own."""

    def total(part: torch.Tensor) -> torch.Tensor:
        # Every rank's output depends on the sum, so that its gradient is a sum over the ranks too.
        return x.copy(x.reduce(part))

    def wrapper(forward: Callable[..., Any], hidden_states: torch.Tensor) -> torch.Tensor:
        parameters = module._parameters
        return formula(hidden_states, parameters.get("weight"), parameters.get("bias"), width, total)

    return wrapper


def width_of(module: nn.Module) -> int | None:
    """The features that a norm sees, by its weight; None when it has none, or weights that are not one per feature."""
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    known = all(own in ("weight", "bias") for own, p in module._parameters.items() if p is not None)
    if len(shapes) != 1 or not known or any(True for _ in module.children()):
        return None
    (shape,) = shapes
    return int(shape[0]) if len(shape) == 1 else None


def formula_of(name: str, module: nn.Module, width: int) -> Formula:
    """The formula that reproduces a norm's own forward. Raises StrategyError when none does."""
    with one_device():
        trials = [_trial(module, width, dtype) for dtype in _TOLERANCE]
        fits: list[tuple[float, Formula]] = []
        for formula in _candidates(module):
            off = [_error(formula, width, *trial) for trial in trials]
            if all(worst <= _TOLERANCE[t[0].dtype] for (worst, _), t in zip(off, trials, strict=True)):
                # Of those that fit, the one that differs least: by rounding in double precision, and in how many
                # elements in bfloat16.
                fits.append((off[0][0] + off[2][1], formula))
    if not fits:
        raise StrategyError(
            f"axes.tensor_y splits the features that {name!r} ({type(module).__name__}) normalises, and no known "
            "formula of RMSNorm or LayerNorm reproduces it; use tensor_y: 1"
        )
    return min(fits, key=lambda fit: fit[0])[1]


def _candidates(module: nn.Module) -> list[Formula]:
    given = [value for value in (getattr(module, own, None) for own in _EPSILONS) if isinstance(value, float)]
    base = Formula("rms", 0.0, "own", "after")
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    wide: tuple[Literal["own", "float32", "at least float32"], ...] = ("own", "at least float32", "float32")
    casts: tuple[Literal["before", "after"], ...] = ("after", "before")
    return [
        replace(base, kind=kind, epsilon=epsilon, statistics=statistics, cast=cast, offset=offset)
        for epsilon, kind, statistics, cast, offset in itertools.product(
            given[:1] or _USUAL, kinds, wide, casts, (0.0, 1.0)
        )
    ]


def _trial(module: nn.Module, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(input, weight, bias, what the module makes of it) in one dtype; some rows so small that epsilon matters."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    clone = copy.deepcopy(module).to(torch.float32)
    for own, parameter in clone._parameters.items():
        if parameter is not None:
            clone._parameters[own] = nn.Parameter(draw(width).to(dtype), requires_grad=False)
    scale = torch.logspace(-3, 1, _ROWS, dtype=torch.float64).unsqueeze(-1)
    x = ((draw(_ROWS, width) + 0.5) * scale).to(dtype).unsqueeze(0)
    with torch.no_grad():
        output = clone(x)
    return x, _values(clone, "weight"), _values(clone, "bias"), output


def _values(module: nn.Module, own: str) -> Any:
    parameter = module._parameters.get(own)
    return None if parameter is None else parameter.detach()


def _error(
    formula: Formula, width: int, x: torch.Tensor, weight: Any, bias: Any, output: torch.Tensor
) -> tuple[float, float]:
    """The largest difference of a row over its largest element, and the share of elements that differ."""
    ours = formula(x, weight, bias, width, lambda part: part)
    if ours.shape != output.shape or ours.dtype != output.dtype:
        return float("inf"), 1.0
    off = (ours.double() - output.double()).abs()
    worst = (off.amax(-1) / output.double().abs().amax(-1)).amax()
    return float(worst) if bool(worst.isfinite()) else float("inf"), float((off > 0).double().mean())
