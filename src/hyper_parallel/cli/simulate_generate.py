"""``hyper-parallel simulate --generate``"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from hyper_parallel.errors import ConfigError


def simulate_generation(
    given: str,
    overrides: tuple[str, ...],
    name: str,
    ranks: int | None,
    as_json: bool,
    progress: Callable[[str], None],
    write: Callable[[str, Path, str], None],
    html: Path | None,
    trace: Path | None,
) -> None:
    """Print the prediction of a run of generation, and write its pages."""
    from hyper_parallel.cli.hub_models import with_config
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.config.generation_run import load_generation

    run = with_config(load_generation(given, overrides))
    cluster = Cluster.named(name)
    world = run.strategy.axes.world
    if ranks is not None and ranks != world:
        raise ConfigError(
            f"--ranks {ranks}: the strategy's axes multiply to {world}; set strategy.axes so that they multiply "
            f"to {ranks}"
        )
    if cluster.ranks is not None and not cluster.shared and cluster.ranks < world:
        raise ConfigError(
            f"--cluster {name}: has {cluster.ranks} devices, and the strategy's axes multiply to {world}; name a "
            "larger "
            "cluster, or make the axes smaller"
        )
    cluster = replace(cluster.for_workers(world), name=cluster.name or name)
    # Only now, because it needs torch.
    from hyper_parallel.estimate.generate_predict import predict_generation

    found = predict_generation(run, cluster, progress=progress)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.text())
    from hyper_parallel.report import page, perfetto

    if trace is not None:
        write("--trace", trace, perfetto(found.timeline))
        click.echo(f"written: {trace} (passes that generate; open it at ui.perfetto.dev)", err=True)
    if html is not None:
        write(
            "--html",
            html,
            page(found.timeline, f"{Path(given).stem}: passes that generate, on {cluster.name}"),
        )
        click.echo(f"written: {html}", err=True)
