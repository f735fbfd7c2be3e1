"""Verification report: differences, tolerances with reasons, and the verdict."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import sheet_text
from hyper_parallel.verify.step import StepOutcome

# The one place for tolerances. An error is the largest difference of a tensor over its largest element (for a
# gradient: at least 1e-4 of the gradient's norm, so that a gradient that is only rounding is not its own scale).
# Splitting a sum over ranks adds its terms in another order; each addition rounds by half a unit in the last place,
# 6e-8 in float32, 4e-3 in bfloat16, 1e-16 in float64. A wrong factor or a term that is missing shows as 0.1 and more.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-2, "float64": 1e-9}
# An update says little about the gradient that it was made from: AdamW's first, g / (|g| + ε), multiplies the rounding
# of a gradient by ε / (|g| + ε)², by 1 / ε = 1e8 where it is next to nothing. So both sides make theirs from the same
# gradients (`verify.step.run_step`). What is left is the clipping factor, whose relative error δ moves it by
# δ |g| ε / (|g| + ε)² ≤ δ / 4, whatever the gradient, and the update's own rounding, element by element.
UPDATE_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float64": 1e-9}
# Models multiply rounding too, some by more than the tolerance allows for. Where a difference is larger, both sides are
# computed again in float64, where rounding is next to nothing and a mistake is as large as before. If they agree
# there, the strategy may be off by what one device itself is off its float64: by that on both sides, and twice that,
# since the largest of thousands of roundings varies from one order of the sums to another.
ROUNDINGS = 4


@dataclass(frozen=True)
class Difference:
    """The errors of one parameter."""

    name: str
    layout: str
    gradient: float
    value: float


@dataclass(frozen=True)
class Rounding:
    """Errors on the scales of a `Report`: one device's error against its own float64 step, or the allowed error."""

    gradient: float
    """The worst of the loss, the gradient norm and every gradient."""
    value: float


