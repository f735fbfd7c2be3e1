"""Paths of files and dotted names of modules that the documents give in backticks are those of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyper_parallel.config import RunConfig
from hyper_parallel.config.generate import GenerateConfig
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.schema import field_at

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hyper_parallel"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {
    path.name
    for top in ("src", "tests", "tools", "benchmarks", "examples")
    for path in (ROOT / top).rglob("*.py")
}
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
OTHERS = {
    "zero_to_fp32.py",
    "checkpoint.interval",
    "pretrain_gpt.py",
    "layout.copies",
    "config.use_cache",
    "config.output_attentions",
}
"""Files of other projects, and attributes of variables in examples."""
STEP = re.findall(r"def ([a-z]\w+)", (PACKAGE / "integration/own_step.py").read_text(encoding="utf-8"))
"""What `hp.step` returns has these, and is called `step` in examples, as a folder is."""


def stale(text: str) -> list[str]:
    """The names in backticks that look like ours and are none."""
    return [name for name in re.findall(r"`([^`\s]+)`", text) if name not in OTHERS and not _known(name)]


def _known(name: str) -> bool:
    if re.fullmatch(r"[\w*./-]+\.py|(src|tests|tools|benchmarks|examples)/[\w*./-]+", name):
        return name in FILES or any(
            any(top.glob(name)) for top in (ROOT, PACKAGE, PACKAGE.parent, ROOT / "tests")
        )
    parts = name.removeprefix("hyper_parallel.").split(".")
    is_dotted = re.fullmatch(r"[a-z]\w*(\.\w+)+", name) and parts[0] in FOLDERS
    if not is_dotted or parts[-1] in ("json", "yaml", "html") or _is_key(parts):
        return True
    if parts[0] == "step" and parts[-1] in STEP:
        return True
    path = PACKAGE
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    file = path if path.is_file() else path / "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", file.read_text(encoding="utf-8")) is not None


def _is_key(parts: list[str]) -> bool:
    return any(field_at(model, tuple(parts)) is not None for model in (RunConfig, RLConfig, GenerateConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_are_those_of_today(page: Path) -> None:
    assert not stale(page.read_text(encoding="utf-8"))


def test_paths_that_are_gone_are_seen() -> None:
    text = "`graph/ir.py` `graph/nothing.py` `graph.capture` `graph.nothing` `train.steps` `none.py` `graph.ir.Nothing`"
    assert stale(text) == ["graph/nothing.py", "graph.nothing", "none.py", "graph.ir.Nothing"]
