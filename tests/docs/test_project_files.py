"""The project's files agree with each other: versions of Python, commands, templates, files of the image."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_ci_on_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == named
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_commands_of_make_exist() -> None:
    for name in ("CONTRIBUTING.md", "README.md", ".github/workflows/ci.yml", ".pre-commit-config.yaml"):
        used = set(
            re.findall(r"^(?:\s*- run: )?make ([a-z-]+)|`make ([a-z-]+)`", (ROOT / name).read_text(), re.M)
        )
        assert {one or other for one, other in used} <= TARGETS, name


def test_hooks_run_what_lint_runs() -> None:
    lint = MAKEFILE.split("\nlint:")[1].split("\n\n")[0]
    for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]:
        for command in re.findall(r"\.venv/bin/(\S+(?: tools/\S+| check| format)?)", hook["entry"]):
            assert f"$(BIN)/{command}" in lint, hook["id"]


@pytest.mark.parametrize(
    "file", [file for file in TEMPLATES if file.stem != "config"], ids=lambda file: file.stem
)
def test_a_template_has_a_name_and_distinct_fields(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_image_copies_what_exists_and_takes_its_base_as_an_argument() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+\nFROM \$\{BASE\}$", text, re.M)
    for sources in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source


def test_the_site_has_pins_alone() -> None:
    lines = (ROOT / "requirements/docs.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert {"mkdocs", "mkdocs-material", "mkdocstrings-python", "pydantic"} <= {pin.name for pin in pins}
    assert not {"torch", "transformers"} & {pin.name for pin in pins}


def test_the_site_is_built_strictly() -> None:
    """With --quiet mkdocs counts no warnings, so that --strict has no effect."""
    recipe = MAKEFILE.split("\ndocs:")[1].split("\n\n")[0]
    assert "mkdocs build --strict" in recipe
    assert not re.search(r"--quiet| -q\b", recipe)
    validation = read("mkdocs.yml")["validation"]
    assert {level for part in validation.values() for level in part.values()} == {"warn"}


def test_no_package_index_is_named() -> None:
    for name in ("requirements/docs.txt", "tools/venv_docs.sh", "tools/wheel.sh", "Dockerfile", "mkdocs.yml"):
        assert not re.search(r"(?:index-url|find-links)[ =]+http|pypi", (ROOT / name).read_text()), name
