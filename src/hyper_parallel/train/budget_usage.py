"""Use of a memory budget over a run's steps: planned peak, bytes copied by tier, seconds waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.units import format_bytes, format_duration


@dataclass(frozen=True, kw_only=True)
class BudgetUse:
    """What a budget came to on one rank. Bytes; rates are means over the steps of this run."""

    budget: int
    """Of device memory (`strategy.memory.device`)."""
    peak: int
    """The most that the step's tensors take of it, by the plan."""
    out: dict[str, float]
    """Bytes that a step copies from the device to each tier."""
    back: dict[str, float]
    """Bytes that a step copies from each tier to the device."""
    waited: float
    """Seconds of a step in which it waited for copies."""
    share: float
    """`waited` as a share of the step's time."""
    process: int
    """Resident memory of the process at the last recorded step, where the device is a CPU; otherwise 0. The budget
    does not govern it: it holds the interpreter, libraries, host tiers and caches as well."""

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line of a summary."""
        met = "met" if self.peak <= self.budget else "EXCEEDED"
        rows = [
            (
                "device memory",
                f"{format_bytes(self.peak)} at most, by the plan, of a budget of {format_bytes(self.budget)}: {met}",
            )
        ]
        for tier in sorted({*self.out, *self.back}):
            out, back = self.out.get(tier, 0.0), self.back.get(tier, 0.0)
            rows.append(
                (f"copies, {tier}", f"{format_bytes(out)} to it and {format_bytes(back)} back a step")
            )
        waited = f"{format_duration(self.waited)} a step, {self.share:.0%} of its time"
        rows.append(("copies waited for", waited if self.waited else "never"))
        if self.process:
            told = f"{format_bytes(self.process)} resident; not governed: it includes Python and the tiers"
            rows.append(("process memory", told))
        return rows


class BudgetMeter:
    """Adds up what the budget of this rank did in steps, without what lies between them."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._copied: Counter[tuple[str, bool]] = Counter()
        self._waited, self._seconds, self._steps, self._process = 0.0, 0.0, 0, 0
        self._began = (budget.copied, 0.0)

    def begin(self) -> None:
        """A step begins."""
        self._began = self._budget.copied, self._budget.waited

    def end(self, seconds: float) -> None:
        """A step of `seconds` ended."""
        copied, waited = self._began
        now = self._budget.copied
        now.subtract(copied)
        self._copied.update(now)
        self._waited += self._budget.waited - waited
        self._seconds += seconds
        self._steps += 1

    def record(self, memory: float, *, on_cpu: bool) -> dict[str, float]:
        """What a step's record says of the budget. `memory`: what the back end says is allocated; of a CPU, that the
        process has."""
        self._process = int(memory) if on_cpu else 0
        steps = max(self._steps, 1)
        found = {
            "memory_budget": float(self._budget.bytes),
            "memory_peak": float(self._budget.peak),
            "memory_copied": self._copied.total() / steps,
            "memory_stall": self._budget.stalled(),
        }
        return {**found, "memory_process": memory} if on_cpu else found

    def use(self) -> BudgetUse | None:
        """Over all steps so far; None before the first."""
        if not self._steps:
            return None
        sums = {
            way: {
                tier: count / self._steps
                for (tier, out), count in self._copied.items()
                if out is way and count
            }
            for way in (True, False)
        }
        return BudgetUse(
            budget=self._budget.bytes,
            peak=self._budget.peak,
            out=sums[True],
            back=sums[False],
            waited=self._waited / self._steps,
            share=self._waited / self._seconds if self._seconds else 0.0,
            process=self._process,
        )
