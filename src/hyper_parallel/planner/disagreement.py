"""Disagreement of the closed forms and the simulator: the operator class or collective that it comes from.

Both predictors say what a step's seconds are spent on (`cost_model.step`, `trace.step_parts`). Their parts are brought
to common classes; where the steps differ by more than `APART`, the class whose seconds differ most, in the direction in
which the steps differ, is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hyper_parallel.units import format_duration

APART = 0.15
"""Share of the estimate beyond which two predictors disagree."""

_CLOSED = {
    "products": "products",
    "head": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "sums": "elementwise",
    "tensor": "collectives over tensor",
    "expert": "collectives over expert",
    "context": "collectives over context",
    "gathers": "collectives over data",
    "gradients": "collectives over data",
    "bubble": "pipeline",
    "uneven": "pipeline",
    "sends": "pipeline",
    "optimizer": "optimizer",
    "launches": "launches",
    "host": "waiting",
}
"""Class of each part of an estimate; what is not named is `waiting`."""
_AGAIN = ("products", "attention", "elementwise")


@dataclass(frozen=True)
class Disagreement:
    """Where a simulated step and its estimate differ."""

    part: str
    """A class of operators, or a collective."""
    simulated: float
    estimated: float
    """Seconds of that part in a step."""

    def __str__(self) -> str:
        return (
            f"mostly {self.part}: {format_duration(self.simulated)} simulated, "
            f"{format_duration(self.estimated)} estimated"
        )


def disagreement(
    simulated: Mapping[str, float], estimated: Mapping[str, float], apart: float = APART
) -> Disagreement | None:
    """The part from which most of the difference comes; None where the steps are within `apart` of each other.

    `simulated`: of `trace.step_parts`; `estimated`: the parts of an estimate. Both are seconds that add up to the step.
    """
    step, other = sum(simulated.values()), sum(estimated.values())
    if abs(step - other) <= apart * other:
        return None
    ours, theirs = _classes(simulated), closed_classes(estimated)
    sign = 1.0 if step > other else -1.0
    most = max({*ours, *theirs}, key=lambda name: (sign * (ours[name] - theirs[name]), name))
    return Disagreement(_named(most, simulated), ours[most], theirs[most])


def closed_classes(parts: Mapping[str, float]) -> defaultdict[str, float]:
    """Seconds of an estimate by class; what is computed again is shared out over what it repeats."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        if name != "again":
            found[_CLOSED.get(name, "waiting")] += seconds
    repeated = sum(found[name] for name in _AGAIN)
    for name in _AGAIN:
        found[name] += parts.get("again", 0.0) * (found[name] / repeated if repeated else 1 / len(_AGAIN))
    return found


def _classes(parts: Mapping[str, float]) -> defaultdict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        found[_class(name)] += seconds
    return found


def _class(name: str) -> str:
    """`all_gather over shard` is of the collectives over data."""
    _, over, axis = name.partition(" over ")
    if not over:
        return "launches" if name == "host" else name
    known = next((kind for kind in ("tensor", "expert", "context", "pipeline") if kind in axis), "data")
    return known if known == "pipeline" else f"collectives over {known}"


def _named(most: str, simulated: Mapping[str, float]) -> str:
    """The collective of a class that takes most; the class where the simulator has none of it."""
    own = {name: seconds for name, seconds in simulated.items() if _class(name) == most}
    return max(own, key=lambda name: own[name]) if most.startswith("collectives") and own else most
