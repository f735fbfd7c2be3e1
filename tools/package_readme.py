"""Print the README as a package index shows it: no link or image of it is relative.

    python tools/package_readme.py > README-of-the-package.md

An index has no copy of the repository. Links become addresses below `extra.source` of mkdocs.yml, the one place that
names where the repository's files are shown. Where that is empty, a link becomes its text, and an image is left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docs_site.links import LINK, is_remote, outside_code

ROOT = Path(__file__).resolve().parents[1]
_SOURCE = re.compile(r"""^  source: *["']?([^"'#\s]*)["']? *(?:#.*)?$""", re.M)


def source_of(mkdocs: str) -> str:
    """The address of the repository's files, from the text of mkdocs.yml; empty where there is none.

    Read without YAML, which the environment that builds a wheel need not have.
    """
    found = _SOURCE.findall(mkdocs)
    if len(found) != 1:
        raise ValueError(f"mkdocs.yml has {len(found)} lines 'source:' below 'extra:'; it needs one")
    return found[0].rstrip("/")


def absolute(text: str, source: str) -> str:
    """The README with absolute links.

    Args:
        text: Markdown, whose relative links start at the repository's root.
        source: Such as `https://HOST/OWNER/REPOSITORY/blob/main`. Images are taken from `raw` in place of `blob`.
    """

    def one(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if is_remote(target):
            return found[0]
        if not source:
            return "" if image else label
        if image:
            return f"![{label}]({source.replace('/blob/', '/raw/')}/{target})"
        return f"[{label}]({source}/{'README.md' if target.startswith('#') else ''}{target})"

    return outside_code(text, lambda prose: LINK.sub(one, prose))


def main() -> int:
    source = source_of((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sys.stdout.write(absolute((ROOT / "README.md").read_text(encoding="utf-8"), source))
    return 0


if __name__ == "__main__":
    sys.exit(main())
