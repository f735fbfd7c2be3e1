"""The parts of a step in a loop of the user's own, made for the shape of its first batch.

They are those of `hyper-parallel train`. A run file is made of the arguments and that shape, and its model is
parallelized as a run's is: captured or eager on one mesh, in the stages of a pipeline, within a memory budget.
Submodels, whose ranks have other rows than a mesh's, are planned as `hp.submodels` plans them. One recipe updates all.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from hyper_parallel.compat.collectives import device_type
from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.integration.local_optimizer import ScheduledOptimizer
from hyper_parallel.integration.own_rows import Batch, LoopRows, holds_documents, micro_batches_of, whole_rows
from hyper_parallel.integration.streamed_sharding import as_on_rank_0
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.forward import call, documents_known, inference
from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.shard.owner_check.check import remember, verdicts
from hyper_parallel.shard.parallelize import on_simulated_ranks
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.shard.region_check.check import SKIP, checks, vocabulary_of
from hyper_parallel.shard.vision_and_audio_towers import towers_of
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.build import (
    Parallelized,
    artifacts_of,
    causal_model,
    eager,
    has_no_values,
    on_meta,
    parallelized,
    transformers_config,
)
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.expert_balance import ExpertBalancer
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.lr_schedule import Schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.owner_refusals import refuse_unlike
from hyper_parallel.step.pipeline import device_of
from hyper_parallel.step.program_runner import gradients_added, whole_loss
from hyper_parallel.step.submodel_rows import Inputs
from hyper_parallel.step.submodel_run import rows_of_micro_batch
from hyper_parallel.step.submodels import Submodels, submodels
from hyper_parallel.step.train_step import Stepper, accumulate
from hyper_parallel.strategy import Strategy
from hyper_parallel.train.run_parts import recipe_of
from hyper_parallel.units import round_up
from hyper_parallel.workload import flops_of_model

log = logging.getLogger(__name__)

Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""(what the model returns, shifted labels int64 [B, S], valid tokens of the step) to the sum of the losses of these
rows' tokens divided by the step's number, with gradients."""


@dataclass(frozen=True)
class Declared:
    """The arguments of `hp.step`."""

    model: Any
    strategy: Strategy
    train: Mapping[str, Any]
    """Keys of a run file's section."""
    micro_batch: int | None
    loss: Loss | None
    """None for that of `train`."""
    optimizer: Callable[[Any], TorchOptimizer] | None
    """None for that of `train`."""
    schedule: Schedule | None
    """None for that of `train`."""
    inputs: Inputs
    seed: int
    device: torch.device | str | None

    def run(self, batch: Batch | None = None, multiple: int = 1, name: str = "hp.step") -> RunConfig:
        """The run file that this is for batches of this shape; None for the least that the axes divide.

        `multiple`: what the length of rows is padded to; `name`: by which the ranks of this run, and of no other, share
        a pool of memory. Raises ConfigError and DataError.
        """
        axes, each = self.strategy.axes, self.micro_batch
        rows, length = axes.pipeline * (each or 1), 2 * axes.tensor * axes.context
        if batch is not None:
            parts = micro_batches_of(batch, each)
            rows = sum(one["input_ids"].size(0) for one in parts)
            length = round_up(max(one["input_ids"].size(1) for one in parts), multiple)
            if not isinstance(batch, Mapping):
                each = parts[0]["input_ids"].size(0)
        return from_dict(
            {
                "version": 1,
                "out": name,
                "seed": self.seed,
                "model": self._section(),
                # Nothing is read of it but how long rows are.
                "data": {"train": "python-stdlib", "sequence": length},
                "train": {
                    **self.train,
                    "batch": rows * (1 if self.strategy.submodels else axes.data),
                    "micro_batch": each,
                },
                "strategy": self.strategy.model_dump(mode="json"),
            },
            source="hp.step",
        )

    def _section(self) -> dict[str, Any]:
        """The section `model` of the run file."""
        if isinstance(self.model, Mapping):
            return (
                dict(self.model) if {"config", "path"} & self.model.keys() else {"config": dict(self.model)}
            )
        if isinstance(self.model, str | Path):
            return {"path": str(self.model)}
        hf = getattr(self.model, "config", self.model)
        return {"config": {"model_type": getattr(hf, "model_type", None) or type(self.model).__name__}}

    def module(self, config: RunConfig) -> nn.Module:
        """The model before any strategy; from a config or a folder without values. Raises ConfigError."""
        if isinstance(self.model, nn.Module):
            return self.model
        if isinstance(self.model, str | Path | Mapping):
            return on_meta(transformers_config(config.model), config)
        return causal_model(self.model, getattr(torch, config.effective_strategy.precision.param))

    def multiple(self, model: nn.Module) -> int:
        """What the positions of a row are padded to a multiple of."""
        if self.strategy.submodels:
            return 1
        return length_multiple(make_plan(model, self.strategy.of_stage))


