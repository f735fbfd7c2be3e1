"""``hyper-parallel generate``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyper_parallel.cli.interrupts import interruptible
from hyper_parallel.errors import DataError

if TYPE_CHECKING:
    from hyper_parallel.config.inference import Inference


@click.command(short_help="Generate text with a trained model.")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--prompt", help="Answer this prompt, and print the answer.")
@click.option(
    "--input", "source", type=click.Path(path_type=Path), help="Answer the prompts of this JSONL file."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --input: write answers to this JSONL file."
)
def generate(
    model: Path, overrides: tuple[str, ...], prompt: str | None, source: Path | None, out: Path | None
) -> None:
    """Generate text with MODEL: a Transformers folder, a run's folder or a checkpoint.

    Requests are batched continuously over a paged KV cache. A request's tokens do not depend on what else runs. With
    --input, each line is {"prompt": "..."} or {"messages": [...]}, and an interrupted batch goes on when the command is
    run again.

    OVERRIDES set keys of the section 'inference'.

    \b
    Examples:
      hyper-parallel generate runs/quickstart --prompt "def add(a, b):" inference.max_tokens=40
      hyper-parallel generate exported/quickstart --input prompts.jsonl --out answers.jsonl
      hyper-parallel generate runs/quickstart --prompt "class" inference.temperature=0.8 inference.n=4

    \b
    Exit codes:
      0    every prompt has its answer
      1    the disk or the device failed; finished answers are kept
      2    an error in the input, reported in one line
      130  interrupted; finished answers are kept
    """
    if (prompt is None) == (source is None):
        raise click.UsageError("give --prompt or --input, one of them")
    if source is not None and out is None:
        raise click.UsageError("--input needs --out, the file for the answers")
    if out is not None and source is None:
        raise click.UsageError("--out belongs to --input; the answer to --prompt is printed")
    from hyper_parallel.config.generate import load_generate

    settings = load_generate(overrides).inference
    with interruptible():
        if prompt is not None:
            _answer(model, prompt, settings)
        elif source is not None and out is not None:
            _batch(model, source, out, settings)


def _answer(model: Path, prompt: str, settings: Inference) -> None:
    if not prompt:
        raise DataError("--prompt is empty; generation needs at least one token to go on from")
    from hyper_parallel.inference import Generator

    for answer in Generator(model, **settings.model_dump())([prompt]):
        click.echo(answer.text)


def _batch(model: Path, source: Path, out: Path, settings: Inference) -> None:
    from hyper_parallel.inference.batch import run_batch
    from hyper_parallel.inference.load_model import identity, located
    from hyper_parallel.inference.prompt_file import AnswerFile, read_prompts

    rows = read_prompts(source)
    if not out.absolute().parent.is_dir():
        raise DataError(f"--out: {out.absolute().parent}: no such folder")
    if out.exists() and out.samefile(source):
        raise DataError(f"--out: {out} is the input; give another file")
    found = located(model)
    deciding = {
        **settings.sampling().model_dump(),
        "seed": settings.seed,
        "page": settings.page,
        "model": identity(found),
    }
    answers = AnswerFile(out, rows, settings.n, deciding)
    done = len(rows) * settings.n - len(answers.missing)
    if done:
        click.echo(f"{out}: {done} answers are there; going on with {len(answers.missing)}", err=True)
    if answers.missing:
        run_batch(found, rows, answers, settings, lambda line, last: _show(line, last))
    click.echo(f"{out}: {len(rows) * settings.n} answers", err=True)


def _show(line: str, last: bool) -> None:
    """A progress line, written over on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}" + ("\n" if last else ""), err=True, nl=False)
    else:
        click.echo(line, err=True)
