"""``hyper-parallel plan`` for models with encoders of images or sound"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig
    from hyper_parallel.planner.answer import Answer

_OF_TEXT = ("fit", "fix", "compare", "simulate", "evaluate", "lora_rank", "framework", "tokens", "price")
"""Options that a plan of encoders and a language model does not have."""


def answer_of_run(
    file: str, overrides: Sequence[str], cluster: str, options: Mapping[str, Any], say: Callable[[str], None]
) -> Answer:
    """The best allocation of a run with images or sound."""
    from hyper_parallel import config

    _refuse(
        options,
        (*_OF_TEXT, "batch", "images", "recordings"),
        "does not go with a run file; leave it out, or set keys of the file (train.batch=64)",
    )
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.hub.download import Wanted

    run = fetched(config.load(file, overrides), Wanted.ASSETS)
    return _answer(run, Path(file).stem, cluster, options, say)


def answer_of_stated(
    model: str, cluster: str, options: Mapping[str, Any], say: Callable[[str], None]
) -> Answer:
    """As `answer_of_run`, for a Transformers folder and stated numbers of media in a row."""
    from hyper_parallel.estimate.stated_rows import StatedRows, stated_run
    from hyper_parallel.planner import query

    _refuse(options, _OF_TEXT, "does not go with --images and --recordings; leave it out")
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
        say("drawing rows")
        run = stated_run(path, stated, Path(folder))
        named = run.model_copy(update={"data": run.data.model_copy(update={"train": "rows.jsonl"})})
        return _answer(run, f"{Path(model).name} with {stated}", cluster, options, say, named)


def _refuse(options: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raise UsageError for one of the options that is given."""
    for name in names:
        if options.get(name):
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _range(option: str, text: str | None) -> tuple[int, int]:
    first, _, last = (text or "0").partition("..")
    if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) < int(first):
        raise ConfigError(f"{option} {text}: must be a number, or a range such as 0..32")
    return int(first), int(last or first)


def _answer(
    run: RunConfig,
    name: str,
    cluster: str,
    options: Mapping[str, Any],
    say: Callable[[str], None],
    written: RunConfig | None = None,
) -> Answer:
    """Find the allocations; the file is `written`, or the run, with the better one."""
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.cluster.presets import with_devices
    from hyper_parallel.estimate.submodel_costs import submodel_work
    from hyper_parallel.planner import query
    from hyper_parallel.planner.answer import OutputFile
    from hyper_parallel.planner.submodels.answer import allocated_run_file, answer_of
    from hyper_parallel.planner.submodels.search import allocations
    from hyper_parallel.planner.submodels.sizes import Task

    machine = Cluster.named(cluster)
    count = query.whole("--devices", options["devices"]) if options["devices"] else machine.ranks
    if not count:
        raise ConfigError(
            f"--cluster {cluster}: how many devices? {with_devices(cluster, 16)}, or add --devices 16"
        )
    if machine.ranks and count > machine.ranks:
        raise ConfigError(f"--devices {count:,}: {cluster} has {machine.ranks:,}; name a larger cluster")
    work = submodel_work(run, machine, count, say)
    say("searching allocations")
    found = allocations(Task(work.costs, machine, count, work.steps, largest=work.largest))
    where = f"{count} devices of {machine.name or cluster}"

    def file() -> OutputFile:
        text, notes = allocated_run_file(written or run, found, where)
        placeholder = ["data.train is a placeholder: name your rows"] if written else []
        return OutputFile(text, [*notes, *placeholder], "train")

    return answer_of(found, name, where, work.length, file)
