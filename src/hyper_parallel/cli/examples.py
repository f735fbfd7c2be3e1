"""``hyper-parallel examples``: the package's example files, copied to where a user can run and change them."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hyper_parallel.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
_LEFT = {"runs", "__pycache__"}
"""Folders that running an example in a checkout leaves behind; setup.py leaves them out of a wheel."""


@click.command(short_help="Copy the example files into a folder.")
@click.argument("folder", type=click.Path(path_type=Path), default="examples")
@click.option("--list", "only_list", is_flag=True, help="Only list the examples, and copy nothing.")
def examples(folder: Path, only_list: bool) -> None:
    """Copy the example files into FOLDER, unless given ./examples, where the documents' commands find them.

    Files that are there already with the same content stay; a file with other content is an error, so that nothing
    of yours is overwritten. Each file opens with what it does and the command that runs it.

    \b
    Examples:
      hyper-parallel examples
      hyper-parallel train examples/quickstart.yaml

    \b
    Exit codes:
      0    copied, or listed
      2    FOLDER cannot be written, or a file in it has other content; the error is one line
    """
    source = _source()
    files = [
        path for path in sorted(source.rglob("*")) if path.is_file() and not _LEFT.intersection(path.parts)
    ]
    if not only_list:
        _copy({path.relative_to(source): path.read_bytes() for path in files}, folder)
        click.echo(f"{len(files)} files are in {folder}")
    for path in files:
        name = path.relative_to(source)
        if about := _headline(path):
            click.echo(name if only_list else folder / name)
            click.echo(click.wrap_text(about, 78, initial_indent="    ", subsequent_indent="    "))
    if not only_list:
        click.echo(f"next:    hyper-parallel train {folder / 'quickstart.yaml'}")


def _source() -> Path:
    """The folder of examples: in the installed package, or in the checkout that an editable installation points at."""
    for folder in (_PACKAGE / "examples", _PACKAGE.parent.parent / "examples"):
        if (folder / "quickstart.yaml").is_file():
            return folder
    raise ConfigError(
        "this installation has no examples; install the package again from its wheel or a checkout"
    )


def _copy(contents: dict[Path, bytes], folder: Path) -> None:
    """Writes the files. Raises ConfigError before anything is written if one would be overwritten."""
    try:
        for name, content in contents.items():
            there = folder / name
            if there.exists() and (there.is_dir() or there.read_bytes() != content):
                raise ConfigError(
                    f"{there} exists with other content; name another folder: hyper-parallel examples NEW-FOLDER"
                )
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"examples cannot be copied into {folder}: {error.strerror}; name a folder that you may write: "
            "hyper-parallel examples FOLDER"
        ) from None


def _headline(path: Path) -> str:
    """The first sentence of a file's opening comment or docstring; empty for a file that opens with neither."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        opening = re.match(r'"""(.*?)(?:\n\n|""")', text, re.DOTALL)
        words = opening.group(1) if opening else ""
    else:
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        words = ""
        for line in lines:
            if not line.startswith("# ") or line.startswith("#  "):
                break
            words += line[1:]
    sentence = re.match(r".*?\.(?=\s|$)", " ".join(words.split()))
    return sentence.group(0) if sentence else " ".join(words.split())
