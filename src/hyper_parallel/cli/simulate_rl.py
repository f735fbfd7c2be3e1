"""``hyper-parallel simulate --rl``"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click


def simulate_rl(
    file: Path, overrides: tuple[str, ...], as_json: bool, progress: Callable[[str], None]
) -> None:
    """Print the simulated loops of a file."""
    from hyper_parallel.config.rl_simulation import load_rl_simulation
    from hyper_parallel.rl.simulator.compare import compare

    found = compare(load_rl_simulation(file, overrides), progress)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.text())