@dataclass(frozen=True)
class Report:
    """One device against a strategy, after one step."""

    strategy: str
    driver: str
    dtype: str
    loss: tuple[float, float]
    """The loss on one device, and under the strategy."""
    grad_norm: tuple[float, float]
    parameters: list[Difference]
    """Every parameter, the worst first."""

    float64: Report | None = None
    """The same comparison in float64; made only if there are differences beyond the tolerances."""
    rounding: Rounding | None = None
    """One device's rounding error; made together with `float64`."""
    undecided: str = ""
    """Why the float64 comparison could not be made."""
    owner: str = ""
    """One device against the model's own code, in words."""

    @property
    def failures(self) -> list[str]:
        """The differences beyond their limits, in words; empty if the strategy is right."""
        return self._off_by_more_than(self._limits)

    @property
    def off(self) -> list[str]:
        """The differences beyond the tolerance of their dtype, including rounding."""
        return self._off_by_more_than(self._tolerances)

    @property
    def _tolerances(self) -> Rounding:
        tolerance = TOLERANCE[self.dtype]
        return Rounding(tolerance, UPDATE_TOLERANCE[self.dtype])

    @property
    def _limits(self) -> Rounding:
        least = self._tolerances
        if self.float64 is None or self.rounding is None or not self.float64.ok:
            return least
        own = self.rounding
        return Rounding(
            max(least.gradient, ROUNDINGS * own.gradient),
            max(least.value, ROUNDINGS * own.value),
        )

    def _off_by_more_than(self, limits: Rounding) -> list[str]:
        found = []
        for what, (one, many) in (("loss", self.loss), ("gradient norm", self.grad_norm)):
            if not _relative(one, many) <= limits.gradient:
                found.append(f"{what}: {many:.8g} instead of {one:.8g}")
        for p in self.parameters:
            if not p.gradient <= limits.gradient:
                found.append(f"gradient of {p.name}: off by {_off(p.gradient)}")
            if not p.value <= limits.value:
                found.append(f"updated value of {p.name}: off by {_off(p.value)}")
        return found

    @property
    def ok(self) -> bool:
        """Whether the strategy computes what one device computes."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """JSON-able, with every parameter."""
        record = {
            **asdict(self),
            "ok": self.ok,
            "failures": self.failures,
            "tolerance": TOLERANCE[self.dtype],
        }
        return record if self.float64 is None else {**record, "float64": self.float64.to_json()}

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
            None if data["float64"] is None else cls.from_json(data["float64"]),
            None if data["rounding"] is None else Rounding(**data["rounding"]),
            data["undecided"],
            data.get("owner", ""),
        )

    def table(self, worst: int = 8, width: int = 110) -> str:
        """The verdict and the `worst` parameters as text, at most `width` columns wide."""
        from rich.console import Console

        numbers = tuple(
            (what, f"{one:.8g}", f"{many:.8g}", f"{_relative(one, many):.1e}")
            for what, (one, many) in (("loss", self.loss), ("gradient norm", self.grad_norm))
        )
        columns = ("parameter", "layout", "gradient error", "update error")
        rows = tuple(
            (p.name, p.layout, f"{p.gradient:.1e}", f"{p.value:.1e}") for p in self.parameters[:worst]
        )
        lines = [
            f"one device against {self.strategy}, {self.driver}",
            sheet_text(Sheet("", ("", "one device", "strategy", "error"), numbers), width),
            f"the worst of {len(self.parameters)} parameters, errors relative to the largest element",
            sheet_text(Sheet("", columns, rows, left=2), width),
        ]
        if self.owner:
            lines.append(f"one device against the model's own code: {self.owner}")
        limits = (
            f"{TOLERANCE[self.dtype]:.0e} of each gradient, {UPDATE_TOLERANCE[self.dtype]:.0e} of each update"
        )
        if self.ok and self.float64 is None:
            lines.append(f"right: {len(self.parameters)} parameters within {limits}")
        elif self.ok:
            lines += [
                f"right: {self._exactly()}",
                f"{len(self.off)} differences are more than {limits}, and no more than {ROUNDINGS} times what one "
                "device is off its own step in float64: they are rounding",
            ]
        else:
            lines.append(f"WRONG in {len(self.failures)} places:")
            lines += [f"  {failure}" for failure in self.failures[:worst]]
            if self.float64 is not None and self.float64.ok:
                lines.append(f"but {self._exactly()}: the mistake is one of precision")
            if self.undecided:
                lines.append(f"not compared in float64: {self.undecided}")
        out = io.StringIO()
        Console(file=out, width=width).print("\n".join(lines), markup=False)
        return out.getvalue()

    def _exactly(self) -> str:
        return f"in float64, {len(self.parameters)} parameters agree within {TOLERANCE['float64']:.0e}"


def decided_in_float64(report: Report, one: StepOutcome, exact: tuple[StepOutcome, StepOutcome]) -> Report:
    """`report`, with its differences judged by the same steps in float64: one device's, the strategy's.

    All of them have updated from the gradients of `one`.
    """
    own = compare(exact[0], one, "", "", "float64")
    gradients = (_relative(*own.loss), _relative(*own.grad_norm), *(p.gradient for p in own.parameters))
    rounding = Rounding(max(gradients), max(p.value for p in own.parameters))
    return replace(
        report, float64=compare(*exact, report.strategy, report.driver, "float64"), rounding=rounding
    )


def compare(one: StepOutcome, many: StepOutcome, strategy: str, driver: str, dtype: str) -> Report:
    """Compare two outcomes of the same step."""
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
    return Report(
        strategy,
        driver,
        dtype,
        (one.loss, many.loss),
        (one.grad_norm, many.grad_norm),
        _worst_first(differences),
    )


def joined(reports: Sequence[Report], one: StepOutcome) -> Report:
    """Merge the reports of ranks that each hold some of the parameters of `one`, with the worst of each number.

    A parameter that no rank holds is reported as missing."""
    by_name = {name: Difference(name, "missing", math.inf, math.inf) for name in one.values}
    seen: set[str] = set()
    for found in (found for report in reports for found in report.parameters):
        known = by_name[found.name] if found.name in seen else found
        by_name[found.name] = replace(
            found, gradient=_worse(known.gradient, found.gradient), value=_worse(known.value, found.value)
        )
        seen.add(found.name)
    return replace(
        reports[0],
        loss=max((report.loss for report in reports), key=lambda pair: _badness(_relative(*pair))),
        grad_norm=max((report.grad_norm for report in reports), key=lambda pair: _badness(_relative(*pair))),
        parameters=_worst_first(by_name.values()),
    )


def _worse(one: float, other: float) -> float:
    return max(one, other, key=_badness)


def _worst_first(differences: Iterable[Difference]) -> list[Difference]:
    return sorted(differences, key=lambda d: _badness(d.gradient) + _badness(d.value), reverse=True)


def _gradient_error(one: torch.Tensor | None, many: torch.Tensor | None, norm: float) -> float:
    if one is None or many is None:
        # A parameter that nothing reaches has no gradient, on one device and on many.
        return 0.0 if one is None and many is None else math.inf
    return _error(one, many, max(float(one.abs().max()), 1e-4 * norm))


def _error(one: torch.Tensor, many: torch.Tensor, scale: float) -> float:
    if one.shape != many.shape:
        return math.inf
    off = float((one.double() - many.double()).abs().max())
    return off / scale if scale > 0 else off


def _relative(one: float, many: float) -> float:
    return abs(one - many) / max(abs(one), 1e-30)


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _off(error: float) -> str:
    return (
        "everything: ranks that should agree do not"
        if math.isnan(error)
        else f"{error:.1e} of its largest element"
    )
