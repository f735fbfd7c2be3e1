"""Write the page ``docs/equivalence.md``: small models of every family under every strategy of the matrix.

    python tools/equivalence.py [--families llama,gemma3] [--out FILE]

Without --families all of it is written to docs/equivalence.md. Cells are printed as they are done, the page at the end.
Exits with 1 when a cell is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the matrix is shared with the tests

from harness.equivalence import STRATEGIES, Cell, markdown, run_matrix
from harness.families import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "equivalence.md"


def print_cell(cell: Cell) -> None:
    worst = f"{cell.error:.1e}" if cell.status == "right" else cell.detail
    print(f"{cell.status:8} {cell.family:14} {cell.strategy}: {worst}", file=sys.stderr)


def main() -> int:
    """0 when no cell is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", help="only these families, separated by commas")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    options = parser.parse_args()
    out = options.out or (None if options.families else PAGE)
    names = options.families.split(",") if options.families else list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--families: there is no {unknown[0]!r}; they are {', '.join(FAMILIES)}")
    cells = run_matrix({name: FAMILIES[name] for name in names}, STRATEGIES, print_cell)
    command = "python tools/equivalence.py" + (f" --families {options.families}" if options.families else "")
    page = markdown(cells, command)
    if out is not None:
        out.write_text(page)
    print(page)
    return 1 if any(cell.status == "wrong" for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
