"""Arguments that several commands share, files that options name, lines of progress; and a wrong command line in one
line, with what was meant.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig


def run_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """FILE and [OVERRIDES]...: a run file and dotted ``key=value`` pairs. Only `config.load` validates them."""
    function = click.argument("overrides", nargs=-1)(function)
    return click.argument("file", type=click.Path(path_type=Path))(function)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def trace_cache(run: RunConfig) -> Path | None:
    """The folder of captured steps that `simulate` and `inspect` share; None where a step is to be captured anew."""
    return Path(run.data.cache).expanduser() / "traces" if run.train.graph_cache else None


def check_folder(option: str, path: Path | None) -> None:
    """Raises ConfigError if the folder of a file that an option names does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {path}: the folder {path.absolute().parent} does not exist; create it first"
        )


def write(option: str, path: Path, text: str, hint: str = "") -> None:
    """Write the file that an option names, and say so on standard error. Raises ConfigError if it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
    click.echo(f"written: {path}{hint}", err=True)


def progress_lines() -> Callable[[str], None]:
    """A function that prints a line with the seconds since this call, if standard error is a terminal."""
    begun = time.monotonic()

    def show(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"  {time.monotonic() - begun:5.1f} s  {text}", err=True)

    return show


_COMMANDS = {
    "run": "train",
    "fit": "train",
    "finetune": "train",
    "fine-tune": "train",
    "sft": "train",
    "pretrain": "train",
    "launch": "train",
    "infer": "generate",
    "inference": "generate",
    "chat": "generate",
    "predict": "generate",
    "sample": "generate",
    "ppo": "rl",
    "grpo": "rl",
    "check": "verify",
    "test": "verify",
    "estimate": "simulate",
    "search": "plan",
    "tune": "plan",
    "save": "export",
    "machines": "clusters",
    "presets": "clusters",
    "env": "doctor",
    "info": "doctor",
    "help": "--help",
    "version": "--version",
}
"""Words of other programs for our commands."""
_KEY = re.compile(r"-{1,2}([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def one_line(error: click.ClickException, arguments: Sequence[str]) -> str:
    """The message of an error in the command line. `arguments`: the command line without the program's name."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return error.format_message()
    if isinstance(context.command, click.Group) and "such command" in error.format_message():
        return _no_command(context.command, arguments)
    if isinstance(error, click.NoSuchOption) and (meant := _override(context.command, arguments)):
        return f"{context.command_path}: keys are set without dashes: {meant}"
    text = error.format_message().rstrip(".?").replace(". Did you mean", "; did you mean")
    asks = "?" if "did you mean" in text else ""
    return f"{context.command_path}: {text[:1].lower()}{text[1:]}{asks}; see {context.command_path} --help"


def _no_command(group: click.Group, arguments: Sequence[str]) -> str:
    word = next((argument for argument in arguments if not argument.startswith("-")), "")
    meant = _COMMANDS.get(word.lower())
    if meant is None and (Path(word).suffix in (".yaml", ".yml") or Path(word).is_file()):
        return f"a command comes before the file: hyper-parallel train {word}"
    hint = f"; did you mean {meant!r}?" if meant else nearest(word, group.commands)
    return f"no command {word!r}{hint or '; the commands are ' + ', '.join(group.commands)}"


def _override(command: click.Command, arguments: Sequence[str]) -> str | None:
    """The override that ``--train.steps=5`` or ``--learning_rate 1e-3`` stands for: ``train.steps=5``."""
    if not any(parameter.name == "overrides" for parameter in command.params):
        return None
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for at, argument in enumerate(arguments):
        found = _KEY.fullmatch(argument)
        name = argument.partition("=")[0]
        if found is None or any(option.startswith(name) for option in options):
            continue
        after = arguments[at + 1] if at + 1 < len(arguments) else ""
        value = found[2] if found[2] is not None else "VALUE" if after.startswith("-") or not after else after
        key = found[1] if "." in found[1] else _key(command, found[1])
        if key is not None:
            return f"{key}={value}"
    return None


def _key(command: click.Command, word: str) -> str | None:
    from hyper_parallel.config.validation_errors import key_for

    if command.name == "generate":
        from hyper_parallel.config.generate import GenerateConfig

        return key_for(GenerateConfig, word)
    from hyper_parallel.config.run import RunConfig

    return key_for(RunConfig, word)
