"""``hyper-parallel schema``"""

from __future__ import annotations

import json

import click


@click.command(short_help="Print the JSON schema of the run file, for editors.")
@click.option("--strategy", is_flag=True, help="The schema of a Strategy file instead of a run file.")
@click.option("--rl", is_flag=True, help="The schema of a file of hyper-parallel rl.")
@click.option("--generate", is_flag=True, help="The schema of a file of hyper-parallel generate --config.")
def schema(strategy: bool, rl: bool, generate: bool) -> None:
    """Print the JSON schema of the run file, with which an editor completes and checks it.

    With the YAML extension of VS Code, or any editor that uses yaml-language-server, write the schema to a file
    once and name that file in the first line of your run file:

    \b
      hyper-parallel schema > hyper-parallel.schema.json
      # yaml-language-server: $schema=hyper-parallel.schema.json

    The schema lists every key with its meaning, type and default.

    \b
    Exit codes:
      0    printed
    """
    if strategy + rl + generate > 1:
        raise click.UsageError(
            "--strategy, --rl and --generate are different kinds of files; give one of them"
        )
    from hyper_parallel.config.generate import GenerateConfig
    from hyper_parallel.config.rl import RLConfig
    from hyper_parallel.config.run import RunConfig
    from hyper_parallel.config.schema import json_schema
    from hyper_parallel.strategy import Strategy

    kind = Strategy if strategy else RLConfig if rl else GenerateConfig if generate else RunConfig
    click.echo(json.dumps(json_schema(kind), indent=2, ensure_ascii=False))
