"""Metrics of one strategy: its estimate and the figures derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.planner.codes import CODES
from hyper_parallel.planner.cost_model import pipeline
from hyper_parallel.planner.cost_model.memory import on_host
from hyper_parallel.planner.cost_model.step import Estimate
from hyper_parallel.planner.error_interval import between
from hyper_parallel.planner.mfu import mfu, tokens_per_second
from hyper_parallel.planner.table import SPREAD, Array, Table

COMMUNICATION = ("tensor", "expert", "context", "gathers", "gradients", "sends")
"""Parts of a step in which a device waits for a collective or a message that nothing hides."""

WAITING = ("bubble", "uneven")
"""Parts of a step in which a stage of a pipeline waits for others."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A strategy and its estimate; times are seconds, memory is bytes of the fullest device."""

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
        """Of a step."""
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
    n = t.n

    def rows(column: Array) -> Array:
        return np.broadcast_to(column, n)

    spread = {name: rows(getattr(t, name)) for name in SPREAD}
    seconds, peak = rows(estimate.seconds), rows(estimate.peak)
    fits = np.broadcast_to(estimate.fits, n)
    parts = {name: rows(part) for name, part in estimate.parts.items()}
    memory = {name: rows(part) for name, part in estimate.memory.items()}
    speed, share = rows(tokens_per_second(t, estimate.seconds)), rows(mfu(t, estimate.seconds))
    moved = rows(on_host(t))
    micro_batches = rows(pipeline.micro_batches(t))
    devices, capacity, tokens = rows(t.devices), rows(t.capacity), rows(t.batch * t.sequence)
    low, high = (rows(bound) for bound in between(t, estimate))
    return [
        Figures(
            strategy={name: _told(name, float(column[row])) for name, column in spread.items()},
            devices=int(devices[row]),
            micro_batches=int(micro_batches[row]),
            tokens=float(tokens[row]),
            seconds=float(seconds[row]),
            between=(float(low[row]), float(high[row])),
            parts={name: float(part[row]) for name, part in parts.items()},
            memory={name: float(part[row]) for name, part in memory.items()},
            peak=float(peak[row]),
            on_host=float(moved[row]),
            capacity=float(capacity[row]),
            fits=bool(fits[row]),
            tokens_per_second=float(speed[row]),
            mfu=float(share[row]),
        )
        for row in range(n)
    ]


def _told(column: str, value: float) -> float | str:
    """A column's value: the name where it is a code, a whole number where it is one."""
    if column == "order":
        return " ".join(CODES["order"][int(value)])
    if column in CODES:
        return str(CODES[column][int(value)])
    return int(value) if value.is_integer() else value
