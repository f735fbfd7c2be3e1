"""The page of commands: the help text of each subcommand of `hyper-parallel`."""

from __future__ import annotations

import click

from hyper_parallel.cli.main import command

WIDTH = 96


def page() -> str:
    """Markdown with one section for each subcommand."""
    top = click.Context(command, info_name="hyper-parallel", terminal_width=WIDTH, max_content_width=WIDTH)
    lines = [
        "# Commands",
        "",
        "The help of every command, as `hyper-parallel COMMAND --help` prints it. Commands that read a run file take",
        "its keys as [dotted overrides](run-file.md), such as `train.steps=20`.",
        "",
    ]
    for name in command.list_commands(top):
        one = command.get_command(top, name)
        assert one is not None
        context = click.Context(
            one, parent=top, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH
        )
        lines += [f"## hyper-parallel {name}", "", "```text", one.get_help(context), "```", ""]
    return "\n".join(lines)
