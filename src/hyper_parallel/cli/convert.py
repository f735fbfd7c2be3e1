"""``hyper-parallel convert``"""

from __future__ import annotations

from pathlib import Path

import click

from hyper_parallel.errors import ConfigError


@click.command(short_help="Turn a DeepSpeed JSON into sections of a run file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option(
    "--devices", type=click.IntRange(min=1), help="Number of devices: degrees of axes, and the global batch."
)
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Where FILE offloads: what a step may hold on a device.",
)
@click.option("--host-memory", metavar="BYTES", help="Where FILE offloads: the host's memory for each rank.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write to this new file instead of the terminal."
)
def convert(
    file: Path,
    arguments: tuple[str, ...],
    devices: int | None,
    device_memory: str | None,
    host_memory: str | None,
    out: Path | None,
) -> None:
    """Turn FILE, a DeepSpeed JSON, into sections of a run file, as YAML.

    Each line has a comment with the keys that it comes from. Below are all keys that were not converted, each with the
    reason. A run file takes the result with 'extends: FILE', and adds the model and the data.

    ARGUMENTS are training arguments of Transformers that fill in 'auto', such as learning_rate=2e-5; without them,
    Transformers' default is written, and the comment says so.

    \b
    Examples:
      hyper-parallel convert ds_config.json --devices 8
      hyper-parallel convert ds_config.json --devices 8 bf16=true learning_rate=2e-5 per_device_train_batch_size=4
      hyper-parallel convert zero3_offload.json --devices 8 --device-memory 60GiB --host-memory 200GiB --out base.yaml

    \b
    Exit codes:
      0    converted
      2    FILE is no DeepSpeed JSON, or contradicts itself or the options; the error is one line
      130  interrupted
    """
    from hyper_parallel.config import from_deepspeed

    done = from_deepspeed.convert(
        from_deepspeed.read(file),
        devices=devices,
        device_memory=_bytes("--device-memory", device_memory),
        host_memory=_bytes("--host-memory", host_memory),
        arguments=arguments,
        name=file.name,
    )
    if out is None:
        click.echo(done.text, nl=False)
        return
    try:
        with open(out, "x", encoding="utf-8") as new:
            new.write(done.text)
    except FileExistsError:
        raise ConfigError(f"--out {out}: exists; name a new file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    left = len(done.unconverted)
    click.echo(
        f"{out}: {len(done.settings)} keys; {left} keys of {file} were not converted, listed at its end"
    )


def _bytes(option: str, text: str | None) -> int | None:
    from hyper_parallel.units import parse_bytes

    if text is None:
        return None
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not found:
        raise ConfigError(f"{option}: must be more than 0 bytes")
    return found
