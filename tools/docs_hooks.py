"""Hooks of mkdocs: generated pages, links to files beside docs/, and no resource of another host.

`mkdocs build --strict` fails on every warning; the functions here add theirs to those of mkdocs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from docs_site import commands_page, foreign, links, python_page, run_file_page
from docs_site.example_values import Examples
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as repository browsers form them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages made from the root's documents, the schemas, the commands and the public names."""
    for name, page in links.PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    found = Examples.of(ROOT)
    generated = {
        "reference/run-file.md": run_file_page.page("run", found),
        "reference/rl-file.md": run_file_page.page("rl", found),
        "reference/generation-file.md": run_file_page.page("generation", found),
        "reference/commands.md": commands_page.page(),
        "reference/python.md": python_page.page(ROOT),
    }
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has its pages."""
    names = {page: name for name, page in links.PAGES.items()}
    place = page.file.src_uri
    return links.rewrite(markdown, names.get(place, f"docs/{place}"), ROOT, config.extra.get("source") or "")


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Warns of each address that a built page would load from another host."""
    for where in foreign.loaded(Path(config.site_dir)):
        log.warning(where)
