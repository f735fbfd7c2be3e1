"""HTML building blocks: templates, cards, tables, embedded data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from hyper_parallel.report.sheets import Sheet


def asset(name: str) -> str:
    """A file of `assets/`."""
    return (files("hyper_parallel.report") / "assets" / name).read_text(encoding="utf-8")


def filled(template: str, slots: Mapping[str, str]) -> str:
    """A template of `assets/` with its {{slots}} filled in."""
    parts = asset(template).split("{{")
    return parts[0] + "".join(
        slots[name] + rest for name, rest in (part.split("}}", 1) for part in parts[1:])
    )


def embedded(data: Any) -> str:
    """JSON for a script element, with `<` escaped, since only that could end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def badge(word: str) -> str:
    """A badge that states the kind of the numbers: `predicted`, `measured`, `estimated`."""
    return f'<b class="badge {word}">{word}</b>'


def card(name: str, body: str) -> str:
    """A figure with its name; `body` is HTML."""
    return f'<div class="card"><h3>{escape(name)}</h3>{body}</div>'


def sheet_table(sheet: Sheet, badge: str) -> str:
    """A table, headed by a badge (HTML)."""

    def attributes(at: int) -> str:
        # A narrow screen leaves out what a narrow terminal does.
        names = ["number"] * (at >= sheet.left) + ["minor"] * (sheet.columns[at] in sheet.drop)
        return f' class="{" ".join(names)}"' if names else ""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{attributes(at)}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))

    body = "".join(
        f"<tr{' class=sum' if cells[0] in ('sum', 'step') else ''}>{row(cells, 'td')}</tr>"
        for cells in sheet.rows
    )
    note = f"<p>{escape(sheet.note)}</p>" if sheet.note else ""
    return (
        f'<section class="table"><h3>{badge} {escape(sheet.title)}</h3><div class="scroll"><table>'
        f"<thead><tr>{row(sheet.columns, 'th')}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>"
    )
