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

import argparse
import collections
import itertools
import multiprocessing
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 120
"""A case that takes longer hangs."""


def run(number: int) -> tuple[int, str, str, str, float]:
    """(number, status, family, detail, seconds)."""
    import torch

    from hyper_parallel.verify.fuzz import draw_case

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(LIMIT_S)
    start = time.monotonic()
    case = draw_case(number)
    cell = case.run()
    signal.alarm(0)
    detail = cell.detail
    if cell.status == "wrong":
        detail = (
            f"{detail} | {dict(case.strategy)} {dict(case.train)} length {case.length} {dict(case.family)}"
        )
    return number, cell.status, cell.family, detail, time.monotonic() - start


def run_a_file(number: int) -> tuple[int, str, str, str, float]:
    """The same of a whole run file."""
    import torch

    from hyper_parallel.verify.fuzz_files import run_file

    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cell = run_file(number, Path(folder))
    detail = cell.detail if cell.status != "wrong" else f"{cell.detail} | {cell.strategy}"
    return number, cell.status, cell.family, detail, time.monotonic() - start


def check_files(wanted: int, first: int, workers: int) -> int:
    """Draw run files until `train` accepts `wanted` of them; 0 when all of these pass `verify`."""
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    families: collections.Counter[str] = collections.Counter()
    faults, start, number = [], time.monotonic(), first
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for number, verdict, family, detail, _ in pool.imap(run_a_file, itertools.count(first)):
            counts[verdict] += 1
            if verdict == "refused":
                reasons[_general(detail)] += 1
            else:
                families[family] += 1
            if verdict == "wrong":
                faults.append({"file": number, "detail": detail})
                print(f"file {number}: {detail}", flush=True)
            accepted = counts["right"] + counts["wrong"]
            if accepted and accepted % 20 == 0 and verdict != "refused":
                print(f"{accepted} of {wanted}: {dict(counts)}, {time.monotonic() - start:.0f} s", flush=True)
            if accepted == wanted:
                pool.terminate()
                break
    result = {
        "accepted_by_train": wanted,
        "first": first,
        "last": number,
        **{verdict: counts[verdict] for verdict in ("right", "wrong", "refused")},
        "seconds": round(time.monotonic() - start),
        "accepted_by_family": dict(sorted(families.items())),
        "reasons_of_refusals": dict(reasons.most_common()),
        "faults": faults,
    }
    import measure

    print("written to", measure.write("fuzz-files", result))
    return 1 if faults else 0


def _general(reason: str) -> str:
    """A refusal without its numbers and names, to be counted with others like it."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'…'", reason))[:160]


def _hung(*_: object) -> None:
    raise TimeoutError(f"a case took more than {LIMIT_S} s")


def main() -> int:
    """Run the cases; 0 when none is at fault and at least 60% are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, help="whole run files: how many that train accepts")
    given = parser.parse_args()
    if given.files:
        return check_files(given.files, given.first, given.workers)
    numbers = range(given.first, given.first + given.cases)
    status: collections.Counter[str] = collections.Counter()
    by_family: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    faults: list[dict[str, Any]] = []
    start, longest = time.monotonic(), 0.0
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for done, (number, verdict, family, detail, took) in enumerate(
            pool.imap_unordered(run, numbers, 4), 1
        ):
            status[verdict] += 1
            by_family[family][verdict] += 1
            longest = max(longest, took)
            if verdict == "refused":
                reasons[_general(detail)] += 1
            if verdict == "wrong":
                faults.append({"case": number, "detail": detail})
                print(f"case {number}: {detail}", flush=True)
            if done % 100 == 0 or done == given.cases:
                print(
                    f"{done} of {given.cases}: {dict(status)}, {time.monotonic() - start:.0f} s", flush=True
                )
    result = {
        "cases": given.cases,
        "first": given.first,
        **{verdict: status[verdict] for verdict in ("right", "refused", "wrong")},
        "right_share": status["right"] / given.cases,
        "seconds": round(time.monotonic() - start),
        "longest_case_s": round(longest, 1),
        "by_family": {family: dict(counts) for family, counts in sorted(by_family.items())},
        "reasons": dict(reasons.most_common()),
        "faults": faults,
    }
    print(f"\n{'family':14} right refused wrong")
    for family, counts in sorted(by_family.items()):
        print(f"{family:14} {counts['right']:5} {counts['refused']:7} {counts['wrong']:5}")
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    if given.cases >= 1000:
        import measure

        print("written to", measure.write("fuzz", result))
    return 0 if not faults and result["right_share"] >= 0.6 else 1


if __name__ == "__main__":
    sys.exit(main())
