"""Random strategies on random small models: right, or refused with a reason; never a wrong number, never a hang.

    python benchmarks/fuzz.py [--cases 5000] [--first 0] [--workers 2]
    python benchmarks/fuzz.py --files 200       # whole run files, until so many were accepted by train

Every case is one training step on simulated ranks against one device (`hyper_parallel.verify.fuzz`). Prints the
counts and every fault, writes ``benchmarks/results/fuzz.json``, and exits with 1 when there is a fault or fewer
than 60% are right. A case that fails is run again by itself with ``--first NUMBER --cases 1``.

With ``--files`` each case is a run file that goes through `hyper-parallel verify` (`hyper_parallel.verify.fuzz_files`):
one that `train` accepts has to come out right. Writes ``benchmarks/results/fuzz-files.json``.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from campaigns import general, in_processes, limited
from commandline import run
from measure import write
from processes import scratch

LIMIT_S = 120
"""A case that takes longer hangs."""
VERDICTS = ("right", "refused", "wrong")
Verdict = tuple[str, str, str, float]
"""Status, family, detail, seconds."""


def step(number: int) -> Verdict:
    """A training step under a strategy."""
    import torch

    from hyper_parallel.verify.fuzz import draw_case

    torch.set_num_threads(1)
    start = time.monotonic()
    with limited(LIMIT_S):
        case = draw_case(number)
        cell = case.run()
    told = f" | {dict(case.strategy)} {dict(case.train)} length {case.length} {dict(case.family)}"
    detail = cell.detail + told * (cell.status == "wrong")
    return cell.status, cell.family, detail, time.monotonic() - start


def file(number: int) -> Verdict:
    """A whole run file."""
    import torch

    from hyper_parallel.verify.fuzz_files import run_file

    torch.set_num_threads(1)
    start = time.monotonic()
    with scratch() as folder:
        cell = run_file(number, folder)
    detail = cell.detail + f" | {cell.strategy}" * (cell.status == "wrong")
    return cell.status, cell.family, detail, time.monotonic() - start


@dataclass
class Tally:
    """What the cases came to."""

    status: Counter[str] = field(default_factory=Counter)
    families: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    longest: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def count(self, number: int, verdict: Verdict) -> None:
        """Count a case, and say what is wrong."""
        status, family, detail, seconds = verdict
        self.status[status] += 1
        self.families[family][status] += 1
        self.longest = max(self.longest, seconds)
        if status == "refused":
            self.reasons[general(detail)[:160]] += 1
        if status == "wrong":
            self.faults.append({"case": number, "detail": detail})
            print(f"case {number}: {detail}", flush=True)
        if self.status.total() % 100 == 0:
            print(f"{dict(self.status)}, {time.monotonic() - self.began:.0f} s", flush=True)

    def result(self, **more: Any) -> dict[str, Any]:
        """The figures, printed too."""
        families = {name: dict(self.families[name]) for name in sorted(self.families)}
        for name, counts in families.items():
            print(f"{name:14} " + " ".join(f"{counts.get(verdict, 0):6} {verdict}" for verdict in VERDICTS))
        for reason, count in self.reasons.most_common():
            print(f"{count:6}  {reason}")
        return {
            **more,
            **{verdict: self.status[verdict] for verdict in VERDICTS},
            "seconds": round(time.monotonic() - self.began),
            "longest_case_s": round(self.longest, 1),
            "by_family": families,
            "reasons": dict(self.reasons.most_common()),
            "faults": self.faults,
        }


def tallied(case: Callable[[int], Verdict], numbers: Iterable[int], workers: int, accepted: int = 0) -> Tally:
    """Run cases, until so many were accepted if it is given."""
    tally = Tally()
    for number, verdict in in_processes(case, numbers, workers, per_process=200):
        tally.count(number, verdict)
        if accepted and tally.status.total() - tally.status["refused"] >= accepted:
            break
    return tally


def main(
    cases: int = 5000,
    first: int = 0,
    workers: int = 2,
    files: Annotated[int, "whole run files: how many that train accepts"] = 0,
) -> bool:
    """Run the cases; whether one is at fault, or fewer than 60% of strategies are right."""
    if files:
        tally = tallied(file, itertools.count(first), workers, files)
        print(write("fuzz-files", tally.result(accepted_by_train=files, first=first)))
        return bool(tally.faults)
    tally = tallied(step, range(first, first + cases), workers)
    share = tally.status["right"] / cases
    result = tally.result(cases=cases, first=first, right_share=share)
    if cases >= 1000:
        print(write("fuzz", result))
    return bool(tally.faults) or share < 0.6


if __name__ == "__main__":
    run(main)
