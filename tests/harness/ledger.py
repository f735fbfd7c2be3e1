"""The ledger of what tests cost, `tests/ledger.json`, and the tiers that follow from it by rule.

    fast    the cases that start no process and take at most FAST_S
    test    of each test function the first cases that take at most CASE_S each and FUNCTION_S together
    all     every case; `rest`: those that are not of the tier `test`

Seconds are a processor's, over all processes that a test starts; a fixture that tests share is divided among them. The
rehearsal device (`tests/device`) has DEVICE_S in the tier `test`, since many of its cases need one start of it. The
ledger has no entry for a case that is cheaper than NOTED_S and starts no process, nor for one that is new: both are of
every tier. `harness.meter` measures, and names the cases that have outgrown their tier.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

LEDGER = Path(__file__).parents[1] / "ledger.json"
FAST_S = 0.5
CASE_S = 3.0
FUNCTION_S = 8.0
DEVICE, DEVICE_S = "tests/device/", 120.0
NOTED_S = 0.05


@dataclass(frozen=True)
class Cost:
    """What a case takes."""

    seconds: float
    """Of a processor."""
    starts_processes: bool


class Ledger:
    """Costs by the names that pytest gives to cases, `file::function[parameters]`."""

    def __init__(self, costs: Mapping[str, Cost]) -> None:
        self.costs = costs

    @classmethod
    def read(cls, file: Path = LEDGER) -> Ledger:
        """The ledger in a file; an empty one if there is none."""
        if not file.exists():
            return cls({})
        return cls(
            {
                f"{path}::{name}": Cost(seconds, bool(starts))
                for path, cases in json.loads(file.read_text()).items()
                for name, (seconds, starts) in cases.items()
            }
        )

    def write(self, file: Path) -> None:
        """One line a case, sorted, so that two ledgers can be compared."""
        files: dict[str, list[str]] = defaultdict(list)
        for case, cost in sorted(self.costs.items()):
            path, _, name = case.partition("::")
            if cost.starts_processes or cost.seconds >= NOTED_S:
                entry = json.dumps([round(cost.seconds, 2), int(cost.starts_processes)])
                files[path].append(f"  {json.dumps(name)}: {entry}")
        sections = [
            f" {json.dumps(path)}: {{\n" + ",\n".join(cases) + "\n }" for path, cases in files.items()
        ]
        file.write_text("{\n" + ",\n".join(sections) + "\n}\n")

    def raised(self, costs: Mapping[str, Cost]) -> Ledger:
        """With these costs, where a case has none or a lower one."""
        more = {case: cost for case, cost in costs.items() if cost.seconds > self.cost(case).seconds}
        return Ledger({**self.costs, **more})

    def cost(self, case: str) -> Cost:
        """What a case took; nothing for one without an entry."""
        return self.costs.get(case, Cost(0.0, False))

    def chosen(self, tier: str, cases: Iterable[str]) -> set[str]:
        """The cases of a tier."""
        cases = list(cases)
        tiers: dict[str, Callable[[list[str]], set[str]]] = {
            "fast": self._fast,
            "test": self._test,
            "rest": lambda every: set(every) - self._test(every),
            "all": set,
        }
        return tiers[tier](cases)

    def _fast(self, cases: list[str]) -> set[str]:
        costs = {case: self.cost(case) for case in cases}
        return {case for case, cost in costs.items() if not cost.starts_processes and cost.seconds <= FAST_S}

    def _test(self, cases: list[str]) -> set[str]:
        spent: dict[str, float] = defaultdict(float)
        chosen = set()
        for case in cases:
            seconds, rehearsed = self.cost(case).seconds, case.startswith(DEVICE)
            together, most = (DEVICE, DEVICE_S) if rehearsed else (case.partition("[")[0], FUNCTION_S)
            if (rehearsed or seconds <= CASE_S) and spent[together] + seconds <= most:
                spent[together] += seconds
                chosen.add(case)
        return chosen

    def part(self, cases: list[str], number: int, count: int) -> list[str]:
        """The cases of part `number`, from 1 to `count`, neighbours that take a `count`-th of the time."""
        seconds = [self.cost(case).seconds + NOTED_S / 5 for case in cases]
        middles = [
            before + own / 2 for before, own in zip(accumulate(seconds, initial=0.0), seconds, strict=False)
        ]
        width = sum(seconds) / count
        return [
            case for case, middle in zip(cases, middles, strict=True) if int(middle / width) == number - 1
        ]


def limit(tier: str, cost: Cost, case: str = "") -> float:
    """The seconds up to which a case stays in its tier."""
    if tier == "test" and case.startswith(DEVICE):
        return DEVICE_S
    if tier == "fast":
        return 0.0 if cost.starts_processes else FAST_S
    return CASE_S if tier == "test" else float("inf")
