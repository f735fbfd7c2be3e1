"""``hyper-parallel export``"""

from __future__ import annotations

from pathlib import Path

import click

from hyper_parallel.errors import CheckpointError


@click.command(short_help="Write a checkpoint as a folder that Transformers loads.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--adapter",
    is_flag=True,
    help="Write the LoRA adapters alone, as a folder of PEFT, in place of the model.",
)
def export(checkpoint: Path, out: Path, adapter: bool) -> None:
    """Write CHECKPOINT to the new folder OUT, which AutoModelForCausalLM.from_pretrained loads.

    CHECKPOINT is a run's folder (its newest intact checkpoint is exported), its 'checkpoints' folder, or the folder
    of one step; for a Trainer's run, a 'checkpoint-N' or the folder that contains these. A checkpoint of any strategy
    can be exported; LoRA adapters (model.adapter) are merged into the weights; with --adapter they are written
    alone, as PeftModel.from_pretrained(base, OUT) loads them. Names and shapes are those of save_pretrained. Every byte
    is verified, and only one weight at a time is in memory.

    \b
    Examples:
      hyper-parallel export runs/quickstart exported/quickstart
      hyper-parallel export runs/lora exported/adapter --adapter
      python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('exported/quickstart')"

    \b
    Exit codes:
      0    written
      2    no such checkpoint, it is damaged, or OUT exists and is not empty; the error is one line
      130  interrupted
    """
    # Checks that need no torch come before its import.
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder; give a run's folder or that of one checkpoint")
    from hyper_parallel.checkpoint import export as whole
    from hyper_parallel.checkpoint import export_adapter
    from hyper_parallel.checkpoint.verify import find

    path = find(checkpoint, lambda line: click.echo(f"hyper-parallel: {line}", err=True))
    write = export_adapter if adapter else whole
    click.echo(f"{path} -> {write(path, out)}")
