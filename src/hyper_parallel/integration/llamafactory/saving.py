"""Checkpoints and the final folder for LlamaFactory's main branch.

A checkpoint is that of `integration.checkpoints`: verified, with weights and the optimizer's moments by name, so that
it resumes under any other strategy and number of workers.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.integration import checkpoints
from hyper_parallel.integration.hf_folder import write_folder
from hyper_parallel.integration.llamafactory.prepare_model import localised
from hyper_parallel.shard import sharded

log = logging.getLogger(__name__)


def save_hsdp_checkpoint(
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    output_dir: str | Path,
    should_save_scheduler: bool = True,
) -> None:
    """Write a prepared model, its optimizer unless that is None, and the schedule into a Trainer's `checkpoint-N`.

    A collective; `should_save_scheduler` says which rank writes the schedule. Raises CheckpointError, on all ranks, if
    the folder cannot be written.
    """
    folder, handle = Path(output_dir), sharded(model)
    folder.mkdir(parents=True, exist_ok=True)
    if should_save_scheduler and lr_scheduler is not None:
        torch.save(lr_scheduler.state_dict(), folder / checkpoints.SCHEDULER)
    if optimizer is not None:
        localised(optimizer)
    config = getattr(model, "config", None)
    state = {"model_config": config.to_dict()} if config is not None else {}
    checkpoints.save(folder, handle, optimizer, _step(folder, lr_scheduler), state)


def load_hsdp_model(model: nn.Module, checkpoint_dir: str | Path) -> bool:
    """Fill a prepared model from a checkpoint; False if the folder has none of ours. A collective.

    Raises CheckpointError, on all ranks, if it is damaged or of another model.
    """
    folder = Path(checkpoint_dir)
    if not checkpoints.holds_ours(folder):
        return False
    checkpoints.load(folder, sharded(model), None)
    return True


def load_hsdp_optimizer_and_scheduler(
    optimizer: Any, lr_scheduler: Any, checkpoint_dir: str | Path | None
) -> None:
    """Fill an optimizer, moments included, and a schedule from a checkpoint, as far as it has them. A collective.

    The optimizer may be new; it is one that Accelerate prepared together with the model. Raises CheckpointError, on all
    ranks, if the checkpoint is damaged or of another optimizer.
    """
    if checkpoint_dir is None:
        return
    folder = Path(checkpoint_dir)
    if optimizer is not None:
        handle = localised(optimizer)
        if checkpoints.holds_ours(folder):
            checkpoints.load_optimizer(folder, handle, optimizer)
        else:
            log.warning("%s holds no optimizer's state: its moments begin at zero", folder)
    schedule = folder / checkpoints.SCHEDULER
    if lr_scheduler is not None and schedule.is_file():
        lr_scheduler.load_state_dict(torch.load(schedule, map_location="cpu", weights_only=True))


def export_to_hf_format(model: nn.Module, tokenizer: Any, save_dir: str | Path) -> None:
    """Write a plain Hugging Face folder of a prepared model, with the tokenizer unless it is None. A collective."""
    write_folder(sharded(model), Path(save_dir), tokenizer=tokenizer)


def _step(folder: Path, lr_scheduler: Any) -> int:
    """Updates done: what the folder is named for, else what the schedule counts."""
    named = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    if named is not None:
        return int(named[1])
    return int(getattr(lr_scheduler, "last_epoch", 0))
