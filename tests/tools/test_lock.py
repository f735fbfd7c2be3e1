"""The lock pins what pyproject.toml asks for, within its ranges, for every machine."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    pins = {}
    for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = version
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    declared = content["build-system"]["requires"] + project["dependencies"]
    declared += project["optional-dependencies"]["dev"]
    for requirement in map(Requirement, declared):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}; run make lock"
    assert not [name for name, version in pins.items() if not version or "+" in version]


def test_no_package_index_is_named() -> None:
    for file in ("requirements/lock.txt", "Makefile", "tools/venv.sh", "pyproject.toml", ".ci/run"):
        text = (ROOT / file).read_text()
        for word in ("index-url", "find-links", "http://", "https://"):
            assert word not in text, f"{file} says {word}"
