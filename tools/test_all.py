"""Everything that can be tested on one machine, in shards: python tools/test_all.py SHARD/SHARDS [PART ...]

`make test` is the first part of everything; this is the rest of it. Each part is a command with about the minutes that
it takes on two cores. Parts are dealt to the shards so that these are about as long as each other; the deal depends on
the number of shards alone, so that shards 1 to n together are every part. A part that fails does not stop the others.
`list/n` in place of the shard prints the deal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = "-m pytest -q -p no:cacheprovider -n 3 --dist worksteal --durations=5"
SLICES = 4
"""Of what is too long for one shard."""
HALVES = 2
"""Of the tests of another version."""


@dataclass(frozen=True)
class Part:
    """One thing to run."""

    name: str
    minutes: float
    commands: tuple[str, ...]
    python: str = ""
    """The version of Python that it needs, where that is not the environment's."""


def parts() -> list[Part]:
    """Every part, those of the pinned environment first."""
    python = ".venv/bin/python"
    found = [
        Part(f"{name}-{piece}", minutes, (f"{python} {PYTEST} {options} --slice {piece}/{SLICES}",))
        for name, minutes, options in (
            ("rest", 8, '--tier rest -m "not matrix"'),
            ("matrix", 8, "-m matrix"),
        )
        for piece in range(1, SLICES + 1)
    ]
    found += [
        Part(
            f"owner-{piece}", 3, (f"{python} benchmarks/owner.py --slice {piece}/{SLICES} --out build/owner",)
        )
        for piece in range(1, SLICES + 1)
    ]
    found += [
        Part("docs", 2, ("make --no-print-directory docs",)),
        Part("wheel", 4, ("make --no-print-directory wheel",)),
        Part("llamafactory-and-trl", 6, ("make --no-print-directory test-llamafactory",)),
        Part("ray", 4, ("make --no-print-directory test-ray",)),
    ]
    for name, make in (
        ("pytorch-2.11", "tools/venv_with.sh {venv} requirements/torch-2.11.txt"),
        ("python-3.12", "tools/venv_with.sh {venv}"),
        ("python-3.13", "tools/venv_with.sh {venv}"),
    ):
        venv = f".venv-{name}"
        test = f'{venv}/bin/python {PYTEST} --tier test -m "not matrix"'
        found += [
            Part(
                f"{name}-half-{half}",
                10,
                (make.format(venv=venv), f"{test} --slice {half}/{HALVES}"),
                name.partition("python-")[2],
            )
            for half in range(1, HALVES + 1)
        ]
    return found


def interpreter(version: str) -> str | None:
    """A Python of this version, on the path or among those of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (
        shutil.which(f"python{version}"),
        *root.glob(f"versions/{version}.*/bin/python{version}"),
    ):
        if (
            candidate
            and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return str(candidate)
    return None


def deal(every: Sequence[Part], shards: int) -> list[list[Part]]:
    """The longest part first, each to the shard that has the least to do."""
    dealt: list[list[Part]] = [[] for _ in range(shards)]
    for part in sorted(every, key=lambda part: (-part.minutes, part.name)):
        min(dealt, key=lambda shard: sum(other.minutes for other in shard)).append(part)
    return dealt


def run(part: Part) -> str:
    """What came of it; the output goes where ours goes."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if part.python:
        found = interpreter(part.python)
        if found is None:
            return f"skipped: there is no Python {part.python}"
        environment["PYTHON"] = found
    began = time.monotonic()
    for command in part.commands:
        print(f"== {part.name}: {command}", flush=True)
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return f"FAILED with {done.returncode} after {(time.monotonic() - began) / 60:.1f} min: {command}"
    return f"passed in {(time.monotonic() - began) / 60:.1f} min"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shard", help="i/n, or list/n")
    parser.add_argument("parts", nargs="*", help="run these parts only, whichever shard they are in")
    arguments = parser.parse_args()
    every = parts()
    names = [part.name for part in every]
    if unknown := sorted(set(arguments.parts) - set(names)):
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")
    number, _, shards = arguments.shard.partition("/")
    if number == "list" and shards.isdigit():
        for place, shard in enumerate(deal(every, int(shards)), 1):
            minutes = sum(part.minutes for part in shard)
            print(f"{place}/{shards}, {minutes:g} min: {', '.join(part.name for part in shard)}")
        return
    if not (number.isdigit() and shards.isdigit() and 1 <= int(number) <= int(shards)):
        parser.error(f"the shard is i/n with i from 1 to n, not {arguments.shard!r}")
    chosen = deal(every, int(shards))[int(number) - 1]
    if arguments.parts:
        chosen = [part for part in every if part.name in arguments.parts]
    outcomes = {part.name: run(part) for part in chosen}
    print("\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    sys.exit(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
