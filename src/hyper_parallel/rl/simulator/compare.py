"""Comparison of one simulated loop with the colocated one and with the other orders, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import render
from hyper_parallel.rl.queue import ORDERS
from hyper_parallel.rl.simulator.result import LoopResult
from hyper_parallel.rl.simulator.run import simulate_colocated, simulate_loop
from hyper_parallel.rl.simulator.split import best_split
from hyper_parallel.units import format_seconds

WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Simulated loops on the same devices."""

    setup: RlSimulation
    colocated: LoopResult
    loops: tuple[LoopResult, ...]
    """Disaggregated; the first has the order that the file names."""
    chosen: bool
    """Whether the split of the devices was chosen."""

    def speed(self, loop: LoopResult) -> float:
        """How many times as fast as the colocated loop."""
        return self.colocated.seconds / loop.seconds

    def text(self) -> str:
        """The verdict and a table, at most 80 columns wide."""
        first = self.loops[0]
        better = self.speed(first)
        versus = f"{better:.2f} times as fast as" if better >= 1 else f"{1 / better:.2f} times slower than"
        verdict = (
            f"simulated: {format_seconds(first.seconds)} a step, {versus} the colocated synchronous loop "
            f"({format_seconds(self.colocated.seconds)}); {first.rollout_devices} devices generate, "
            f"{first.train_devices} train{' (split chosen)' if self.chosen else ''}"
        )
        rows = tuple(self._row(loop) for loop in (self.colocated, *self.loops))
        note = (
            "Rollout, Actor: share of the time in which they work. Bubble: idle share of all\n"
            "devices' time. Waste: tokens drawn and not trained. Stale: mean and largest\n"
            f"staleness of trained groups, in optimizer updates; the bound is {first.staleness}."
        )
        if any(loop.largest_staleness > loop.staleness for loop in self.loops):
            note += "\n'capacity' exceeds it: it limits how many groups start, not how stale they get."
        columns = ("Loop", "Seconds", "Speed", "Rollout", "Actor", "Bubble", "Waste", "Stale")
        title = f"a step of {self.setup.groups} groups of {self.setup.group}"
        return render(verdict, (), (Sheet(title, columns, rows, note=note),), "simulated", WIDTH)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "source": "simulated",
            "colocated": self.colocated.to_json(),
            "loops": [{**loop.to_json(), "speed": round(self.speed(loop), 4)} for loop in self.loops],
        }

    def _row(self, loop: LoopResult) -> tuple[str, ...]:
        return (
            loop.kind,
            f"{loop.seconds:.4g}",
            f"{self.speed(loop):.2f}x",
            *(f"{share:.0%}" for share in (loop.generating, loop.training, loop.bubble, loop.wasted)),
            f"{loop.mean_staleness:.1f}/{loop.largest_staleness}",
        )


def compare(setup: RlSimulation, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Simulates the colocated loop, the file's order, and the other orders on the same split of the devices.

    Raises ConfigError where the role times say nothing about a number of devices.
    """
    progress("simulating the colocated loop")
    colocated = simulate_colocated(setup)
    if setup.rollout == "auto":
        progress("choosing the split of the devices")
        first = best_split(setup).result
    else:
        progress(f"simulating {setup.order}")
        first = simulate_loop(setup)
    loops = [first]
    for order in ORDERS:
        if order != setup.order:
            progress(f"simulating {order}")
            loops.append(simulate_loop(setup.model_copy(update={"order": order}), first.rollout_devices))
    return Comparison(setup=setup, colocated=colocated, loops=tuple(loops), chosen=setup.rollout == "auto")
