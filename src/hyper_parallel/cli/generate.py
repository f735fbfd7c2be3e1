"""``hyper-parallel generate``"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyper_parallel.cli.interrupts import interruptible
from hyper_parallel.errors import DataError

if TYPE_CHECKING:
    from hyper_parallel.config.generate import GenerateConfig


@click.command(short_help="Generate text with a trained model.")
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Continue this text as it is, and print the continuation.",
)
@click.option(
    "--chat",
    "chats",
    multiple=True,
    metavar="TEXT",
    help="Answer this message of a user, through the model's chat template, and print the answer.",
)
@click.option(
    "--input", "source", type=click.Path(path_type=Path), help="Answer the prompts of this JSONL file."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --input: write answers to this JSONL file."
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help="Read the settings from this YAML file."
)
def generate(
    model: str,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    chats: tuple[str, ...],
    source: Path | None,
    out: Path | None,
    file: Path | None,
) -> None:
    """Generate text with MODEL: a Transformers folder, a run's folder or a checkpoint; or an id of the Hugging Face
    Hub, org/name or org/name@revision, which is downloaded once.

    Requests are batched continuously over a paged KV cache. A request's tokens do not depend on what else runs. With
    --input, each line is {"prompt": "..."} or {"messages": [...]}, and an interrupted batch goes on when the command is
    run again.

    OVERRIDES set keys of the sections 'inference', 'strategy' and 'launch', as does the file of --config. With
    'strategy.axes' the command starts as many workers on this machine as the product of the axes, each with its shards
    of the model; under torchrun, Slurm or MPI it joins their workers. With 'strategy.memory.device', a number of bytes,
    weights that do not fit are read from 'strategy.memory.host', 'pool' or 'flash' while others compute.

    \b
    Examples:
      hyper-parallel generate runs/quickstart --prompt "def add(a, b):" inference.max_tokens=40
      hyper-parallel generate Qwen/Qwen3-0.6B --chat "What is the capital of France?"
      hyper-parallel generate exported/quickstart --input prompts.jsonl --out answers.jsonl
      hyper-parallel generate runs/quickstart --prompt "class" inference.temperature=0.8 inference.n=4
      hyper-parallel generate runs/quickstart --prompt "class" strategy.axes.tensor=2
      hyper-parallel generate large --prompt "class" strategy.memory.device=2GiB strategy.memory.flash=/fast/disk

    \b
    Exit codes:
      0    every prompt has its answer
      1    the disk, the device or a worker failed; finished answers are kept
      2    an error in the input, reported in one line
      130  interrupted; finished answers are kept
    """
    if len(prompts) + len(chats) + (source is not None) != 1:
        raise click.UsageError(
            "give --prompt, --chat or --input, one of them and once; several prompts, and conversations of several "
            'messages, are lines of an --input file: {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    prompt, chat = next(iter(prompts), None), next(iter(chats), None)
    if source is not None and out is None:
        raise click.UsageError("--input needs --out, the file for the answers")
    if out is not None and source is None:
        raise click.UsageError("--out belongs to --input; other answers are printed")
    from hyper_parallel.cli.hub_models import fetched_model
    from hyper_parallel.config.generate import check_folder, load_generate
    from hyper_parallel.hub.download import Wanted

    settings = load_generate(overrides, file)
    folder = Path(model)
    check_folder(settings, folder)
    with interruptible():
        folder = fetched_model(model, Wanted.MODEL, "MODEL") or folder
        if _on_workers(settings):
            code = _run_workers(settings, folder, prompt, chat, source, out)
            if code:
                sys.exit(code)
        elif prompt is not None or chat is not None:
            _answer(folder, prompt, chat, settings)
        elif source is not None and out is not None:
            from hyper_parallel.inference.batch import run_batch

            _use_threads(settings)
            run_batch(
                folder, source, out, settings.inference, settings.strategy.memory, settings.launch.device
            )


def _use_threads(settings: GenerateConfig) -> None:
    """Compute in this process with as many threads as the file says."""
    if settings.launch.threads is not None:
        import torch

        torch.set_num_threads(settings.launch.threads)


def _on_workers(settings: GenerateConfig) -> bool:
    """Whether workers are started, or there are those of a launcher."""
    from hyper_parallel.launch.rendezvous import detect

    if settings.effective_strategy.axes.world > 1:
        return True
    return detect(os.environ, settings.launch.rendezvous) is not None


def _run_workers(
    settings: GenerateConfig,
    model: Path,
    prompt: str | None,
    chat: str | None,
    source: Path | None,
    out: Path | None,
) -> int:
    """Start or join the workers; the exit code."""
    from hyper_parallel import launch
    from hyper_parallel.config.generate import for_workers

    _check(model, prompt, chat, source)
    named = {"folder": model, "source": source, "answers": out}
    paths = {key: str(path) for key, path in named.items() if path is not None}
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-", ignore_cleanup_errors=True) as temporary:
        run = for_workers(settings, out=settings.logs or temporary, prompt=prompt, chat=chat, **paths)
        return launch.run(run, "hyper_parallel.inference.worker:main")


def _check(model: Path, prompt: str | None, chat: str | None, source: Path | None) -> None:
    """Refuse what can be seen before a worker is started."""
    from hyper_parallel.hub.hub_id import reading

    _check_texts(prompt, chat)
    for path, is_there in ((model, model.is_dir()), (source, source is None or source.exists())):
        if path is not None and not is_there:
            what = (
                f"folder; give a Transformers folder, a run's or a checkpoint's{reading(str(path))}"
                if path is model
                else "file"
            )
            raise DataError(f"{path}: no such {what}")


def _check_texts(prompt: str | None, chat: str | None) -> None:
    for name, text in (("--prompt", prompt), ("--chat", chat)):
        if text is None:
            continue
        if not text:
            raise DataError(f"{name} is empty; generation needs at least one token to go on from")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{name} is no text: it has half of a character (a lone surrogate)") from None


def _answer(model: Path, prompt: str | None, chat: str | None, settings: GenerateConfig) -> None:
    _check_texts(prompt, chat)
    from hyper_parallel.inference import Generator
    from hyper_parallel.inference.batch import prompt_of

    _use_threads(settings)
    memory, device = settings.strategy.memory, settings.launch.device
    with Generator(model, memory=memory, device=device, **settings.inference.model_dump()) as generator:
        for answer in generator([prompt_of(prompt, chat)]):
            click.echo(answer.text)
