"""``hyper-parallel simulate``: a training step, with --generate generation, with --rl a loop of roles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyper_parallel.cli.arguments import as_json, check_folder, progress_lines, trace_cache, write
from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig
    from hyper_parallel.estimate.advice import Advice
    from hyper_parallel.estimate.generate_report import GenerationPrediction
    from hyper_parallel.estimate.prediction import Prediction
    from hyper_parallel.report.pipeline import PipelineFigures
    from hyper_parallel.trace import Timeline


@click.command(short_help="Predict a step on any cluster: time, communication, memory.")
@click.argument("given", metavar="FILE", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option(
    "--cluster",
    metavar="NAME",
    help="A preset such as h100, h100x64 or cloudmatrix384, or the path of a cluster file. Required without --rl.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Predict generation instead of training. FILE: a published model, a Transformers folder, or a YAML file with "
    "model, strategy, inference and workload.",
)
@click.option(
    "--rl",
    is_flag=True,
    help="Simulate a reinforcement-learning loop from the times of its roles. FILE: a YAML file with a section "
    "simulation, such as examples/rl/simulate-verl.yaml.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="How many devices; must be what the strategy's axes multiply to, which is what leaving it out means. For "
    "axes that are 'auto': how many to plan for.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a trace for ui.perfetto.dev."
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page that works offline."
)
@click.option(
    "--as-written",
    is_flag=True,
    help="Keep the order of the model's code, where each collective is waited for; training orders them beside "
    "computation.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="With a memory budget: what moves, when and why, and how far the plan is from the best possible.",
)
@click.option(
    "--advise",
    is_flag=True,
    help="Simulate changes of FILE one by one too, and name the one that helps most, as overrides with their gain.",
)
@as_json
def simulate(
    given: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    generate: bool,
    rl: bool,
    ranks: int | None,
    trace: Path | None,
    html: Path | None,
    as_written: bool,
    explain: bool,
    advise: bool,
    as_json: bool,
) -> None:
    """Predict the time and memory of FILE's step on a cluster that you need not have.

    The command captures one rank's whole step as a graph on fake tensors, prices each operator on the cluster's
    device and each collective on its links, and simulates the step with its collectives in the order in which
    training runs them. A table shows the time, the memory and whether the step fits. What was captured is kept in
    `data.cache`, so that the next prediction of the same step is quicker (train.graph_cache=false captures anew). Every
    number is predicted; the output names the source of the cluster's constants. Axes that are 'auto' are planned for
    the cluster first.

    \b
    Examples:
      hyper-parallel simulate examples/simulate/llama-8b.yaml --cluster h100x64
      hyper-parallel simulate run.yaml --cluster cloudmatrix384 strategy.axes.tensor=8 --html step.html
      hyper-parallel simulate run.yaml --cluster h100x64 --advise           what to change in the file
      hyper-parallel calibrate && hyper-parallel simulate run.yaml --cluster cluster.yaml     this machine
      hyper-parallel simulate llama-3-8b --generate --cluster h100x1 inference.batch=32 workload.prompt_tokens=4096
      hyper-parallel simulate --rl examples/rl/simulate-verl.yaml

    \b
    Exit codes:
      0    predicted, whether or not it fits the memory
      2    an error in the file or the arguments, reported in one line
      130  interrupted
    """
    file, progress = Path(given), progress_lines()
    if rl:
        if cluster or generate or ranks or trace or html or as_written or explain or advise:
            raise click.UsageError("--rl takes the times of its roles from FILE; only --json goes with it")
        from hyper_parallel.config.rl_simulation import load_rl_simulation
        from hyper_parallel.rl.simulator.run import compare

        loops = compare(load_rl_simulation(file, overrides), progress)
        click.echo(json.dumps(loops.to_json(), indent=2) if as_json else loops.text())
        return
    if cluster is None:
        raise click.UsageError("Missing option '--cluster'.")
    from hyper_parallel import config

    if generate and (as_written or explain or advise):
        raise click.UsageError(
            "--as-written, --explain and --advise are of training; leave --generate out, or them"
        )
    if advise and as_written:
        raise click.UsageError(
            "--advise is for the order in which training runs; leave --as-written out, or it"
        )
    run = None if generate else config.load(file, overrides)
    check_folder("--trace", trace)
    check_folder("--html", html)
    if run is None:
        generation = _generation(given, overrides, cluster, ranks, progress)
        title = f"{file.stem}: passes that generate, on {generation.cluster.name}"
        _show(generation, None, as_json)
        _write_pages(generation.timeline, title, "passes that generate; ", None, trace, html)
        return
    may_advise = not run.open and run.effective_strategy.memory.device is None
    if advise and not may_advise:
        raise click.UsageError(
            "--advise changes a file whose axes are given and that has no memory budget; set strategy.axes and leave "
            "strategy.memory.device out, or leave --advise out"
        )
    found = _training(run, cluster, ranks, as_written, explain, progress)
    advice = _advice(found, run, file, overrides, cluster, progress) if advise else None
    _show(found, advice, as_json)
    if may_advise and not (advise or as_written or as_json):
        click.echo("next: --advise (simulates changes of the file, and names the one that helps most)")
    _write_pages(found.timeline, f"{file.stem} on {found.timeline.cluster}", "", found.pipeline, trace, html)


def _show(found: Prediction | GenerationPrediction, advice: Advice | None, as_json: bool) -> None:
    # Only now, because it needs torch.
    from hyper_parallel.report.table import terminal_width, wrapped

    if as_json:
        advised = {} if advice is None else {"advice": advice.to_json()}
        click.echo(json.dumps({**found.to_json(), **advised}, indent=2))
        return
    click.echo(found.text(terminal_width()))
    if advice is not None:
        click.echo(wrapped(advice.text(), terminal_width()))


def _write_pages(
    timeline: Timeline,
    title: str,
    traced: str,
    pipeline: PipelineFigures | None,
    trace: Path | None,
    html: Path | None,
) -> None:
    # Only now, because these need torch.
    from hyper_parallel.report import page, perfetto

    if trace is not None:
        write("--trace", trace, perfetto(timeline), f" ({traced}open it at ui.perfetto.dev)")
    if html is not None:
        write("--html", html, page(timeline, title, pipeline))


def _advice(
    found: Prediction,
    run: RunConfig,
    file: Path,
    overrides: tuple[str, ...],
    name: str,
    progress: Callable[[str], None],
) -> Advice:
    """The change of a file that helps most, as overrides that follow those that are given."""
    from hyper_parallel import config
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.estimate import cluster_of
    from hyper_parallel.estimate.advice import advise
    from hyper_parallel.hub.download import Wanted

    run = fetched(run, Wanted.CONFIG)
    return advise(
        found,
        run,
        lambda change: fetched(config.load(file, (*overrides, *change)), Wanted.CONFIG),
        cluster_of(name, run),
        cache=trace_cache(run),
        say=progress,
    )


def _generation(
    given: str, overrides: tuple[str, ...], name: str, ranks: int | None, progress: Callable[[str], None]
) -> GenerationPrediction:
    from hyper_parallel.cli.hub_models import with_config
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.config.generate import load_generation

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
            "larger cluster, or make the axes smaller"
        )
    cluster = replace(cluster.for_workers(world), name=cluster.name or name)
    # Only now, because it needs torch.
    from hyper_parallel.estimate.generate_predict import predict_generation

    return predict_generation(run, cluster, progress=progress)


def _training(
    run: RunConfig,
    name: str,
    ranks: int | None,
    as_written: bool,
    explain: bool,
    progress: Callable[[str], None],
) -> Prediction:
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.hub.download import Wanted

    run = fetched(run, Wanted.CONFIG)
    # Only now, because it needs torch.
    from hyper_parallel.estimate import cluster_of, predict_run

    if run.open:
        run = _planned(run, name, ranks, progress)
    machine = cluster_of(name, run, ranks)
    return predict_run(
        run, machine, as_written=as_written, explain=explain, cache=trace_cache(run), progress=progress
    )


def _planned(run: RunConfig, name: str, ranks: int | None, progress: Callable[[str], None]) -> RunConfig:
    """The run with the strategy that the planner chooses for a cluster; prints the choice."""
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.planner.auto import choose, resolved
    from hyper_parallel.planner.auto.machine import named

    world = ranks or Cluster.named(name).ranks or run.launch.workers
    if world is None:
        raise ConfigError(
            f"--cluster {name}: the strategy's axes are open, and nothing says for how many devices; add --ranks N, or "
            "name a cluster with its number of devices as in h100x64 (devices: 64 in a file)"
        )
    choice = choose(run, named(name, world, "--cluster"), world, progress)
    for line in choice.lines:
        click.echo(f"strategy: {line}", err=True)
    return resolved(run, choice.laid)
