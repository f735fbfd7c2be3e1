"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def run_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """FILE and [OVERRIDES]...: a run file and dotted ``key=value`` pairs. `config.load` says what is wrong with
    either, so that it is said in one place."""
    function = click.argument("overrides", nargs=-1)(function)
    return click.argument("file", type=click.Path(path_type=Path))(function)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
