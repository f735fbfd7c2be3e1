"""``hyper-parallel plan``"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.cli.arguments import as_json, check_folder, progress_lines, write
from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.planner.answer import Answer
    from hyper_parallel.workload.shape import Shape

SHORT = 80
"""Columns of the lines that an answer begins with, also where the terminal is wider."""
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Find the best strategy for a model on a cluster, with reasons.")
@click.argument("overrides", nargs=-1)
@click.option(
    "--generate",
    is_flag=True,
    help="Plan generation instead of training. OVERRIDES set keys of strategy, inference and workload.",
)
@click.option("--most", is_flag=True, help="With --generate: the most requests at once that stay fast.")
@click.option("--slow-ok", is_flag=True, help="With --generate: plan also what physics makes slow.")
@click.option(
    "--model", metavar="NAME", help="A published model such as llama-3-405b, or a Transformers config."
)
@click.option("--cluster", metavar="NAME", help="A preset such as h100x2048, or the path of a cluster file.")
@click.option(
    "--images", metavar="N", help="Images of a row of a model that takes them: 4, or 0..32 drawn evenly."
)
@click.option(
    "--image-size", type=click.IntRange(min=1), default=384, show_default=True, help="Pixels of a side."
)
@click.option("--recordings", metavar="N", help="Recordings of a row, as --images.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Length of a recording.")
@click.option("--batch", metavar="N", help="Sequences per step, over all devices.")
@click.option(
    "--sequence",
    metavar="N",
    default="8k",
    show_default=True,
    help="Tokens per sequence; 8k..1M: a row for each doubling, and the longest that fits.",
)
@click.option("--precision", default="bf16", show_default=True, help="fp32, bf16, fp16, fp8, mxfp8 or nvfp4.")
@click.option(
    "--optimizer", default="adamw", show_default=True, help="adamw, adamw_8bit, lion, adafactor or muon."
)
@click.option("--lora-rank", metavar="N", help="Train adapters of this rank; the model stays frozen.")
@click.option(
    "--lora-targets",
    metavar="NAMES",
    default="all-linear",
    show_default=True,
    help="Linear layers with adapters: all-linear, attention, qkv, mlp, or names such as q_proj,v_proj.",
)
@click.option(
    "--frozen",
    default="bf16",
    show_default=True,
    help="How frozen weights are kept: bf16, fp32, int8 or nf4.",
)
@click.option(
    "--prediction-modules",
    metavar="N",
    default="0",
    show_default=True,
    help="Modules that each predict one token more, trained behind the last layer.",
)
@click.option("--devices", metavar="N", help="Number of devices; 64..4096 shows how the step scales.")
@click.option("--fit", is_flag=True, help="Find the fewest devices on which the model fits.")
@click.option(
    "--fix", multiple=True, metavar="NAME=VALUE", help="Fix a part of the strategy: tensor_x=8; repeatable."
)
@click.option(
    "--runnable", is_flag=True, help="With --framework: search only what train can run; else always so."
)
@click.option(
    "--quickest", is_flag=True, help="Show the quickest estimate first, also where a simpler strategy ties."
)
@click.option("--objective", default="time", show_default=True, help="time, memory or cost.")
@click.option("--price", type=float, default=0.0, help="Price of a device hour.")
@click.option(
    "--tokens",
    metavar="N",
    help="Tokens of the whole run, such as 15T: shows its days, and with --price its cost.",
)
@click.option(
    "--framework",
    metavar="NAME",
    help="How long another framework would take, such as megatron-lm; default: what train runs.",
)
@click.option("--compare", type=_FILE, help="A run file or strategy to estimate and compare with the best.")
@click.option(
    "--simulate",
    "--refine",
    "simulate",
    metavar="N",
    type=click.IntRange(min=0),
    help="Simulate N strategies at most; 0: only estimate, in a second. Default: 3; with --framework: 0.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many strategies to show."
)
@click.option(
    "--details",
    is_flag=True,
    help="Show also the other strategies, where the step and the memory go, and what one change costs.",
)
@click.option("--out", type=_FILE, help="Write the best strategy as a run file for train.")
@click.option("--html", type=_FILE, help="Write a page that works offline.")
@click.option(
    "--evaluate", type=_FILE, metavar="CSV", help="Estimate the runs of a CSV; needs no other option."
)
@as_json
def plan(
    model: str | None,
    cluster: str | None,
    evaluate: Path | None,
    as_json: bool,
    generate: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Find the best strategy for a model on a cluster, and explain the choice.

    The search covers axes and their order, pipeline schedules, micro-batches, recomputation and offload, with closed
    forms whose costs are read off the model's captured step. The best is simulated: its time and memory are those that
    simulate gives for the file that --out writes. With --framework the question is how long that framework would take,
    by constants that were fitted on published runs. Each time has an interval that holds 90% of published runs.

    \b
    Examples:
      hyper-parallel plan --model llama-3-405b --cluster h100x2048 --batch 2048 --sequence 8192
      hyper-parallel plan --model llama-3-8b --cluster h100x64 --batch 512 --out run.yaml
      hyper-parallel plan --model ./config.json --cluster cluster.yaml --batch 64 --devices 4 --compare mine.yaml
      hyper-parallel plan --model deepseek-v3 --cluster h800 --batch 4096 --fit
      hyper-parallel plan --model llama-3-70b --cluster h100 --batch 1024 --devices 64..4096 --price 2.5 --tokens 15T
      hyper-parallel plan --model llama-3-8b --cluster h100x64 --batch 256 --sequence 8k..1M
      hyper-parallel plan --model llama-3-70b --cluster h100x8 --batch 64 --lora-rank 16 --lora-targets attention
      hyper-parallel plan --evaluate runs.csv --json
      hyper-parallel plan images.yaml --cluster h100x16 --out run.yaml     a run with images
      hyper-parallel plan --generate --model llama-3-8b --cluster h100x1 --batch 32 workload.prompt_tokens=32768

    \b
    Exit codes:
      0    answered
      2    an invalid option, or a model that does not fit, reported in one line 130  interrupted
    """
    a_run = bool(overrides) and "=" not in overrides[0]
    if not generate and (a_run or options["images"] or options["recordings"]):
        show(_with_encoders(model, cluster, overrides, options), options, as_json)
        return
    if not generate and (overrides or options["most"] or options["slow_ok"]):
        raise click.UsageError(
            "OVERRIDES, --most and --slow-ok belong to --generate, or OVERRIDES to a run file"
        )
    if evaluate is not None and not generate:
        _evaluate(evaluate, as_json)
        return
    needed = [
        ("--model", model),
        ("--cluster", cluster),
        *([] if generate else [("--batch", options["batch"])]),
    ]
    for name, given in needed:
        if given is None:
            raise click.UsageError(f"give {name}" if generate else f"give {name}, or --evaluate CSV")
    assert model is not None
    assert cluster is not None
    _check_folders(options)
    if generate:
        from hyper_parallel.cli.plan_generate import generation_answer

        shape, section = _model(model)
        options["evaluate"] = evaluate
        plan = generation_answer(shape, section or model, cluster, overrides, options, progress_lines())
        show(plan, options, as_json)
        return
    from hyper_parallel.cli.plan_training import training_answer

    show(training_answer(partial(_model, model), cluster, options, progress_lines()), options, as_json)


