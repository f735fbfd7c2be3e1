"""What a verification found: the differences, the tolerances with their reasons, and the verdict."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hyper_parallel.verify.step import StepOutcome

# The one place for tolerances. An error is the largest difference of a tensor over its largest element (for a
# gradient: at least 1e-4 of the gradient's norm, so that one that is all rounding is not measured by itself).
# Splitting a sum over ranks adds its terms in another order; each addition rounds by half a unit in the last place,
# 6e-8 in float32 and 4e-3 in bfloat16. A wrong factor or a term that is missing shows as 0.1 and more.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-2}
# The update sees the same gradients on both sides and is element by element, apart from the clipping factor.
UPDATE_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}


@dataclass(frozen=True)
class Difference:
    """How far one parameter is off."""

    name: str
    layout: str
    gradient: float
    value: float


@dataclass(frozen=True)
class Report:
    """One device against a strategy, after one step."""

    strategy: str
    driver: str
    dtype: str
    loss: tuple[float, float]
    """One device, strategy."""
    grad_norm: tuple[float, float]
    parameters: list[Difference]
    """Every parameter, the worst first."""

    @property
    def failures(self) -> list[str]:
        """What is off by more than its tolerance, in words; empty when the strategy is right."""
        tolerance, found = TOLERANCE[self.dtype], []
        for what, (one, many) in (("loss", self.loss), ("gradient norm", self.grad_norm)):
            if not abs(one - many) <= tolerance * abs(one):
                found.append(f"{what}: {many:.8g} instead of {one:.8g}")
        for p in self.parameters:
            if not p.gradient <= tolerance:
                found.append(f"gradient of {p.name}: off by {_off(p.gradient)}")
            if not p.value <= UPDATE_TOLERANCE[self.dtype]:
                found.append(f"updated value of {p.name}: off by {_off(p.value)}")
        return found

    @property
    def ok(self) -> bool:
        """Whether the strategy computes what one device computes."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """JSON-able, with every parameter."""
        return {**asdict(self), "ok": self.ok, "failures": self.failures, "tolerance": TOLERANCE[self.dtype]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """The inverse of `to_json`."""
        return cls(
            data["strategy"],
            data["driver"],
            data["dtype"],
            tuple(data["loss"]),
            tuple(data["grad_norm"]),
            [Difference(**p) for p in data["parameters"]],
        )

    def table(self, worst: int = 8) -> str:
        """The verdict and the `worst` parameters, for people."""
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for column, justify in (
            ("", "left"),
            ("one device", "right"),
            ("strategy", "right"),
            ("error", "right"),
        ):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for what, (one, many) in (("loss", self.loss), ("gradient norm", self.grad_norm)):
            table.add_row(what, f"{one:.8g}", f"{many:.8g}", f"{abs(one - many) / max(abs(one), 1e-30):.1e}")
        details = Table()
        for column in ("parameter", "layout", "gradient error", "update error"):
            details.add_column(column, overflow="fold")
        for p in self.parameters[:worst]:
            details.add_row(p.name, p.layout.replace("[", r"\["), f"{p.gradient:.1e}", f"{p.value:.1e}")
        out = io.StringIO()
        console = Console(file=out, width=110)
        console.print(f"one device against {self.strategy}, {self.driver}", markup=False)
        console.print(table)
        console.print(
            f"the worst of {len(self.parameters)} parameters, errors relative to the largest element"
        )
        console.print(details)
        if self.ok:
            limits = f"{TOLERANCE[self.dtype]:.0e} of each gradient, {UPDATE_TOLERANCE[self.dtype]:.0e} of each update"
            console.print(f"right: {len(self.parameters)} parameters within {limits}")
        else:
            console.print(f"WRONG in {len(self.failures)} places:")
            for failure in self.failures[:worst]:
                console.print(f"  {failure}", markup=False)
        return out.getvalue()


def compare(one: StepOutcome, many: StepOutcome, strategy: str, driver: str, dtype: str) -> Report:
    """Lay two outcomes of the same step side by side."""
    differences = []
    for name, value in one.values.items():
        ours = many.values.get(name)
        differences.append(
            Difference(
                name,
                many.layouts.get(name, "missing"),
                _gradient_error(one.gradients.get(name), many.gradients.get(name), one.grad_norm),
                math.inf if ours is None else _error(value, ours, float(value.abs().max())),
            )
        )
    differences.sort(key=lambda d: _badness(d.gradient) + _badness(d.value), reverse=True)
    return Report(
        strategy, driver, dtype, (one.loss, many.loss), (one.grad_norm, many.grad_norm), differences
    )


def _gradient_error(one: torch.Tensor | None, many: torch.Tensor | None, norm: float) -> float:
    if one is None or many is None:
        # A parameter that nothing reaches has no gradient, on one device and on many.
        return 0.0 if one is None and many is None else math.inf
    return _error(one, many, max(float(one.abs().max()), 1e-4 * norm))


def _error(one: torch.Tensor, many: torch.Tensor, scale: float) -> float:
    if one.shape != many.shape:
        return math.inf
    off = float((one.float() - many.float()).abs().max())
    return off / scale if scale > 0 else off


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _off(error: float) -> str:
    return (
        "everything: ranks that should agree do not"
        if math.isnan(error)
        else f"{error:.1e} of its largest element"
    )
