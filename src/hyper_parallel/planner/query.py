"""Query to the planner: model, cluster, batch, objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.planner.codes import CODES
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.table import SPREAD
from hyper_parallel.workload.workload import Workload

Objective = Literal["time", "memory", "cost"]
"""`time`: seconds of a step. `memory`: bytes of the fullest device. `cost`: device hours of a step, which differs from
`time` only among different numbers of devices."""

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LARGEST_CLUSTER = 1 << 20
"""Devices; what is above is a mistake in units."""

ALSO = {"tensor": "tensor_x"}
"""Other names of columns that may be fixed."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner. Raises ConfigError for invalid fields.

    >>> Question(workload=workload, cluster=Cluster.named("h100x2048"), fix={"tensor_x": 8, "method": "ring"})
    """

    workload: Workload
    cluster: Cluster
    profile: Profile = GENERIC
    devices: int = 0
    """0: as many as the cluster has."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Fixed columns of the strategy: a value, a name where the column is a code (`method="ring"`), or a sequence of
    allowed values or names. `order` takes a code."""
    objective: Objective = "time"
    top: int = 10
    """The number of strategies to report."""
    price: float = 0.0
    """Money for a device hour; 0: not known."""
    runnable: bool = False
    """Keep to what `train` can run: no DualPipe; with a pipeline nothing in the host's memory; without one also
    parameters and gradients (`space.StrategySpace.may_move`)."""
    tie: float = 0.0
    """A share of a step's time: of strategies that are within it of the quickest one, the simplest comes first
    (`planner.simplest`). 0: the quickest does."""

    def __post_init__(self) -> None:
        if not self.devices and not self.cluster.ranks:
            raise ConfigError(
                f"the cluster {self.cluster.name or self.cluster.source!r} has an open number of devices; name it with "
                "one, as in h100x2048, or give devices"
            )
        if not 0 <= self.devices <= LARGEST_CLUSTER:
            raise ConfigError(f"devices must be 1 to {LARGEST_CLUSTER:,}; got {self.devices:,}")
        if self.objective not in OBJECTIVES:
            hint = nearest(self.objective, OBJECTIVES)
            raise ConfigError(f"objective is one of {', '.join(OBJECTIVES)}; got {self.objective!r}{hint}")
        if self.top < 1:
            raise ConfigError(f"top is the number of strategies to report, at least 1; got {self.top}")
        if not 0 <= self.tie < 1:
            raise ConfigError(f"tie is a share of a step, 0 to 1; got {self.tie}")
        if not 0 <= self.price < float("inf"):
            raise ConfigError(f"price is money for a device hour; got {self.price}")
        object.__setattr__(self, "fix", {ALSO.get(name, name): value for name, value in self.fix.items()})
        for name, value in self.fix.items():
            _values(name, value)
        if not self.devices:
            object.__setattr__(self, "devices", int(self.cluster.ranks or 0))

    def allowed(self, column: str) -> tuple[float, ...] | None:
        """The values that a column of the strategy may have; None where it is open."""
        return _values(column, self.fix[column]) if column in self.fix else None

    def on(self, devices: int) -> Question:
        """The same question for another number of devices."""
        return replace(self, devices=devices)

    def at(self, sequence: int) -> Question:
        """The same question for another length, with as many tokens a step as near as whole sequences come."""
        work = self.workload
        batch = max(1, round(work.tokens / sequence))
        return replace(self, workload=replace(work, batch=batch, sequence=sequence))


def _values(column: str, value: Any) -> tuple[float, ...]:
    """The values that `fix` gives a column, as numbers. Raises ConfigError for what the column cannot be."""
    if column not in SPREAD:
        known = [*SPREAD, *ALSO]
        hint = nearest(column, known) or f"; these may be: {', '.join(known)}"
        raise ConfigError(f"nothing of a strategy is named {column!r} that could be fixed{hint}")
    several = isinstance(value, list | tuple | range | set | frozenset)
    return tuple(sorted(_value(column, one) for one in (value if several else (value,))))


def _value(column: str, value: Any) -> float:
    names = CODES.get(column)
    if names is not None and isinstance(value, str):
        if value not in names:
            raise ConfigError(
                f"{column} is one of {', '.join(map(str, names))}; got {value!r}{nearest(value, map(str, names))}"
            )
        return float(names.index(value))
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{column} is fixed to a number; got {value!r}") from None
    least, most = LEAST.get(column, 1.0), MOST.get(column, float(LARGEST_CLUSTER))
    if names is not None:
        least, most = 0.0, len(names) - 1.0
    whole = number.is_integer() or column in SHARES
    if not (least <= number <= most and whole):
        raise ConfigError(
            f"{column} is {least:g} to {most:g}{'' if column in SHARES else ', whole'}; got {value!r}"
        )
    return number


SHARES = ("recomputed", "state_on_host", "activations_on_host", "weights_on_host")
"""Columns that are shares, 0 to 1."""
LEAST = dict.fromkeys((*SHARES, "zero", "sequence_parallel"), 0.0)
MOST = {**dict.fromkeys((*SHARES, "sequence_parallel"), 1.0), "zero": 3.0}
"""The least and greatest values of columns that are no degrees."""
