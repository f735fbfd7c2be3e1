"""Forty ways in which people write training loops, each under `hp.offload` beside the same loop without.

    python benchmarks/budget_patterns.py

`harness.loop_patterns` has the patterns, and says what is compared. A pattern comes out equal, refused or wrong, some
of them within 3% of the least budget too. Results: benchmarks/results/budget_patterns.json.
"""

from __future__ import annotations

import json

from commandline import run
from measure import quiet
from pages import Benchmark

from harness.loop_patterns import PATTERNS
from harness.loop_patterns import run as tried

BENCHMARK = Benchmark("budget_patterns")


def main() -> bool:
    """Run all patterns; whether one is wrong."""
    quiet(threads=1)
    rows = []
    for name in PATTERNS:
        rows.append(tried(name))
        print(json.dumps(rows[-1]), flush=True)
    wrong = [row["pattern"] for row in rows if "wrong" in (row["came"], row.get("tight"))]
    summary = {
        "patterns": len(rows),
        "equal": sum(row["came"] == "equal" for row in rows),
        "refused": sum(row["came"] == "refused" for row in rows),
        "equal at the least budget": sum(row.get("tight") == "equal" for row in rows),
        "wrong": wrong,
    }
    print(json.dumps(summary, indent=1))
    BENCHMARK.keep({"summary": summary, "patterns": rows})
    return bool(wrong)


if __name__ == "__main__":
    run(main)
