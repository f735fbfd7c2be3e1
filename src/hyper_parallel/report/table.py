"""Figures and tables as text for the terminal, within its width.

A table that is wider than the terminal loses width in this order: columns of text wrap (at spaces, and behind the dots,
slashes and underscores of names), then the columns that its Sheet names in `drop` are left out, which a line below it
says, then what is left is folded. Columns of numbers stay whole.
"""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from collections.abc import Sequence

from hyper_parallel.report.sheets import Fact, Sheet, facts, heading, sheets
from hyper_parallel.trace import Timeline

WIDTH = 120
"""Default width of the text in columns."""
NARROWEST, WIDEST = 60, 160
"""Limits of `terminal_width`."""
WRAPPED = 14
"""Columns that a column of text keeps, where it has as much text."""
BORDER = 3
"""Columns that a table's border and padding take, for each of its columns."""
_BREAKS = re.compile(r"[^\s./_]*[\s./_]+|[^\s./_]+")
"""Parts of a text between which a line may end: behind spaces, dots, slashes and underscores."""


def terminal_width(default: int = WIDTH) -> int:
    """Columns of the terminal, or of the variable COLUMNS; `default` where the output is no terminal."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((default, 24)).columns))


def wrapped(text: str, width: int = WIDTH, indent: str = "  ", first: str = "") -> str:
    """A sentence in lines of at most `width` columns, broken at spaces.

    The first line begins with `first`, the others with `indent`.
    """
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def answer(verdict: str, lines: Sequence[tuple[str, str]], width: int = WIDTH) -> str:
    """A sentence, then a line for each name and text; texts wrap beside their names. At most `width` columns wide."""
    beside = max((len(name) for name, _ in lines), default=0) + 2
    shown = [wrapped(verdict, width)]
    for name, text in lines:
        shown.append(wrapped(text, width, " " * beside, first=name.ljust(beside)))
    return "\n".join(shown) + "\n"


def table(timeline: Timeline, width: int = WIDTH) -> str:
    """Plain text, at most `width` columns wide. Its first word is `predicted` or `measured`."""
    return render(heading(timeline), facts(timeline), sheets(timeline), timeline.word, width)


def render(
    first: str, figures: Sequence[Fact], tables: Sequence[Sheet], word: str, width: int = WIDTH
) -> str:
    """Plain text, at most `width` columns wide: a line, then figures, then tables, each headed by `word`.

    `word` states the kind of the numbers: predicted, measured or estimated. An empty `first` is left out.
    """
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width)
    if first:
        console.print(first, markup=False, highlight=False)
    if figures:
        if first:
            console.print()
        grid = Table(box=None, show_header=False, pad_edge=False)
        for _ in range(3):
            grid.add_column(overflow="fold")
        grid.columns[1].justify = "right"
        for fact in figures:
            grid.add_row(*_plain((fact.name, fact.value, fact.meaning)))
        console.print(grid)
    for sheet in tables:
        console.print()
        console.print(f"{word}: {sheet.title}", markup=False, highlight=False)
        console.print(sheet_text(sheet, width), markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def sheet_text(sheet: Sheet, width: int = WIDTH) -> str:
    """One table without its title, at most `width` columns wide, with its note and what was left out."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width)
    shown, left_out = fitting(sheet, width)
    console.print(_grid(shown, width))
    if sheet.note:
        console.print(sheet.note, markup=False, highlight=False)
    if left_out:
        console.print(f"left out at this width: {', '.join(left_out)}", markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def natural_width(sheet: Sheet) -> int:
    """Columns that the table takes where nothing wraps."""
    return _whole(_most_widths(sheet))


def fitting(sheet: Sheet, width: int) -> tuple[Sheet, list[str]]:
    """The sheet without those columns of `drop` that do not fit into `width`; and the names of what is left out."""
    left_out: list[str] = []
    for name in sheet.drop:
        if _whole(_least_widths(sheet)) <= width:
            break
        if name not in sheet.columns:
            continue
        left_out.append(name)
        sheet = sheet.without(name)
    return sheet, left_out


def _grid(sheet: Sheet, width: int):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(pad_edge=False)
    widths = _widths(sheet, width)
    for at, (column, wide) in enumerate(zip(sheet.columns, widths, strict=True)):
        table.add_column(column, justify="left" if at < sheet.left else "right", overflow="fold", width=wide)
    for row in sheet.rows:
        if row[0] in ("sum", "step"):
            table.add_section()
        table.add_row(*_plain(tuple(map(_in_lines, row, widths))))
    return table


def _in_lines(text: str, width: int | None) -> str:
    """The text in lines of at most `width` columns, where it has places to break."""
    if width is None or _length(text) <= width:
        return text
    lines = [""]
    for word in _BREAKS.findall(text):
        if lines[-1] and _length((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip() for line in lines)


def _widths(sheet: Sheet, width: int) -> list[int] | list[None]:
    """Columns of each column: what it needs, and of what is left a share of what it would take."""
    least, most = _least_widths(sheet), _most_widths(sheet)
    spare = width - _whole(least)
    if spare < 0:
        return [None] * len(least)  # rich folds everything
    wants = [high - low for low, high in zip(least, most, strict=True)]
    if sum(wants) <= spare:
        return most
    # Text first: a number's column wants more only for its name, which wraps as well.
    text = sum(wants[: sheet.left])
    given = [min(want, spare * want // max(text, 1)) for want in wants[: sheet.left]]
    spare -= sum(given)
    heads = sum(wants[sheet.left :])
    given += [min(want, spare * want // max(heads, 1)) for want in wants[sheet.left :]]
    return [low + more for low, more in zip(least, given, strict=True)]


def _whole(widths: Sequence[int]) -> int:
    return sum(widths) + BORDER * len(widths)


def _columns(sheet: Sheet) -> list[list[str]]:
    """The cells of each column, its name first."""
    return [list(cells) for cells in zip(sheet.columns, *sheet.rows, strict=True)]


def _most_widths(sheet: Sheet) -> list[int]:
    return [max(map(_length, cells)) for cells in _columns(sheet)]


def _least_widths(sheet: Sheet) -> list[int]:
    """Numbers stay whole; names wrap at spaces."""
    found = []
    for at, cells in enumerate(_columns(sheet)):
        whole = max(map(_length, cells))
        if at < sheet.left:
            words = max(_length(word.rstrip()) for cell in cells for word in _BREAKS.findall(cell) or [""])
            found.append(min(whole, max(words, WRAPPED)))
        else:
            # A name of several words wraps over numbers.
            head = max(map(_length, cells[0].split() or [""]))
            found.append(max(head, *map(_length, cells[1:]), 0))
    return found


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _plain(cells: tuple[str, ...]) -> list[str]:
    """Cells with rich's markup escaped."""
    return [cell.replace("[", r"\[") for cell in cells]
