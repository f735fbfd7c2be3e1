"""Give the commands files that somebody forged, damaged or made to hurt, and see that each ends in one line.

    python benchmarks/hostile_files.py [--seed 0] [--kind checkpoints|models|runs]

300 forged or damaged checkpoints and model folders, whose digests are right and whose content is not, and 100 hostile
run files (`harness.hostile`), named and drawn. Each ends as `harness.hostile.attempts` says, within `CPU_S` seconds of
computing.

Prints a table, writes ``benchmarks/results/hostile_files.json``, and exits with 1 when one case ends otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from campaigns import counted
from commandline import run
from pages import Benchmark
from processes import scratch

from harness.hostile import attempts

BENCHMARK = Benchmark("hostile_files")
CPU_S = 2.0
"""Of computing, at most; a time by the clock says little on a machine that others use."""
Cases = Callable[[int, int, Path], Iterator[attempts.Outcome]]
KINDS: dict[str, tuple[Cases, int]] = {
    "checkpoints": (attempts.checkpoints, 150),
    "models": (attempts.models, 200),
    "runs": (attempts.runs, 100),
}
"""Kind to its cases and how many there are."""


def main(
    seed: int = 0, kind: Annotated[str | None, tuple(KINDS), "only these; nothing is written"] = None
) -> bool:
    """Run the cases; whether one ended otherwise."""
    found: list[attempts.Outcome] = []
    with scratch() as root:
        for name, (cases, count) in KINDS.items():
            if kind in (None, name):
                found += cases(seed, count, root)
    found = [replace(one, verdict="took long") if one.cpu_s > CPU_S else one for one in found]
    bad = [outcome for outcome in found if outcome.verdict not in attempts.GOOD]
    verdicts = {}
    for name in dict.fromkeys(outcome.kind for outcome in found):
        those = [outcome for outcome in found if outcome.kind == name]
        verdicts[name] = counted(map(asdict, those), "verdict")
        slowest = max(outcome.cpu_s for outcome in those)
        print(f"{name}: {verdicts[name]}, at most {slowest:.2f} s of computing")
    harmless = sorted({outcome.name for outcome in found if outcome.verdict == "harmless"})
    print(f"harmless: {', '.join(harmless)}")
    for outcome in bad:
        print(f"  {outcome.kind} {outcome.name!r}: {outcome.verdict}: {outcome.said}")
    if kind is None:
        body = {"seed": seed, "python_O": sys.flags.optimize > 0, "verdicts": verdicts}
        BENCHMARK.keep({**body, "cases": [asdict(outcome) for outcome in found]})
    return bool(bad)


if __name__ == "__main__":
    run(main)
