"""Metrics of one strategy: its estimate, the figures derived from it (MFU, tokens/s, cost), and the part of a step in
which the estimate and a simulation differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.planner.columns import CODES
from hyper_parallel.planner.cost_model import pipeline
from hyper_parallel.planner.cost_model.dims import (
    adapters,
    in_eight_bits,
    in_four_bits,
    keys_seen,
    layer_matrices,
    module_matrices,
)
from hyper_parallel.planner.cost_model.memory import on_host
from hyper_parallel.planner.cost_model.step import Estimate
from hyper_parallel.planner.error_interval import between
from hyper_parallel.planner.table import SPREAD, Array, Table
from hyper_parallel.units import format_duration

if TYPE_CHECKING:
    from hyper_parallel.estimate.prediction import Prediction

# Model FLOPs and MFU of estimated steps.
#
#     flops = 6 N + 12 L H Q K(S)            a token                       `flops_per_token`
#     MFU   = batch · S · flops / (seconds · devices · peak)               `mfu`
#
# The convention is that of `workload.work`: N counts the elements of the matrices that a token is multiplied with (the
# head also when it is tied, of experts those that are chosen, and the router), attention counts the keys that the mask
# keeps, and recomputation is not counted. In latent attention Q is the mean of a head's dims of keys and of values.
# Products of other mixers' recurrences are those of `workload.mixers`. Where a model is frozen the gradients of its
# weights are not computed: 4 N, and 6 for each element of the adapters. Each module that predicts one token more counts
# as a layer and a head. The peak is that of the precision of the linear layers; in float32 it is the 16-bit one, since
# a table has no other.


def flops_per_token(t: Table) -> Array:
    """Model FLOPs of training on one token, forward and backward, of [n] or [1]."""
    matrices = t.layers * layer_matrices(t) + t.vocabulary * t.hidden
    size = np.where(t.key_rank > 0, (t.plain + t.rotary + t.value) / 2, t.head_dim)
    one_more = module_matrices(t) + 2 * t.hidden * t.hidden + t.vocabulary * t.hidden
    matrices = matrices + t.prediction_modules * one_more
    times = 6 - 2 * t.frozen
    mixed = 12 * t.attention_layers * t.heads * size * keys_seen(t) + 3 * t.mixer_layers * t.mixer_scanned
    return times * matrices + 6 * t.layers * adapters(t) + mixed


def peak(t: Table) -> Array:
    """FLOP/s of a device in the precision of its linear layers."""
    return np.where(in_four_bits(t), t.peak4, np.where(in_eight_bits(t), t.peak8, t.peak16))


def tokens_per_second(t: Table, seconds: Array) -> Array:
    """Tokens/s of each device, for steps of `seconds`."""
    return t.batch * t.sequence / (seconds * t.devices)


def mfu(t: Table, seconds: Array) -> Array:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B), 0 to 1, for steps of `seconds`."""
    return tokens_per_second(t, seconds) * flops_per_token(t) / peak(t)


COMMUNICATION = ("tensor", "expert", "context", "gathers", "gradients", "sends")
"""Parts of a step in which a device waits for a collective or a message that nothing hides."""

