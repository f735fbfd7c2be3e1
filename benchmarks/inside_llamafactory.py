"""30 steps inside LlamaFactory 0.9.5 against its own trainer in one process, and the table of docs/llamafactory.md.

make test-llamafactory                                                 (makes the environment)
.venv-llamafactory/bin/python benchmarks/inside_llamafactory.py        (about ten minutes on two cores)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from commandline import run
from measure import ROOT
from pages import Benchmark
from processes import scratch

PACKAGES = ("llamafactory", "transformers", "accelerate", "peft", "torch")


def measured() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests" / "llamafactory"))
    import made
    from runs import CASES, measure

    cases = []
    with scratch() as place:
        made.everything(place)
        for case in CASES:
            found = measure(case, place, place / case.name.replace(" ", "-"))
            cases.append({"name": case.name, "workers": case.workers, "model": case.model, **asdict(found)})
            print(json.dumps(cases[-1]), flush=True)
    return {"versions": {name: version(name) for name in PACKAGES}, "cases": cases}


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    yield "With " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ":"
    yield ""
    yield "| workers | | model | largest difference of a loss, 30 steps | resumed at 15 | of a logit afterwards |"
    yield "|---|---|---|---|---|---|"
    for case in result["cases"]:
        differences = (f"{case[key]:.1e}" for key in ("loss", "resumed", "logits"))
        yield f"| {' | '.join(map(str, (case['workers'], case['name'], case['model'], *differences)))} |"


BENCHMARK = Benchmark("inside_llamafactory", {"llamafactory.md": lines})


def main() -> None:
    BENCHMARK.keep(measured())


if __name__ == "__main__":
    run(main)
