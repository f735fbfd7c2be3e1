"""Choice of a layout: the one whose simulated step is the shortest, under the run's order and bound on staleness."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import render
from hyper_parallel.rl.role_split.candidates import Candidates, RoleLayout
from hyper_parallel.rl.role_split.role_times import Measured, simulation_of
from hyper_parallel.rl.simulator import LoopResult, ranked_splits, simulate_alternating
from hyper_parallel.units import format_seconds

WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout's simulated step."""

    layout: RoleLayout
    seconds: float
    generating: float
    """Share of the time in which an engine of the rollout works."""
    training: float
    """Share of the time in which the actor works."""
    staleness: float
    """Mean of trained groups, in optimizer updates."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout that was chosen, and why."""

    layout: RoleLayout
    predictions: tuple[Prediction, ...]
    """The quickest first. Empty where nothing was measured, because there was only one layout."""

    @property
    def line(self) -> str:
        """What was chosen, what it takes, and what the next best takes."""
        if not self.predictions:
            return f"roles: {self.layout.words}; there is no other layout, and nothing was measured"
        first, *others = self.predictions
        beside = (
            f"; next best: {others[0].layout.words}, {format_seconds(others[0].seconds)}" if others else ""
        )
        return f"roles: {self.layout.words}, predicted {format_seconds(first.seconds)} a step{beside}"

    def table(self) -> str:
        """What was simulated; empty where nothing was."""
        if not self.predictions:
            return ""
        rows = tuple(
            (
                one.layout.words,
                f"{one.seconds:.4g}",
                f"{one.generating:.0%}",
                f"{one.training:.0%}",
                f"{one.staleness:.1f}",
            )
            for one in self.predictions
        )
        columns = ("Devices", "Seconds", "Rollout", "Actor", "Stale")
        note = (
            "Seconds: of a step. Rollout, Actor: share of the time in which they work.\n"
            "Stale: mean staleness of trained groups, in optimizer updates. Layouts that\n"
            "cannot be among the first two are left out."
        )
        sheet = Sheet("a step of each layout", columns, rows, note=note)
        return render("layouts, simulated from measured times", (), (sheet,), "predicted", WIDTH)


def choose(config: RLConfig, candidates: Candidates, measured: Measured) -> Choice:
    """Simulate the layouts whose times were measured; the quickest, of equals the one that takes turns."""
    found = list[Prediction]()
    if candidates.together is not None and measured.together is not None:
        setup = simulation_of(config, measured, engine=candidates.engine, together=True)
        found.append(_prediction(candidates.together, simulate_alternating(setup)))
    if measured.apart is not None:
        setup = simulation_of(config, measured, engine=candidates.engine, together=False)
        known = setup.train.measured
        splits = {
            (one.rollout, one.train): one
            for one in candidates.apart
            if len(known) > 1 or one.train in known  # one measurement tells nothing of other numbers
        }
        found += [
            _prediction(splits[one.rollout_devices, one.train_devices], one)
            for one in ranked_splits(setup, list(splits))
        ]
    found.sort(key=lambda one: one.seconds)
    return Choice(layout=found[0].layout, predictions=tuple(found))


def _prediction(layout: RoleLayout, result: LoopResult) -> Prediction:
    return Prediction(
        layout=layout,
        seconds=result.seconds,
        generating=result.generating,
        training=result.training,
        staleness=result.mean_staleness,
    )