WAITING = ("bubble", "uneven")
"""Parts of a step in which a stage of a pipeline waits for others."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A strategy and its estimate; times are seconds, memory is bytes of the fullest device."""

    row: Table
    """The strategy as a table's only row."""
    strategy: Mapping[str, float | str]
    """The columns of SPREAD; codes by name."""
    devices: int
    micro_batches: int
    """Of a step, on each rank."""
    tokens: float
    """Of a step, on all devices."""
    seconds: float
    between: tuple[float, float]
    """Seconds between which 90% of measured steps lie, by published runs that the constants have not seen."""
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    peak: float
    on_host: float
    """Bytes of the rank with most of them in the host's memory."""
    capacity: float
    fits: bool
    tokens_per_second: float
    """Of each device."""
    mfu: float
    """0 to 1."""

    @property
    def communicating(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(self.parts.get(name, 0.0) for name in COMMUNICATION)

    @property
    def waiting(self) -> float:
        """Seconds of the pipeline's bubble, uneven stages included."""
        return sum(self.parts.get(name, 0.0) for name in WAITING)

    @property
    def device_hours(self) -> float:
        """Device hours of a step."""
        return self.seconds * self.devices / 3600

    def cost(self, price: float, tokens: float) -> float:
        """Cost of a run over `tokens` tokens, at `price` for a device hour."""
        return self.device_hours * price * tokens / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data; times are seconds, memory is bytes; all are estimated."""
        return {
            "strategy": dict(self.strategy),
            "devices": self.devices,
            "micro_batches": self.micro_batches,
            "step_time_s": self.seconds,
            "interval_s": list(self.between),
            "tokens_per_s_per_device": self.tokens_per_second,
            "mfu": self.mfu,
            "exposed_communication_s": self.communicating,
            "bubble_s": self.waiting,
            "parts_s": dict(self.parts),
            "memory_bytes": dict(self.memory),
            "peak_bytes": self.peak,
            "host_bytes": self.on_host,
            "device_bytes": self.capacity,
            "fits": self.fits,
        }


def figures(t: Table, estimate: Estimate) -> list[Figures]:
    """The figures of each row of a table."""
    low, high = between(t, estimate)
    counts = {"devices": t.devices, "micro_batches": pipeline.micro_batches(t)}
    numbers = {
        "tokens": t.batch * t.sequence,
        "seconds": estimate.seconds,
        "peak": estimate.peak,
        "on_host": on_host(t),
        "capacity": t.capacity,
        "tokens_per_second": tokens_per_second(t, estimate.seconds),
        "mfu": mfu(t, estimate.seconds),
    }
    spread = {name: getattr(t, name) for name in SPREAD}
    columns = (spread, estimate.parts, estimate.memory, counts, numbers, {"low": low, "high": high})
    fits = np.broadcast_to(estimate.fits, t.n)
    return [
        Figures(
            row=t.take([row]),
            strategy={name: _value(name, value) for name, value in strategy.items()},
            parts=parts,
            memory=memory,
            between=(bounds["low"], bounds["high"]),
            fits=bool(fits[row]),
            **{name: int(count) for name, count in counted.items()},
            **values,
        )
        for row, (strategy, parts, memory, counted, values, bounds) in enumerate(
            zip(*(_rows(some, t.n) for some in columns), strict=True)
        )
    ]


def _rows(columns: Mapping[str, Array], n: int) -> list[dict[str, Any]]:
    """The values of each of n rows, by column."""
    whole = {name: np.broadcast_to(column, n) for name, column in columns.items()}
    return [{name: float(column[row]) for name, column in whole.items()} for row in range(n)]


def _value(column: str, value: float) -> float | str:
    """A column's value: the name where it is a code, a whole number where it is one."""
    if column == "order":
        return " ".join(CODES["order"][int(value)])
    if column in CODES:
        return str(CODES[column][int(value)])
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class Simulated:
    """The simulator's prediction of a strategy's real step."""

    seconds: float | None
    """None where the step cannot be captured."""
    fits: bool | None = None
    """Whether the predicted peak is within a device's memory; None where that is not known."""
    peak: float | None = None
    """Bytes that a rank holds at most."""
    reason: str = ""
    """Why there is no prediction, or what it leaves out."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the predicted step by part (`trace.timeline`)."""
    mfu: float | None = None
    """0 to 1, of the real model's FLOPs."""

    @classmethod
    def of(cls, found: Prediction) -> Simulated:
        """The figures of the prediction of a run."""
        timeline = found.timeline
        return cls(timeline.step, found.fits, timeline.peak.bytes, parts=found.parts, mfu=timeline.mfu)


# Disagreement of the closed forms and the simulator: the operator class or collective that it comes from.
#
# Both predictors say what a step's seconds are spent on (`cost_model.step`, `trace.timeline`). Their parts are
# brought to common classes; where the steps differ by more than `APART`, the class whose seconds differ most, in the
# direction in which the steps differ, is named.

DIFFER = 0.05
"""A share of a step beyond which estimate and simulation are said to differ."""
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

    `simulated`: of `trace.timeline`; `estimated`: the parts of an estimate. Both are seconds that add up to the step.
    """
    step, other = sum(simulated.values()), sum(estimated.values())
    if abs(step - other) <= apart * other:
        return None
    ours, theirs = simulated_classes(simulated), closed_classes(estimated)
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


def simulated_classes(parts: Mapping[str, float]) -> defaultdict[str, float]:
    """Seconds of a simulated step by class."""
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
