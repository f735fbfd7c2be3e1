"""Arguments shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def run_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """FILE and [OVERRIDES]...: a run file and dotted ``key=value`` pairs. Only `config.load` validates them."""
    function = click.argument("overrides", nargs=-1)(function)
    return click.argument("file", type=click.Path(path_type=Path))(function)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
