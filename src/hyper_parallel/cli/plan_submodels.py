"""``hyper-parallel plan`` for models with encoders of images or sound"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig
    from hyper_parallel.planner.submodels.answer import Answer

_OF_TEXT = ("fit", "fix", "compare", "refine", "evaluate", "lora_rank", "framework", "tokens", "price")
"""Options that a plan of encoders and a language model does not have."""


@dataclass(frozen=True)
class Output:
    """The cluster, the command's options, and where an answer goes."""

    cluster: str
    options: Mapping[str, Any]
    as_json: bool
    width: int
    say: Callable[[str], None]
    write: Callable[[str, Path, str], None]

    def refuse(self, options: Sequence[str], why: str) -> None:
        """Raise UsageError for one of the options that is given."""
        for option in options:
            if self.options.get(option):
                raise click.UsageError(f"--{option.replace('_', '-')} {why}")


def plan_run(file: str, overrides: Sequence[str], output: Output) -> None:
    """Print the best allocation of a run with images or sound, and write its files."""
    from hyper_parallel import config

    output.refuse(
        (*_OF_TEXT, "batch", "images", "recordings"),
        "does not go with a run file; leave it out, or set keys of the file (train.batch=64)",
    )
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.hub.download import Wanted

    _answered(fetched(config.load(file, overrides), Wanted.ASSETS), Path(file).stem, output)


def plan_stated(model: str, output: Output) -> None:
    """As `plan_run`, for a Transformers folder and stated numbers of media in a row."""
    from hyper_parallel.estimate.stated_rows import StatedRows, stated_run
    from hyper_parallel.planner import query

    output.refuse(_OF_TEXT, "does not go with --images and --recordings; leave it out")
    options = output.options
    stated = StatedRows(
        batch=query.whole("--batch", options["batch"]),
        sequence=query.span("--sequence", options["sequence"])[0],
        images=_range("--images", options["images"]),
        recordings=_range("--recordings", options["recordings"]),
        size=options["image_size"],
        seconds=options["seconds"],
    )
    from hyper_parallel.cli.hub_models import fetched_model
    from hyper_parallel.hub.download import Wanted

    path = fetched_model(model, Wanted.ASSETS, "--model") or Path(model).expanduser()
    with tempfile.TemporaryDirectory() as folder:
        output.say("drawing rows")
        run = stated_run(path, stated, Path(folder))
        named = run.model_copy(update={"data": run.data.model_copy(update={"train": "rows.jsonl"})})
        _answered(run, f"{Path(model).name} with {stated}", output, named)


def _range(option: str, text: str | None) -> tuple[int, int]:
    first, _, last = (text or "0").partition("..")
    if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) < int(first):
        raise ConfigError(f"{option} {text}: must be a number, or a range such as 0..32")
    return int(first), int(last or first)


def _answered(run: RunConfig, name: str, output: Output, written: RunConfig | None = None) -> None:
    """Find the allocations, print them, and write `written`, or the run, with the better one."""
    options = output.options
    answer = _answer(run, name, output)
    if output.as_json:
        click.echo(json.dumps(answer.to_json(), indent=2))
    else:
        click.echo(answer.short(min(output.width, 80)), nl=False)
        if options["details"]:
            click.echo("\n" + answer.text(output.width), nl=False)
    if options["out"] is not None:
        from hyper_parallel.planner.submodels.answer import allocated_run_file

        text, notes = allocated_run_file(written or run, answer)
        output.write("--out", options["out"], text)
        for note in [*notes, *(["data.train is a placeholder: name your rows"] if written else [])]:
            click.echo(f"note: {note}", err=True)
        click.echo(f"next:    hyper-parallel train {options['out']}", err=True)
    if options["html"] is not None:
        from hyper_parallel.planner.submodels.page import page

        output.write("--html", options["html"], page(answer))


def _answer(run: RunConfig, name: str, output: Output) -> Answer:
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.estimate.submodel_costs import submodel_work
    from hyper_parallel.planner import query
    from hyper_parallel.planner.submodels.answer import Answer
    from hyper_parallel.planner.submodels.search import allocations
    from hyper_parallel.planner.submodels.sizes import Task

    cluster, given = output.cluster, output.options["devices"]
    machine = Cluster.named(cluster)
    count = query.whole("--devices", given) if given else machine.ranks
    if not count:
        raise ConfigError(f"--cluster {cluster}: how many devices? name {cluster}x16, or add --devices 16")
    if machine.ranks and count > machine.ranks:
        raise ConfigError(f"--devices {count:,}: {cluster} has {machine.ranks:,}; name a larger cluster")
    work = submodel_work(run, machine, count, output.say)
    output.say("searching allocations")
    task = Task(work.costs, machine, count, work.steps, largest=work.largest)
    found = allocations(task)
    return Answer(name, f"{count} devices of {machine.name or cluster}", found, work.length)
