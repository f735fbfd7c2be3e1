"""A trainer that asks of HyperParallel what LlamaFactory's main branch does: the same names, in the same order.

It stands on Transformers' Trainer and Accelerate's FSDP2, as that one does. On a CPU Accelerate has no FSDP2, so that
its state is set by hand; the code that it runs then is its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator as accelerate_module
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer, TrainingArguments

from hyper_parallel.integration.llamafactory import (
    HSDPModule,
    HyperParallelArguments,
    clip_grad_norm_,
    export_to_hf_format,
    fsdp2_prepare_model,
    hsdp_sync_stream,
    load_hsdp_model,
    load_hsdp_optimizer_and_scheduler,
    save_hsdp_checkpoint,
    wrap_optimizer_with_skip_dtensor_dispatch,
)
from hyper_parallel.integration.llamafactory.context_parallel import (
    cp_prepare_model,
    get_cp_group,
    get_cp_group_ranks,
    get_cp_rank,
    get_dp_rank,
    shard_inputs_for_cp,
)
from hyper_parallel.integration.llamafactory.expert_parallel import ep_prepare_model
from hyper_parallel.platform import get_platform


class Repeated(torch.utils.data.BatchSampler):
    """Each batch so many times."""

    def __init__(self, *args: Any, times: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times = times

    def __len__(self) -> int:
        return super().__len__() * self._times

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield from [list(batch)] * self._times


class MainBranchTrainer(Trainer):
    """What that trainer does beside Transformers' loop."""

    def __init__(self, hp_args: HyperParallelArguments, plugin: dict[str, Any], **kwargs: Any) -> None:
        self._hp, self._plugin = hp_args, plugin
        super().__init__(**kwargs)
        assert self.accelerator.is_fsdp2
        if hp_args.cp_size > 1:
            self._cp_rank, self._dp_rank = get_cp_rank(hp_args), get_dp_rank(hp_args)
            group, ranks = get_cp_group(hp_args), get_cp_group_ranks(hp_args)
            assert dist.get_process_group_ranks(group) == list(ranks) and get_platform().get_rank() in ranks

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **self._plugin)
        state.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True

    def _prepared(self, model: nn.Module) -> nn.Module:
        if self._hp.cp_size > 1:
            model = cp_prepare_model(model, self.accelerator, self._hp)
        if self._hp.ep_size > 1:
            model = ep_prepare_model(model, self.accelerator, self._hp)
        return fsdp2_prepare_model(self.accelerator, model, self._hp)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        def clip(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
            accelerator.unscale_gradients()
            parameters = list(parameters)
            assert any(isinstance(model, HSDPModule) for model in accelerator._models)
            return clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

        own, own_clip = accelerate_module.fsdp2_prepare_model, self.accelerator.clip_grad_norm_
        accelerate_module.fsdp2_prepare_model = lambda accelerator, model: self._prepared(model)
        self.accelerator.clip_grad_norm_ = types.MethodType(clip, self.accelerator)
        try:
            yield
        finally:
            accelerate_module.fsdp2_prepare_model, self.accelerator.clip_grad_norm_ = own, own_clip

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._patched():
            return super().train(*args, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if training or isinstance(model, HSDPModule) else super()._wrap_model(model, training)

    def get_train_dataloader(self) -> Any:
        """Whole batches, each repeated for the ranks that share it."""
        if self._hp.cp_size == 1:
            return super().get_train_dataloader()
        rows = torch.utils.data.SequentialSampler(self.train_dataset)
        batches = Repeated(rows, self._train_batch_size, drop_last=False, times=self._hp.cp_size)
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self._hp.cp_size > 1:
            length = inputs["input_ids"].size(1)
            inputs = shard_inputs_for_cp(inputs, self._cp_rank, self._hp.cp_size)
            assert inputs["input_ids"].size(1) == math.ceil(length / self._hp.cp_size)
            assert inputs["labels"].size(1) == length
        sync = self.accelerator.sync_gradients
        assert isinstance(model, HSDPModule)
        model.set_is_last_backward(sync)
        model.set_requires_gradient_sync(sync)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        if sync:
            hsdp_sync_stream()
        return loss.detach()

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        wrap_optimizer_with_skip_dtensor_dispatch(optimizer)
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_hsdp_checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            output_dir=output_dir,
            should_save_scheduler=self.args.should_save and self.lr_scheduler is not None,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not load_hsdp_model(model if model is not None else self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None = None) -> None:
        if checkpoint is not None:
            load_hsdp_optimizer_and_scheduler(self.optimizer, self.lr_scheduler, checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = output_dir or self.args.output_dir
        Path(folder).mkdir(parents=True, exist_ok=True)
        export_to_hf_format(self.model, None, folder)


def as_torchrun_says(rank: int, world: int) -> None:
    """What a launcher puts into the environment, for Accelerate."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def forget_accelerate() -> None:
    """Let the next Trainer of this process begin anew; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss as LlamaFactory's DFT: of whole logits, each token weighed by its own probability."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    logits = outputs.get("logits")
    logits = logits.view(-1, logits.size(-1))
    loss = nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return (loss * (-loss).exp().detach() * (targets != -100)).sum() / num_items_in_batch


def arguments(out: Path, steps: int, **settings: Any) -> TrainingArguments:
    """Arguments of a short run on the CPU, without dropout or a warm start."""
    given: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return TrainingArguments(**{**given, **settings})
