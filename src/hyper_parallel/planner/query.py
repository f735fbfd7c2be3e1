"""Query to the planner: model, cluster, batch, objective; and numbers as people write them, `8k`, `64..4096`, `15T`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.planner.columns import CODES, Profile
from hyper_parallel.planner.framework_profiles import GENERIC
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
    (`planner.solve`). 0: the quickest does."""

    def __post_init__(self) -> None:
        if not self.devices and not self.cluster.ranks:
            raise ConfigError(
                f"the cluster {self.cluster.title!r} has an open number of devices; name it with "
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
        fix = {ALSO.get(name, name): value for name, value in self.fix.items()}
        if fix.get("recompute") == "full":
            # Who fixes the kind alone means all layers.
            fix.setdefault("recomputed", 1)
        object.__setattr__(self, "fix", fix)
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
LEAST = dict.fromkeys((*SHARES, "zero", "sequence_parallel", "paired"), 0.0)
MOST = {**dict.fromkeys((*SHARES, "sequence_parallel", "paired"), 1.0), "zero": 3.0}
"""The least and greatest values of columns that are no degrees."""


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGbBtT]?)")
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def whole(option: str, text: str, least: int = 1) -> int:
    """`8192`, or `8k` for as many; a count of devices, sequences or tokens of a sequence, at least `least`.

    Raises ConfigError, which names `option`.
    """
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * _BINARY.get(found[2].lower(), 0) if found else -1.0
    if value < least or not value.is_integer():
        raise ConfigError(
            f"{option}: {text!r} is no whole number of at least {least}; write 8192, or 8k for the same"
        )
    return int(value)


def span(option: str, text: str) -> tuple[int, ...]:
    """`64..4096` as 64, 128, … 4096: doubled from the first, and the last; one number as itself."""
    first, dots, last = text.partition("..")
    least = whole(option, first)
    if not dots:
        return (least,)
    most = whole(option, last)
    if most < least:
        raise ConfigError(f"{option}: {text!r} ends before it begins; write {most}..{least}")
    found = [least]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return (*found, most) if found[-1] < most else tuple(found)


def tokens(option: str, text: str) -> float:
    """`15T`: tokens of a run, in powers of a thousand."""
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * _DECIMAL.get(found[2].lower(), 0.0) if found else 0.0
    if value < 1:
        raise ConfigError(f"{option}: {text!r} is no number of tokens; write 15T, 300B or the number itself")
    return value


def fixed(texts: tuple[str, ...]) -> dict[str, object]:
    """Parse `tensor_x=8` and `recompute=full,none` for `Question.fix`: a value, or a list of allowed values."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ConfigError(f"--fix {text!r}: write NAME=VALUE, as in tensor_x=8")
        values = [one.strip() for one in value.split(",")]
        found[name.strip()] = values[0] if len(values) == 1 else values
    return found