def show(answer: Answer, options: Mapping[str, Any], as_json: bool) -> None:
    """Print an answer, and write its file and its page where they are asked for."""
    from hyper_parallel.report.table import terminal_width

    if as_json:
        click.echo(json.dumps(answer.to_json(), indent=2))
    else:
        width = terminal_width()
        texts = [answer.text(width)] if options["details"] else []
        if not texts or answer.brief is None:
            texts.insert(0, answer.short(min(width, SHORT)))
        click.echo("\n\n".join(texts))
    if options["out"] is not None and answer.file is not None:
        file = answer.file()
        write("--out", options["out"], file.text)
        for note in file.notes:
            click.echo(f"note: {note}", err=True)
        click.echo(f"next:    hyper-parallel {file.command} {options['out']}{file.options}", err=True)
    if options["html"] is not None and answer.drawn is not None:
        write("--html", options["html"], answer.page())


def _with_encoders(
    model: str | None, cluster: str | None, overrides: tuple[str, ...], options: dict[str, Any]
) -> Answer:
    """Plan a run file with images or sound, or a model with stated numbers of them."""
    from hyper_parallel.cli.plan_submodels import answer_of_run, answer_of_stated

    if cluster is None:
        raise click.UsageError("give --cluster")
    _check_folders(options)
    if overrides and model is not None:
        raise click.UsageError("give a run file or --model, not both; a run file names its model")
    if overrides:
        return answer_of_run(overrides[0], overrides[1:], cluster, options, progress_lines())
    if model is None or options["batch"] is None:
        raise click.UsageError("give --model and --batch with --images and --recordings, or a run file alone")
    return answer_of_stated(model, cluster, options, progress_lines())


def _check_folders(options: dict[str, Any]) -> None:
    """Raise ConfigError where a file is to be written into a folder that does not exist."""
    for option in ("out", "html"):
        check_folder(f"--{option}", options[option])


def _model(given: str) -> tuple[Shape, dict[str, Any] | None]:
    """The shape of a published model or a Transformers config; for a config also the run file's `model` section."""
    from hyper_parallel.cli.hub_models import fetched_model
    from hyper_parallel.config.model import implausible, read_fields
    from hyper_parallel.hub.download import Wanted
    from hyper_parallel.hub.hub_id import reading
    from hyper_parallel.workload.published import shape
    from hyper_parallel.workload.shape import Shape

    path = Path(given).expanduser()
    fetched = fetched_model(given, Wanted.CONFIG, "--model")
    if fetched is None and not path.exists() and path.suffix != ".json" and "/" not in given:
        return shape(given), None
    path = fetched or path
    file = path / "config.json" if path.is_dir() else path
    hint = f"give a Transformers config or its folder{reading(given)}"
    fields = read_fields(file, f"--model {given}", hint)
    if problem := implausible(fields):
        raise ConfigError(f"--model {given}: {file}: {problem}")
    if isinstance(fields.get("text_config"), dict):
        click.echo(
            f"note: {given} has more than a language model, which alone is planned; with --images, or a run file, its "
            "encoders are planned too",
            err=True,
        )
    whole = path.resolve()
    name = (
        given.partition("@")[0].rpartition("/")[2]
        if fetched
        else whole.stem
        if path.is_file()
        else whole.name
    )
    return Shape.of_config(fields, name), {"config": fields}


def _evaluate(path: Path, as_json: bool) -> None:
    """Print estimates for a CSV's rows."""
    from hyper_parallel.planner.constants import fitted
    from hyper_parallel.planner.csv_runs.evaluate import evaluate, text

    rows = evaluate(path, fitted())
    click.echo(json.dumps(rows, indent=1, allow_nan=False) if as_json else text(rows))
