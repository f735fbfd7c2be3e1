"""Resources that a built site would load from other hosts: scripts, styles, images, fonts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|(?:url\(|@import\s+)[\"']?(?:https?:)?//[^\"')\s]+"
)
"""Elements and rules that a browser loads without a click. Links are not among them."""


def loaded(site: Path) -> Iterator[str]:
    """One line for each HTML or CSS file of a built site that loads something from another host."""
    for file in sorted(site.rglob("*")):
        if file.suffix in (".html", ".css"):
            found = _LOADED.search(file.read_text(encoding="utf-8"))
            if found:
                yield f"{file.relative_to(site)} loads from another host: {found[0][:120]}"
