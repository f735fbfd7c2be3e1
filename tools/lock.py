"""Print pins of everything that the project needs to run and to be developed, as this environment has it.

    .venv/bin/python tools/lock.py > requirements/lock.txt     (or: make lock)

The closure of pyproject.toml's dependencies, of its `dev` extra and of its build requirements is walked over
the metadata of what is installed. What else lies in the environment is left out. Local version labels
(2.13.0+cpu) are cut off: which build of torch is taken is the installing machine's choice.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("dev",)


def roots(pyproject: Path) -> list[Requirement]:
    """What pyproject.toml asks for: to build, to run, and for the extras that are locked."""
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = content["project"]
    names = [*content["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        names += project["optional-dependencies"][extra]
    return [Requirement(name) for name in names]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Name to version of the requirements and all that they need in turn, as installed here."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        installed = distribution(name)
        pins[name] = Version(installed.version).public
        for text in installed.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                queue += [(needed, e) for e in ("", *needed.extras)]
    return pins


def main() -> int:
    try:
        pins = closure(roots(ROOT / "pyproject.toml"))
    except PackageNotFoundError as error:
        print(f"lock.py: {error.name} is needed but not installed here; install it first", file=sys.stderr)
        return 1
    print("# Written by tools/lock.py (make lock): what pyproject.toml and its extra 'dev' need, pinned.")
    for name, version in sorted(pins.items()):
        print(f"{name}=={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
