"""Random strategies on random small models: right, or refused with a reason; never a wrong number, never a hang.

    python benchmarks/fuzz.py [--cases 5000] [--first 0] [--workers 2]
    python benchmarks/fuzz.py --files 200       # whole run files, until so many were accepted by train

Every case is one training step on simulated ranks against one device (`harness.random_files`). Exits with 1 when
there is a fault or fewer than 60% are right. A case that fails is run again by itself with `--first NUMBER --cases 1`.

With ``--files`` each case is a run file that goes through `hyper-parallel verify` (`harness.random_files`):
one that `train` accepts has to come out right.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from campaigns import general, in_processes, limited
from commandline import run
from measure import write
from processes import scratch

from harness.equivalence import Cell
from harness.random_files import draw_case, run_file

LIMIT_S = 120
"""A case that takes longer hangs."""
Verdict = tuple[Cell, str]
"""A cell, and what was drawn for it, to be told where it is wrong."""


def step(number: int) -> Verdict:
    """A training step under a strategy."""
    with limited(LIMIT_S):
        case = draw_case(number)
        cell = case.run()
    return cell, f" | {dict(case.strategy)} {dict(case.train)} length {case.length} {dict(case.family)}"


def file(number: int) -> Verdict:
    """A whole run file."""
    with scratch() as folder:
        cell = run_file(number, folder)
    return cell, f" | {cell.strategy}"


def timed(case: Callable[[int], Verdict], number: int) -> tuple[Cell, str, float]:
    """What a case came to, with one thread, and its seconds."""
    torch.set_num_threads(1)
    start = time.monotonic()
    return *case(number), time.monotonic() - start


def tallied(
    case: Callable[[int], Verdict], numbers: Iterable[int], workers: int, accepted: int = 0
) -> dict[str, Any]:
    """Run cases, until so many were accepted if it is given; the figures."""
    began, longest = time.monotonic(), 0.0
    status, reasons = Counter[str](), Counter[str]()
    families: dict[str, Counter[str]] = defaultdict(Counter)
    faults = []
    cases = in_processes(functools.partial(timed, case), numbers, workers, per_process=200)
    for number, (cell, told, seconds) in cases:
        status[cell.status] += 1
        families[cell.family][cell.status] += 1
        longest = max(longest, seconds)
        if cell.status == "refused":
            reasons[general(cell.detail)[:160]] += 1
        if cell.status == "wrong":
            faults.append({"case": number, "detail": cell.detail + told})
            print(faults[-1], flush=True)
        if status.total() % 100 == 0:
            print(f"{dict(status)}, {time.monotonic() - began:.0f} s", flush=True)
        if accepted and status["right"] + status["wrong"] >= accepted:
            break
    found = {
        **{verdict: status[verdict] for verdict in ("right", "refused", "wrong")},
        "seconds": round(time.monotonic() - began),
        "longest_case_s": round(longest, 1),
        "by_family": {name: dict(families[name]) for name in sorted(families)},
        "reasons": dict(reasons.most_common()),
        "faults": faults,
    }
    print(json.dumps(found, indent=1))
    return found


def main(
    cases: int = 5000,
    first: int = 0,
    workers: int = 2,
    files: Annotated[int, "whole run files: how many that train accepts"] = 0,
) -> bool:
    """Run the cases; whether one is at fault, or fewer than 60% of strategies are right."""
    if files:
        found = tallied(file, itertools.count(first), workers, files)
        print(write("fuzz-files", {"accepted_by_train": files, "first": first, **found}))
        return bool(found["faults"])
    found = tallied(step, range(first, first + cases), workers)
    share = found["right"] / cases
    if cases >= 1000:
        print(write("fuzz", {"cases": cases, "first": first, "right_share": share, **found}))
    return bool(found["faults"]) or share < 0.6


if __name__ == "__main__":
    run(main)
