"""A Timeline as text for the terminal: the figures that come first, then where the time and the memory go."""

from __future__ import annotations

import io

from hyper_parallel.program import Timeline
from hyper_parallel.report.sheets import Sheet, facts, heading, sheets

WIDTH = 120
"""Columns of the text, unless told otherwise."""


def table(timeline: Timeline, width: int = WIDTH) -> str:
    """Plain text, at most `width` columns wide. Its first word is `predicted` or `measured`."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(heading(timeline), markup=False, highlight=False)
    console.print()
    figures = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        figures.add_column(overflow="fold")
    figures.columns[1].justify = "right"
    for fact in facts(timeline):
        figures.add_row(*_plain((fact.name, fact.value, fact.meaning)))
    console.print(figures)
    for sheet in sheets(timeline):
        console.print()
        console.print(f"{timeline.word}: {sheet.title}", markup=False, highlight=False)
        console.print(_grid(sheet))
        if sheet.note:
            console.print(sheet.note, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _grid(sheet: Sheet):  # type: ignore[no-untyped-def]
    from rich.table import Table

    made = Table(pad_edge=False)
    for at, column in enumerate(sheet.columns):
        made.add_column(column, justify="left" if at < sheet.left else "right", overflow="fold")
    for row in sheet.rows:
        if row[0] in ("sum", "step"):
            made.add_section()
        made.add_row(*_plain(row))
    return made


def _plain(cells: tuple[str, ...]) -> list[str]:
    """Cells in which brackets are brackets."""
    return [cell.replace("[", r"\[") for cell in cells]
