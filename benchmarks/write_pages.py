"""Write the tables of docs/ anew from the results that are kept: python benchmarks/write_pages.py

A benchmark writes its own tables when it ends. This is for when only their form has changed. The parts are those of
every script with a `BENCHMARK` that has pages.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commandline import run
from measure import RESULTS
from pages import DOCS, Benchmark, put


@dataclass(frozen=True)
class Written:
    """A part of a page."""

    page: str
    script: str
    result: str
    """Under benchmarks/results; it may not be there yet."""
    lines: Callable[[Mapping[str, Any]], Iterable[str]]


def parts() -> Iterator[Written]:
    """The parts of all scripts, in the order of their names."""
    scripts = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))}
    for name in [name for name, text in scripts.items() if "\nBENCHMARK = Benchmark(" in text]:
        benchmark: Benchmark = importlib.import_module(name).BENCHMARK
        for page, lines in benchmark.pages.items():
            yield Written(page, benchmark.script, f"{benchmark.name}.json", lines)


PARTS = tuple(parts())


def main() -> None:
    """Each part whose result is there."""
    for part in PARTS:
        result = RESULTS / part.result
        if result.exists():
            put(DOCS / part.page, part.script, part.lines(json.loads(result.read_text())))
            print(f"docs/{part.page} from {part.result}")


if __name__ == "__main__":
    run(main)