class StepParts:
    """What runs the steps on one rank."""

    def __init__(self, declared: Declared, batch: Batch) -> None:
        """For batches like this one. A collective. Raises HyperParallelError as a run does."""
        strategy, config = declared.strategy, declared.run()
        self._declared, self.model = declared, declared.module(config)
        self.plain = _copy(self.model)
        """The model before any strategy, without values; None where it cannot be copied."""
        filled = not any(one.is_meta for one in self.model.parameters())
        self.device = _device(declared.device, self.model if filled else None)
        if filled:
            as_on_rank_0(self.model)
        shared = _of_all_ranks(secrets.token_hex(4))[0]
        self.config = declared.run(batch, declared.multiple(self.model), f"hp.step-{shared}")
        self.submodels: Submodels | None = None
        if strategy.submodels:
            self.submodels = self._submodels(batch)
            parallel = Parallelized(model=self.model, fresh=has_no_values(self.model))
        else:
            parallel = self._parallelized(batch)
        self.parallel, self.handle = parallel, sharded(self.model)
        recipe = recipe_of(self.config, parallel, self.handle, self.device, self._make_optimizer)
        self.optimizer = recipe.optimizer
        if declared.schedule is not None:
            recipe = replace(recipe, schedule=declared.schedule)
        self.recipe = recipe
        self.balancer = ExpertBalancer.of(self.handle, recipe.optimizer)
        self.stepper = Stepper(recipe)
        self.graphs = None if parallel.graphs is None else GraphStepper(recipe, parallel.graphs)
        self._begun: set[BatchShape] = set()

    # How the model is parallelized.

    def _parallelized(self, batch: Batch) -> Parallelized:
        """On one mesh, or in the stages of a pipeline."""
        declared, config = self._declared, self.config
        refused = self._documents_refused()
        documents = any(_of_all_ranks(any(map(holds_documents, micro_batches_of(batch, None)))))

        def first_shape(handle: ShardedModel) -> BatchShape:
            loaded, _ = self._rows(handle, self.device, refused).load(batch, 0)
            return BatchShape.of(loaded.micro)

        apart = declared.loss is not None or declared.optimizer is not None or _has_rest(batch)
        if any(_of_all_ranks(apart)) and config.train.engine == "graph":
            self._refuse_without_graph()
            if declared.strategy.axes.pipeline == 1:
                config = self.config = eager(config)
        artifacts = None
        if config.train.compile and self.plain is not None:
            artifacts = artifacts_of(config, flops_of_model(self.plain), self.device)
        parallel = parallelized(config, self.model, first_shape, documents, self.device, artifacts)
        rows = self._rows(sharded(self.model), self.device, refused)
        rows.documents, rows.captured = documents, parallel.graphs is not None
        if parallel.pipeline is not None and rows.captured and not documents:
            rows.documents_refused = refused or (
                "the budget of a pipeline was planned for rows of one document each; give hp.step(batch=…) a batch "
                "whose rows hold several"
            )
        self.rows = rows
        return parallel

    def _rows(self, handle: ShardedModel, device: torch.device, refused: str | None) -> LoopRows:
        # A pipeline's micro-batches are cut small where nobody says how.
        piped = self.config.effective_strategy.axes.pipeline > 1
        rows = LoopRows(handle, device, self.config.micro_batch if piped else self._declared.micro_batch)
        rows.documents_refused = refused
        return rows

    def _refuse_without_graph(self) -> None:
        """Raise StrategyError for what runs eagerly alone under a strategy that needs the step's graph."""
        strategy, own_loss = self._declared.strategy, self._declared.loss is not None
        key = "memory.device" if strategy.memory.device is not None else "axes.pipeline"
        if strategy.memory.device is not None or (strategy.axes.pipeline > 1 and own_loss):
            raise StrategyError(
                f"{key} needs the step's graph, which has neither a loss function nor an optimizer's constructor nor "
                f"inputs beside tokens and positions; give options of train.loss and train.optimizer, or leave {key} "
                "out"
            )

    def _documents_refused(self) -> str | None:
        """Compare the model's own loss with what is computed here. Returns why rows of several documents are refused.

        Raises ConfigError where the loss would be another one, StrategyError where rows depend on each other.
        """
        config, model = self.config, self.model
        if self._declared.loss is not None or not checks(config.effective_strategy):
            return None
        if vocabulary_of(model) is None or any(True for _ in towers_of(model)):
            return None
        found = verdicts(model, ("loss", "rows", "length", "packing"), on_simulated_ranks)
        remember(model, found)
        refuse_unlike(config, model, found)
        packing = found["packing"]
        if packing.verdict == "right":
            return None
        return f"documents that share a row would depend on each other ({packing.detail}); give each its own ({SKIP})"

    def _submodels(self, batch: Batch) -> Submodels:
        declared, config = self._declared, self.config
        if declared.loss is not None:
            raise StrategyError(
                "strategy.submodels: submodels are cut from a captured step, which has no loss function"
            )
        rows = whole_rows(batch)
        return submodels(
            self.model,
            declared.strategy.submodels,
            rows,
            micro_batches=config.train.batch // rows_of_micro_batch(config),
            strategy=declared.strategy.model_copy(update={"submodels": {}}),
            inputs=declared.inputs,
            seed=declared.seed,
            loss=config.train.loss,
            device=self.device,
        )

    def _make_optimizer(self, model: nn.Module, config: Any) -> Any:
        make = self._declared.optimizer
        if make is None:
            return build_optimizer(model, config)
        if self._declared.strategy.expert_balance is not None:
            raise StrategyError(
                "expert_balance moves the optimizer's state with the experts, which that of a constructor cannot; give "
                "options of train.optimizer, or leave it out"
            )
        return ScheduledOptimizer(make, sharded(model))

    # A step's rows and passes.

    def take(self, batch: StepBatch, tokens: Tensor) -> GraphStepper:
        """What runs the step of this batch from its graph. A collective where its shape is new."""
        assert self.graphs is not None
        assert self.parallel.graphs is not None
        shape = self.parallel.graphs.shape_of(batch.micro)
        if shape in self._begun:
            self.graphs.take(batch, tokens)
        else:
            self.graphs.begin(batch)
            self._begun.add(shape)
        return self.graphs

    def tell(self) -> None:
        """Log what is new about the graphs: shapes that were captured, plans that were made."""
        for note in [] if self.parallel.graphs is None else self.parallel.graphs.told():
            log.info("%s", note)

    def gradients(self, batch: Batch, step: int, tokens: float | None) -> Gradients:
        """Add the gradients of a batch. A collective."""
        if self.submodels is not None:
            rows = whole_rows(batch)
            count = float(valid_tokens(rows["labels"])) if tokens is None else tokens
            loss = self.submodels.forward_backward(rows, step=step, tokens=count)
            total = torch.tensor(count, device=self.device)
            mine = StepBatch(step, list(range(rows["labels"].size(0))), [], total)
            # The loss is that of the whole step: one rank speaks for all.
            return Gradients(loss * float(self.handle.rank == 0), total, mine)
        mine, total = self.rows.load(batch, step)
        if tokens is not None:
            total = torch.tensor(float(tokens), device=self.device)
        return Gradients(self._accumulated(mine, total), total, mine)

    def _accumulated(self, batch: StepBatch, tokens: Tensor) -> Tensor:
        """This rank's part of the loss, whose gradients are added."""
        recipe, pipeline = self.recipe, self.parallel.pipeline
        if pipeline is not None:
            with gradients_added(self.handle):
                return pipeline.train(batch, tokens, batch.micro[0].several)
        loss_of = causal_lm_loss if self._declared.loss is None else self._own_loss
        return accumulate(self.model.train(), self.handle, batch, tokens, recipe.seed, recipe.loss, loss_of)

    def _own_loss(
        self,
        model: nn.Module,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None,
        tokens: Tensor,
        options: LossConfig | None = None,
        *,
        micro_batches: int = 1,
        **inputs: Any,
    ) -> Tensor:
        assert self._declared.loss is not None
        return self._declared.loss(call(model, input_ids, position_ids, **inputs), labels, tokens)

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a valid token, without dropout. A collective."""
        if self.submodels is not None:
            return float(self.submodels.evaluate(whole_rows(batch)))
        mine, tokens = self.rows.load(batch, 0)
        if self.parallel.pipeline is not None:
            part = self.parallel.pipeline.evaluate(mine.micro, mine.micro[0].several)
            return float(whole_loss(self.handle, part) / tokens)
        loss_of = causal_lm_loss if self._declared.loss is None else self._own_loss
        options = LossConfig(chunk=self.config.train.loss.chunk)
        part = torch.zeros((), device=self.device)
        with inference(self.model):
            for one in mine.micro:
                with documents_known(bool(one.several)):
                    rest: dict[str, Any] = dict(one.extra)
                    part += loss_of(
                        self.model, one.input_ids, one.labels, one.position_ids, tokens, options, **rest
                    )
        return float(whole_loss(self.handle, part))


@dataclass(frozen=True)
class Gradients:
    """What a batch came to whose gradients were added."""

    part: Tensor
    """This rank's part of the loss, fp32 []."""
    tokens: Tensor
    """What the sum of losses was divided by, fp32 []."""
    batch: StepBatch


def _copy(model: nn.Module) -> nn.Module | None:
    try:
        return without_values(model)
    except Exception:  # a module of the user's may hold what cannot be copied
        return None


def _device(given: torch.device | str | None, filled: nn.Module | None) -> torch.device:
    """Where the steps run. Raises StrategyError for a model whose values are elsewhere."""
    known = device_of(filled) if filled is not None else None
    if given is None:
        return known or torch.device(
            device_type() if dist.is_available() and dist.is_initialized() else "cpu"
        )
    device = torch.device(given)
    if known is not None and known.type != device.type:
        raise StrategyError(
            f"the model's values are on {known}, and the steps are to run on {device}; move it there, or build it on "
            "the meta device"
        )
    return device


def _has_rest(batch: Batch) -> bool:
    """Whether the model is given more than tokens and their positions."""
    known = {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"}
    return any(one.keys() - known for one in micro_batches_of(batch, None))


def _of_all_ranks(mine: Any) -> list[Any]:
    """What each rank has. A collective."""
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return [mine] if alone else gather_objects(mine)
