"""The mixin that makes a Trainer's step one of a spread model: `class HyperParallelTrainer(SpreadTrainer, Trainer)`.

With L(x) the loss of a token and T the number of valid tokens of the step, over all ranks and micro-batches,

    loss = Σ L / T,        this rank's part = Σ over its rows and positions of L / T,        loss = Σ over loss ranks

`compute_loss` gives the part times the number of loss ranks, since a Trainer logs the mean over ranks. Gradients are
sums over ranks (`shard.loss`), so `accelerator.backward` divides what it is given. Methods of the user's own stand
between the two: they are called as by Transformers, inside what a spread model needs around a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.accelerate import SpreadAccelerator
from hyper_parallel.integration.batch_rows import (
    FewLengths,
    NoRows,
    check_rows,
    new_rows,
    shifted,
    shortened,
    warn_of_stream,
)
from hyper_parallel.integration.engine_generate import EngineGenerate
from hyper_parallel.integration.local_optimizer import on_local
from hyper_parallel.integration.memory_budget import Budget, check_budget, has_budget, under_budget
from hyper_parallel.integration.parallel_run import Given, ParallelRun, read, strategy_of, world_size
from hyper_parallel.integration.trainer_arguments import (
    adjusted,
    check_arguments,
    check_model,
    check_overrides,
    check_strategy,
    check_trainer,
    has_next_token_loss,
    owner_of,
    parameters_that_count,
)
from hyper_parallel.integration.trainer_losses import SpreadEvaluation
from hyper_parallel.integration.trainer_pipeline import TrainerPipeline, check_pipeline_arguments
from hyper_parallel.offloading.autograd import Swap
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens
from hyper_parallel.strategy import Strategy

_LOOKED_AT = 256
"""Rows whose length is looked at where the planner is asked."""


class SpreadTrainer(SpreadEvaluation):
    """What a Trainer does over ranks, done for a model that HyperParallel spreads.

    Put it before a Trainer's class. The loop, the callbacks, logging, schedules and the evaluation loop stay theirs.
    """

    def __init__(self, *args: Any, strategy: Given = None, swap: Swap | None = None, **kwargs: Any) -> None:
        """`strategy`: a Strategy, a dict, a YAML file of a strategy or a run, ``"auto"``; None shards everything over
        all ranks. `swap`: activations leave for the host's memory and come back. All else is the Trainer's own.

        Raises ConfigError for what cannot be honoured: docs/transformers.md lists it.
        """
        self._given, self._swap = strategy, swap
        self._budget: Budget | None = None
        self._micro = 0
        self._rows_checked = False
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is not None:
            check_arguments(arguments)
        super().__init__(*args, **kwargs)
        check_trainer(self)
        self._spread(self.model)

    # Spreading.

    def _spread(self, model: nn.Module) -> None:
        args = self.args
        check_model(model)
        rows = args.per_device_train_batch_size
        batch = rows * args.gradient_accumulation_steps * world_size()
        meant = adjusted(read(self._given, world_size()), args, model)
        length = self._longest() if meant.open else 0
        settled = strategy_of(meant, model, world=world_size(), batch=batch, length=length, rows=rows)
        strategy = settled.strategy
        check_strategy(strategy, self)
        check_overrides(self, pipeline=strategy.axes.pipeline > 1)
        check_budget(strategy.memory, self._swap)
        self._whole_parameters = parameters_that_count(model)
        within = has_budget(strategy, self._swap)
        if strategy.axes.pipeline > 1:
            self._pipeline = self._cut_into_stages(model, strategy, within)
            self.spread = ParallelRun(self._pipeline.handle)
        else:
            self.spread = ParallelRun.over(model, strategy, device=args.device, traceable=within)
            model.to(args.device)
            if within:
                self._budget = under_budget(self.spread, self._swap)
                self._lengths = FewLengths(self.spread.handle)
        args.gradient_accumulation_steps *= settled.accumulation
        # Plans of a budget are for whole forward passes.
        self._generate = EngineGenerate(model, self.spread, args.seed, uses=self._budget is None)
        self.accelerator: Any = SpreadAccelerator.of(self.accelerator, self.spread)
        # Around methods that may be the user's.
        for name, around in (
            ("training_step", self._around_step),
            ("create_optimizer", self._around_optimizer),
            ("get_batch_samples", self._around_samples),
        ):
            setattr(self, name, functools.partial(around, getattr(self, name)))
        self.gather_function = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(self.gather_function).parameters:
            self.gather_function = functools.partial(
                self.gather_function, use_gather_object=args.eval_use_gather_object
            )

    def _cut_into_stages(self, model: nn.Module, strategy: Strategy, within: bool) -> TrainerPipeline:
        check_pipeline_arguments(
            self.args,
            metrics=self.compute_metrics is not None,
            own_loss=self.compute_loss_func is not None or not has_next_token_loss(model),
            budget=within,
        )
        return TrainerPipeline.over(
            model, strategy, self.args, length=self._longest(), pad=self._padding_token
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not the whole model: its pieces go where they belong when it is spread."""

    def _around_optimizer(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer that the class's `create_optimizer` makes, by the names of the model's parameters, then on this
        rank's pieces of them.

        Raises IntegrationError for one whose update needs whole matrices, where they are split.
        """
        creates = self.optimizer is None
        found = create(*args, **kwargs)
        if creates:
            on_local(self.optimizer, self._spread_model.handle)
        return found

    # The step.

    def _around_samples(
        self, take: Callable[..., Any], batches: Iterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The micro-batches that the class's `get_batch_samples` takes, without rows that fill up the last one."""
        # Where one rank has all rows, the last batch is short by itself.
        filled = self._spread_model.data_ranks > 1
        return take(self._short(batches) if filled else batches, *args, **kwargs)

    def _short(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            state, rows = self.accelerator.gradient_state, self._train_batch_size
            if not self._rows_checked:
                check_rows(batch, state, rows, self._spread_model)
            warn_of_stream(state, drops=self.args.dataloader_drop_last)
            yield shortened(batch, new_rows(state, self._spread_model.data_index, rows), rows)

    def _around_step(
        self,
        step: Callable[..., Tensor],
        model: nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Forward and backward of one micro-batch by `step`, the `training_step` of the class; the mean over ranks of
        what this returns is its part of the step's loss."""
        spread = self._spread_model
        last = bool(self.accelerator.sync_gradients)
        micro, self._micro = self._micro, 0 if last else self._micro + 1
        rows = self._row_numbers(inputs, micro)
        if self._pipeline is not None:
            model.train()
            inputs = self._prepare_inputs(inputs)
            self._counted(inputs)
            tokens = num_items_in_batch if self._is_causal(inputs) else None
            return self._pipeline.micro_batch(inputs, rows, self.state.global_step, tokens, last)
        explained = contextlib.nullcontext() if self._budget is None else self._budget.explained()
        weight = functools.cache(functools.partial(self._weight, inputs))
        self._counts = self._said

        def part(loss: Tensor) -> Tensor:
            # A caller's own loss is of whole rows, the same on every rank of `context`.
            return loss / spread.loss_ranks if self._is_part else loss * weight() / spread.data_ranks

        with (
            explained,
            spread.handle.micro_batch(seed=self.args.seed, step=self.state.global_step, rows=rows, last=last),
            self.accelerator.dividing(part),
        ):
            loss = step(model, inputs, num_items_in_batch)
        if not self.accelerator.passes:
            kind = owner_of(self, "training_step") or type(self)
            raise IntegrationError(
                f"{kind.__name__}.training_step computed no gradients through self.accelerator.backward(loss), which "
                "scales them for the ranks; call it in place of loss.backward()"
            )
        if self._budget is not None:
            self._budget.tell()
        return loss.detach() if self._is_part else loss.detach() * weight()

    def compute_loss_context_manager(self) -> Any:
        """Nothing: the model computes in the strategy's dtypes."""
        own = owner_of(self, "autocast_smart_context_manager") is not None
        return super().compute_loss_context_manager() if own else contextlib.nullcontext()

    def _counted(self, inputs: Mapping[str, Any]) -> None:
        """A micro-batch was read; for a Trainer that counts its tokens."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This rank's part of the step's loss × the number of loss ranks: the mean over ranks is the loss.

        Next-token losses are computed split over the vocabulary, in chunks, and without logits. Other models' losses,
        and a `compute_loss_func`, are the Trainer's own.
        """
        spread = self._spread_model
        if self._is_causal(inputs) and num_items_in_batch is not None and not return_outputs:
            rows = self._rows(inputs)
            assert rows.labels is not None
            with documents_known(rows.several):
                loss = causal_lm_loss(
                    model,
                    rows.input_ids,
                    rows.labels,
                    rows.position_ids,
                    num_items_in_batch,
                    self._loss_config,
                    micro_batches=self.current_gradient_accumulation_steps,
                    **rows.rest,
                )
            self._counts = "part"
            # What the Trainer divides again, where it does not know that the step's tokens are counted.
            times = 1 if self._is_of_step(num_items_in_batch) else self.current_gradient_accumulation_steps
            return loss * spread.loss_ranks * times
        if spread.loss_ranks != spread.data_ranks and torch.is_grad_enabled():
            raise IntegrationError(
                "axes.context splits positions, and only a causal language model's own next-token loss is known to be "
                "a sum over them; set axes.context to 1 for compute_loss_func, or for a loss of the model's own"
            )
        self._counts = "step" if self._is_of_step(num_items_in_batch) else "mean"
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """The valid tokens of the whole step: of these micro-batches, summed over the shares of the batch.

        None for other models' losses: many that take the number leave it unread, and a mean of means is always right
        for rows that count alike.
        """
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        causal = self._is_causal(batch_samples[0])
        if not causal and self.compute_loss_func is None:
            return None
        spread = self._spread_model
        if not self._rows_checked and torch.is_grad_enabled():
            self._rows_checked = True
            spread.check_same_rows([batch["labels"] for batch in batch_samples])
        shifts = causal or getattr(self, "_loss_shifts_labels", False)
        counted = [batch for batch in batch_samples if not isinstance(batch, NoRows)]
        labels = [shifted(batch) if shifts else batch["labels"] for batch in counted]
        mine = sum((valid_tokens(one) for one in labels if one is not None), torch.tensor(0)).to(device)
        return spread.sum_of_data(mine).clamp(min=1)

    # What is counted.

    def _longest(self) -> int:
        """Positions of the longest of a few rows, for the planner; 0 where none can be looked at."""
        dataset = self.train_dataset
        max_length = getattr(self.args, "max_length", None) or 0
        if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return int(max_length)
        step = max(1, len(dataset) // _LOOKED_AT)
        rows = (dataset[at] for at in range(0, len(dataset), step))
        return max((len(row["input_ids"]) for row in rows if "input_ids" in row), default=int(max_length))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step, over all ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._spread_model.data_ranks)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """This rank's part of 6 · positions · parameters; the sum over ranks counts each row once."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs:
            return 0
        spread = self._spread_model
        copies = spread.world // spread.data_ranks
        return float(6 * inputs[name].numel() * self._whole_parameters / copies)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Transformers 5.12 and later ask, to clip by themselves; the accelerator's norm is that of all layouts."""
        return False

    # What is refused.

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial would spread a model anew beside the last one's process groups."""
        raise IntegrationError(
            "hyperparameter_search is not supported with a spread model; start a run for each trial"
        )
