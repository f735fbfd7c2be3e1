"""The documentation site without mkdocs: its navigation has every page, and relative links and anchors resolve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_site import foreign, links

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {
    f"reference/{name}.md" for name in ("run-file", "rl-file", "generation-file", "commands", "python")
}
"""Pages that the hooks make of the schema, the commands and the public names."""
NOT_OURS = {"site", "node_modules", "runs", "build", "dist"}
"""Folders of the working tree that may hold Markdown files which are no documents of the repository."""
FILES = sorted(
    file
    for file in ROOT.rglob("*.md")
    if not any(part.startswith(".venv") or part in NOT_OURS for part in file.relative_to(ROOT).parts)
    and ".pytest_cache" not in file.parts
)
"""Every document: those of the site, and those that its build does not see, such as examples/README.md."""
_HEADING = re.compile(r"^#+ +(.*?) *#*$", re.M)


def pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation, or of a part of one."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(part)


def anchors(text: str) -> set[str]:
    """Ids of a document's headings, as repository browsers and the site form them."""
    plain = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title) for title in _HEADING.findall(plain))
    slugs = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(file: Path, text: str) -> list[str]:
    """Relative links of a document whose file or anchor is missing."""
    found = []

    def look(prose: str) -> str:
        for _, _, target in links.LINK.findall(prose):
            path, _, anchor = target.partition("#")
            if links.is_remote(target):
                continue
            there = (file.parent / path).resolve() if path else file
            if there.is_relative_to(DOCS) and str(there.relative_to(DOCS)) in GENERATED:
                continue
            if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
                found.append(target)
        return prose

    links.outside_code(text, look)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    existing = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(nav) == sorted({*existing, *GENERATED, *links.PAGES.values()})


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(file: Path) -> None:
    assert broken(file, file.read_text()) == []


def test_a_broken_link_is_seen() -> None:
    text = (
        "[a](plan.md) [b](gone.md) [c](plan.md#gone) `[d](gone.md)` ![e](images/gone.png)\n[f](https://x.y/z)"
    )
    assert broken(DOCS / "page.md", text) == ["gone.md", "plan.md#gone", "images/gone.png"]


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        ("docs/a.md", "[result](../benchmarks/results/x.json)", "result (`benchmarks/results/x.json`)"),
        ("docs/a.md", "[`examples/x.py`](../examples/x.py)", "`examples/x.py`"),
        ("docs/a.md", "[examples/x.py](../examples/x.py)", "`examples/x.py`"),
        ("docs/a.md", "[safe](../SECURITY.md#reporting)", "[safe](security.md#reporting)"),
        ("docs/design/a.md", "[safe](../../SECURITY.md)", "[safe](../security.md)"),
        ("docs/a.md", "[plan](plan.md#ties)", "[plan](plan.md#ties)"),
        ("README.md", "![page](docs/images/plan.png)", "![page](images/plan.png)"),
        ("README.md", "[notes](docs/design)", "[notes](design/README.md)"),
        ("docs/a.md", "`[x](../y)` and [z](#here)", "`[x](../y)` and [z](#here)"),
        ("docs/a.md", "```\n[x](../y)\n```\n", "```\n[x](../y)\n```\n"),
        ("CHANGELOG.md", "[plan](docs/plan.md)", "[plan](plan.md)"),
        ("examples/README.md", "[sft/chat.yaml](sft/chat.yaml)", "`examples/sft/chat.yaml`"),
        (
            "examples/README.md",
            "[the tutorial](../docs/tutorial/index.md)",
            "[the tutorial](tutorial/index.md)",
        ),
        ("README.md", "[examples](examples)", "[examples](examples.md)"),
        ("docs/a.md", "[far](https://x.y/z)", "[far](https://x.y/z)"),
    ],
)
def test_links_become_those_of_the_site(page: str, text: str, wanted: str) -> None:
    assert links.rewrite(text, page, ROOT) == wanted


def test_files_beside_the_documents_are_links_where_the_repository_has_an_address() -> None:
    rewritten = links.rewrite(
        "[r](../examples/x.py)", "docs/a.md", ROOT, "https://host/owner/repo/blob/main/"
    )
    assert rewritten == "[r](https://host/owner/repo/blob/main/examples/x.py)"


@pytest.mark.parametrize(
    ("name", "text", "loads"),
    [
        ("a.html", '<script src="https://cdn.x/y.js"></script>', True),
        ("a.html", "<link rel=stylesheet href=//fonts.x/css>", True),
        ("a.css", "@font-face{src:url(https://fonts.x/a.woff2)}", True),
        ("a.html", '<a href="https://arxiv.org/abs/1"><img src="images/a.svg"></a>', False),
        ("a.html", '<link rel="canonical" href="https://x.y/">', False),
        ("a.css", "a{background:url(data:image/svg+xml;base64,x)}", False),
    ],
)
def test_what_is_loaded_from_other_hosts_is_seen(tmp_path: Path, name: str, text: str, loads: bool) -> None:
    (tmp_path / name).write_text(text)
    assert bool(list(foreign.loaded(tmp_path))) == loads
