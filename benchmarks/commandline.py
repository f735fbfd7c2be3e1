"""Command lines of benchmarks: the options of a script are the parameters of its `main`.

    def main(rounds: Annotated[int, "steps that are timed"] = 20, again: bool = False) -> None: ...

    if __name__ == "__main__":
        run(main)

A parameter becomes ``--its-name``: a bool is a flag, a tuple takes several values, a `Literal` or a tuple in the
annotation gives the choices, a text in the annotation the help. The description is the script's docstring. Every script
has ``--out FOLDER``, for a trial whose figures are not to be kept.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from measure import write_into

Only = Annotated[str, "what has this text in its name"]
"""The option of scripts whose cases can be run in part."""
Again = Annotated[bool, "what the result has already, too"]


def parser_of(main: Callable[..., Any], description: str | None = None) -> argparse.ArgumentParser:
    """The parser whose options are the parameters of `main`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = typing.get_type_hints(main, include_extras=True)
    for name, parameter in inspect.signature(main).parameters.items():
        notes: tuple[Any, ...] = ()
        kind = hints.get(name, str)
        if typing.get_origin(kind) is Annotated:
            kind, *rest = typing.get_args(kind)
            notes = tuple(rest)
        options: dict[str, Any] = {"default": parameter.default}
        for note in notes:
            options["help" if isinstance(note, str) else "choices"] = note
        if kind is bool:
            options |= {"action": "store_true"}
        else:
            if typing.get_origin(kind) in (list, tuple, Sequence):
                options["nargs"] = "*"
                kind = typing.get_args(kind)[0]
            if typing.get_origin(kind) in (Union, types.UnionType):  # a type or None
                kind = next(one for one in typing.get_args(kind) if one is not type(None))
            if typing.get_origin(kind) is Literal:
                options["choices"] = typing.get_args(kind)
                kind = type(options["choices"][0])
            options["type"] = kind
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser


def run(main: Callable[..., Any], arguments: Sequence[str] | None = None) -> typing.NoReturn:
    """Run `main` with the options of the command line, and end with what it returns: 0 for nothing."""
    parser = parser_of(main, sys.modules[main.__module__].__doc__)
    parser.add_argument("--out", type=Path, help="a folder for the result; no page of docs/ is written")
    given = vars(parser.parse_args(arguments))
    if (out := given.pop("out")) is not None:
        write_into(out)
    sys.exit(int(main(**given) or 0))
