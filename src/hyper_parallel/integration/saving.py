"""A Trainer's checkpoints of a spread model: our verified checkpoint in its `checkpoint-N`, a plain folder at the end.

| What a Trainer calls | What is written or read |
|---|---|
| `save_model` | a plain Hugging Face folder, of a model with adapters PEFT's |
| `_save_checkpoint` | `checkpoint-N`: ours, with weights and optimizer, beside the Trainer's own small files |
| `_load_from_checkpoint`, `_load_best_model` | weights: ours, verified, from any strategy; else a plain folder's |
| `_load_optimizer_and_scheduler` | the optimizer's state, from any strategy, and the schedule |

Random states, the order of the files and which checkpoints are deleted stay the Trainer's.
"""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.checkpoint.rank_agreement import agree
from hyper_parallel.checkpoint.shard import dtype_name
from hyper_parallel.errors import CheckpointError, one_line
from hyper_parallel.integration import checkpoints
from hyper_parallel.integration.checkpoints import MANIFEST, SCHEDULER, ranks_of, together, write_manifest
from hyper_parallel.integration.hf_folder import read_folder, write_folder
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.lora_adapters import without_adapters

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

log = logging.getLogger(__name__)

_ARGUMENTS = "training_args.bin"


class SpreadSaving(_Trainer):
    """The part of `SpreadTrainer` that saves and loads."""

    spread: ParallelRun | None = None
    """The spread model; None until the Trainer is made."""
    _in_checkpoint = False
    """Whether a `checkpoint-N` with our checkpoint is being written, and no plain folder."""
    _written: Path | None = None
    """The `checkpoint-N` whose files are in a manifest, but for the last one."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own. ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, and logs which
        newer ones it passed over, and why.

        Raises CheckpointError when the one given is damaged or half written, or all are.
        """
        if resume_from_checkpoint is True:
            found = checkpoints.newest(Path(self.args.output_dir), self._handle)
            for path, reason in found.skipped if self._handle.rank == 0 else ():
                log.warning("passed over %s: %s", path, reason)
            if found.path is not None:
                resume_from_checkpoint = str(found.path)
        elif resume_from_checkpoint:
            checkpoints.refuse_damaged(Path(resume_from_checkpoint), self._handle)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain Hugging Face folder. A collective: every process calls it, and the first one writes.

        Raises CheckpointError, on all ranks, if the folder cannot be written.
        """
        # Not `_save`, which older releases of Transformers (5.6 for one) call in the first process only.
        out = Path(output_dir if output_dir is not None else self.args.output_dir)
        # Adapters are small, so that a checkpoint has them in PEFT's form as well.
        if not self._in_checkpoint or self._adapted:
            write_folder(self._handle, out)
        with together(ranks_of(self._handle), out):
            if self.args.should_save:
                self._save_beside(out)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._in_checkpoint = not self.args.save_only_model
        self._written = None
        try:
            super()._save_checkpoint(*args, **kwargs)
            if self._written is not None:
                self._verify_beside(self._written)
        finally:
            self._in_checkpoint = False

    def _save_rng_state(self, output_dir: str) -> None:
        """Every process its own; then all files are there but the Trainer's last one, after which it may delete older
        checkpoints: from now on this one has to be good."""
        folder = Path(output_dir)
        with together(ranks_of(self._handle), folder):
            super()._save_rng_state(output_dir)
        self._verify_beside(folder)
        self._written = folder

    def _verify_beside(self, folder: Path) -> None:
        with together(ranks_of(self._handle), folder):
            if self._handle.rank == 0:
                write_manifest(folder)

    def _save_beside(self, out: Path) -> None:
        """Save the files of a model besides its weights: config, tokenizer or processor, and the arguments."""
        out.mkdir(parents=True, exist_ok=True)
        if self._in_checkpoint and (config := self._config_as_saved()) is not None:
            config.save_pretrained(out)
        for other in (*self._words, *(self._generation if self._in_checkpoint else ())):
            other.save_pretrained(out)
        torch.save(self.args, out / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The schedule, then our checkpoint, which has the schedule's digest."""
        folder = Path(output_dir)
        assets: dict[str, bytes] = {}
        with together(ranks_of(self._handle), folder):
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
            if self._handle.rank == 0:
                assets = self._assets()
        config = self._config_as_saved()
        checkpoints.save(
            folder,
            self._handle,
            self.optimizer,
            int(self.state.global_step),
            {
                # Also the keys that have their default: what the default is may change.
                "model_config": None if config is None else json.loads(config.to_json_string(use_diff=False)),
                "strategy": self._handle.strategy.model_dump(mode="json"),
            },
            assets=assets,
        )

    def _assets(self) -> dict[str, bytes]:
        """The tokenizer's files and the generation config, with which our checkpoint can be exported by itself."""
        if self._adapted:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            for one in (*self._words, *self._generation):
                one.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._read(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        log.info("loading the best model, of %s", self.state.best_model_checkpoint)
        self._read(Path(str(self.state.best_model_checkpoint)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not checkpoints.holds_ours(folder):
            if self._handle.rank == 0:
                log.warning("%s holds the model only; optimizer and schedule begin anew", folder)
            return
        checkpoints.load_optimizer(folder, self._handle, self.optimizer)
        with together(ranks_of(self._handle), folder, "read"):
            schedule = torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True)
            groups, saved = len(self.optimizer.param_groups), schedule.get("base_lrs")
            if saved is not None and len(saved) != groups:
                raise CheckpointError(
                    f"{folder} has a schedule for {len(saved)} groups of parameters, and this run's optimizer has "
                    f"{groups}; resume with the same groups"
                )
            self.lr_scheduler.load_state_dict(schedule)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        problem: CheckpointError | None = None
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:  # as many kinds as there are ways to damage a pickle
            why = one_line(f"{type(error).__name__}: {error}")
            problem = CheckpointError(
                f"{folder}: the random state cannot be read: {why}; give another checkpoint, or remove its rng_state "
                f"files and {MANIFEST} to go on with random states of the seed"
            )
        agree(ranks_of(self._handle), problem)

    def _read(self, folder: Path) -> None:
        if checkpoints.holds_ours(folder):
            checkpoints.load(folder, self._handle, None)
        else:
            read_folder(self._handle, folder)

    # Inside.

    @property
    def _spread_model(self) -> ParallelRun:
        assert self.spread is not None, "the model is spread when the Trainer is made"
        return self.spread

    @property
    def _handle(self) -> ShardedModel:
        return self._spread_model.handle

    @property
    def _adapted(self) -> bool:
        model = self._handle.model
        return without_adapters(model) is not model

    @property
    def _words(self) -> list[Any]:
        """The tokenizer or processor, if the Trainer has one."""
        words = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return [] if words is None else [words]

    @property
    def _generation(self) -> list[Any]:
        """The generation config, if the model generates and is saved whole."""
        model: Any = self._handle.model
        generates = callable(getattr(model, "can_generate", None)) and model.can_generate()
        return [model.generation_config] if generates and not self._adapted else []

    def _config_as_saved(self) -> Any:
        """The model's config as `save_pretrained` writes it; None where the base model's folder has it (adapters)."""
        model: Any = self._handle.model
        if self._adapted or not hasattr(model, "config"):
            return None
        config = copy.deepcopy(model.config)
        # FSDP2 puts its name before the class's.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = dtype_name(model.dtype)
        return config
