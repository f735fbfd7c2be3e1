"""Links of the documentation site: from Markdown files in the repository to pages of the site.

The pages in docs/ link to files beside docs/ (benchmarks, examples, SECURITY.md), which a repository's browser shows
and the site does not have. A link to a file that is a page of the site leads to that page. Any other becomes a link
below `source`, the address of the repository's files where it is configured, and else the file's path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Documents beside docs/, and the pages that the site makes of them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
"""A Markdown link or image on one line: mark of an image, text, target."""
_CODE = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)[ \t]*$"
    r"|(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)",
    re.M | re.S,
)


def is_remote(target: str) -> bool:
    """Whether a target is an address with a scheme, not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*:", target) is not None


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies `change` to what is prose in a Markdown text; fenced code and code spans stay as they are.

    A code span that is the text of a link is part of the prose.
    """
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"\x00{len(hidden) - 1}\x00"

    shown = change(_CODE.sub(hide, text))
    while "\x00" in shown:
        shown = re.sub("\x00(\\d+)\x00", lambda found: hidden[int(found[1])], shown)
    return shown


def rewrite(text: str, page: str, root: Path, source: str = "") -> str:
    """A document's text with links as the site needs them.

    Args:
        text: Markdown.
        page: The document's path in the repository, such as `docs/plan.md` or `README.md`.
        root: The repository's folder.
        source: Address below which the repository's files are shown; empty where there is none.
    """
    place = PAGES.get(page) or posixpath.relpath(page, "docs")

    def one(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if is_remote(target) or not path:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if (root / file / "README.md").is_file():
            file += "/README.md"
        if file in PAGES:
            new = PAGES[file]
        elif file.startswith("docs/"):
            new = file.removeprefix("docs/")
        elif source:
            return f"{image}[{label}]({source.rstrip('/')}/{file})"
        else:
            return _as_path(label, file)
        new = posixpath.relpath(new, posixpath.dirname(place) or ".")
        return f"{image}[{label}]({new}{'#' + anchor if anchor else ''})"

    return outside_code(text, lambda prose: LINK.sub(one, prose))


def _as_path(label: str, file: str) -> str:
    """The text of a link followed by the path, or the path alone where the text is that path or its end."""
    code = f"`{file}`"
    return code if "\x00" in label or f"/{file}".endswith(f"/{label.strip('`')}") else f"{label} ({code})"
