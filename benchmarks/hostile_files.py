"""Give the commands files that somebody forged, damaged or made to hurt, and see that each ends in one line.

    python benchmarks/hostile_files.py

300 forged or damaged checkpoints and model folders, whose digests are right and whose content is not, and 100 hostile
run files (`harness.hostile`), named and drawn. Each ends as `harness.hostile.attempts` says, within `CPU_S` seconds of
computing.

Exits with 1 when one case ends otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

from campaigns import counted
from commandline import run
from pages import Benchmark
from processes import scratch

from harness.hostile import attempts

BENCHMARK = Benchmark("hostile_files")
CPU_S = 2.0
"""Of computing, at most; a time by the clock says little on a machine that others use."""
KINDS = ((attempts.checkpoints, 150), (attempts.models, 200), (attempts.runs, 100))
"""Cases, and how many there are."""


def main(seed: int = 0) -> bool:
    """Run the cases; whether one ended otherwise."""
    with scratch() as root:
        found = [outcome for cases, count in KINDS for outcome in cases(seed, count, root)]
    found = [replace(one, verdict="took long") if one.cpu_s > CPU_S else one for one in found]
    bad = [outcome for outcome in found if outcome.verdict not in attempts.GOOD]
    verdicts = {}
    for name in dict.fromkeys(outcome.kind for outcome in found):
        those = [outcome for outcome in found if outcome.kind == name]
        verdicts[name] = counted(map(asdict, those), "verdict")
        slowest = max(outcome.cpu_s for outcome in those)
        print(f"{name}: {verdicts[name]}, at most {slowest:.2f} s of computing")
    print(*bad, sep="\n")
    body = {"seed": seed, "python_O": sys.flags.optimize > 0, "verdicts": verdicts}
    BENCHMARK.keep({**body, "cases": [asdict(outcome) for outcome in found]})
    return bool(bad)


if __name__ == "__main__":
    run(main)
