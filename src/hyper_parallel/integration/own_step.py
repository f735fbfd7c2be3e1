"""One optimizer step in a training loop of the user's own, under any strategy: `hp.step`.

    step = hp.step(model, strategy, optimizer={"name": "adamw", "lr": 3e-4})
    for batch in batches:
        out = step(batch)                       # out.loss, out.grad_norm, out.tokens

The parts are those of `hyper-parallel train`: a run file is made of the arguments and the shape of the first batch, its
model is parallelized as `train` does it (one mesh, captured or eager; stages of a pipeline; a memory budget), and its
recipe makes the update. Submodels differ in who has which rows, and share the recipe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import backend
from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import CheckpointError, NonFiniteError, StrategyError
from hyper_parallel.estimate.predict import cluster_of, predict_run
from hyper_parallel.estimate.prediction import Prediction
from hyper_parallel.graph.liveness import peak
from hyper_parallel.integration.checkpoints import load, save, saved_tensors
from hyper_parallel.integration.own_parts import Declared, Gradients, Loss, StepParts
from hyper_parallel.integration.own_rows import Batch
from hyper_parallel.integration.parallel_run import Given, check_world, read, world_size
from hyper_parallel.launch import stop
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.shard.process_mesh import DATA_AXES
from hyper_parallel.step.accumulation import repeated
from hyper_parallel.step.lr_schedule import Schedule
from hyper_parallel.step.program_runner import whole_loss
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.step.submodel_rows import Inputs


def step(
    model: Any,
    strategy: Given = None,
    *,
    loss: Loss | LossConfig | Mapping[str, Any] | None = None,
    optimizer: Any = None,
    batch: Batch | None = None,
    micro_batch: int | None = None,
    clip: float | None = 1.0,
    schedule: Schedule | Mapping[str, Any] | None = None,
    steps: int = 100,
    router_bias_rate: float = 0.0,
    engine: Literal["graph", "eager"] = "graph",
    compile: bool = False,
    inputs: Inputs = dict,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Step:
    """The optimizer step of `model` under `strategy`, on the processes that there are.

    `model`: an unmodified module, with values (rank 0's count) or on the meta device; or a Transformers config, a dict
    with its `model_type`, or the folder or Hub id of a model. A model without values gets those of its folder, or new
    ones, a function of `seed`. `strategy`: a Strategy, dict or file; left out, all ranks shard. Its axes multiply to
    the processes of the process group, which torchrun's script, or our launcher, has made.

    `loss`: left out or options of `train.loss`: the model's own next-token loss; a function (`Loss`) runs the steps of
    one mesh eagerly. `optimizer`: as `train.optimizer`; or a constructor that takes parameters and returns an
    elementwise optimizer of PyTorch's, whose steps run eagerly. `clip`, `schedule` (a section, over `steps`; or a
    function of the step to the share of the rate; left out: constant), `router_bias_rate`, `engine`, `compile`: as the
    keys of `train`. `micro_batch`: rows that a rank computes at once. `inputs`: of submodels, as of `hp.submodels`.

    The model is parallelized for the shape of the first batch, or of `batch` where it is given, now. Raises
    HyperParallelError of the kind that `hyper-parallel train` raises.
    """
    made = Step(
        Declared(
            model,
            read(strategy, world_size()),
            {
                "clip": clip,
                "steps": steps,
                "router_bias_rate": router_bias_rate,
                "engine": engine,
                "compile": compile,
                "graph_cache": False,
                "schedule": _section(schedule) or {"name": "constant"},
                **({"loss": _section(loss)} if _section(loss) else {}),
                **({"optimizer": _section(optimizer)} if _section(optimizer) else {}),
            },
            micro_batch,
            loss if callable(loss) else None,
            optimizer if callable(optimizer) else None,
            schedule if callable(schedule) else None,
            inputs,
            seed,
            device,
        )
    )
    if batch is not None:
        made.prepare(batch)
    return made


def _section(given: Any) -> Any:
    """A section of a run file as data; None for a function, or where nothing is given."""
    if given is None or callable(given):
        return None
    return given.model_dump(mode="json") if hasattr(given, "model_dump") else dict(given)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank."""

    state: dict[str, int]
    """Of what lives across steps: parameters, buffers, gradients that are there now, optimizer."""
    peak: int | None
    """The most that a step's tensors come to, by its graph, or by its plan under a budget; None for an eager step, a
    pipeline's or one of submodels."""
    at_peak: dict[str, int]
    """The same by kind; empty where it is not known, and under a budget."""
    budget: int | None
    """`memory.device` of the strategy."""
    plans: tuple[str, ...]
    """What each plan within the budget comes to, in a line."""
    allocated: int
    """What the device's allocator, or on a CPU the process, holds now."""


class Step:
    """A model, its optimizer and the steps that train it."""

    def __init__(self, declared: Declared) -> None:
        """Made by `step`."""
        self._declared, self.done = declared, 0
        """Updates so far."""
        strategy = declared.strategy
        if strategy.open:
            raise StrategyError(
                "strategy: hp.step takes axes and bytes that are written; hyper-parallel plan chooses them"
            )
        # What is wrong with the arguments is told before there is a batch.
        declared.run()
        self._made: StepParts | None = None
        self._pending: list[Gradients] = []

    def prepare(self, batch: Batch) -> None:
        """Parallelize the model for batches like this one. A collective; the first step does it where nobody did."""
        if self._made is None:
            if not self._declared.strategy.submodels:
                check_world(self._declared.strategy, world_size())
            self._made = StepParts(self._declared, batch)

    def __call__(self, batch: Batch) -> StepResult:
        """One step: gradients of the batch, the checks, the update. A collective.

        `batch`: rows of this data rank (`data_rank`), or a list of micro-batches (`integration.own_rows`). Raises
        NonFiniteError where the loss or the gradient norm is not finite, when nothing is updated; DataError.
        """
        self.prepare(batch)
        parts = self._parts
        if self._pending or parts.graphs is None:
            self.forward_backward(batch)
            return self.update()
        graphs = parts.take(*parts.rows.load(batch, self.done))
        result = self._updated(
            lambda: graphs.run(load_next=None, memory=self._allocated, requests=stop.requests)
        )
        parts.tell()
        return result

    def forward_backward(self, batch: Batch, *, tokens: float | None = None) -> Tensor:
        """Add the gradients of a batch; its loss, fp32 [], the same number on every rank. A collective.

        `tokens`: what the sum of losses is divided by; left out, the valid tokens of this batch on all ranks. Several
        calls before `update` add up. Raises StrategyError under a memory budget; DataError.
        """
        self.prepare(batch)
        parts = self._parts
        if parts.parallel.budget is not None:
            raise StrategyError(
                "memory.device: the update is part of the step's graph, and gradients have no memory of their own in "
                "its plan; call step(batch), or leave the budget out"
            )
        gradients = parts.gradients(batch, self.done, tokens)
        self._pending.append(gradients)
        return whole_loss(parts.handle, gradients.part)

    def update(self) -> StepResult:
        """Update by the gradients that are there, and clear them; the loss is the sum of those of their batches. A
        collective. Raises as a step does."""
        parts, pending = self._parts, self._pending
        if not pending:
            raise StrategyError("update: there are no gradients; call forward_backward(batch) first")
        self._pending = []
        parts.stepper.take(pending[-1].batch, torch.stack([one.tokens for one in pending]).sum())
        loss = torch.stack([one.part for one in pending]).sum()
        return self._updated(
            lambda: parts.stepper.update(loss, load_next=None, memory=self._allocated, requests=stop.requests)
        )

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a valid token of held-out rows on all ranks, without dropout. A collective. Raises
        DataError."""
        self.prepare(batch)
        return self._parts.evaluate(batch)

    def _updated(self, run: Callable[[], StepResult]) -> StepResult:
        try:
            result = run()
        except NonFiniteError:
            self.model.zero_grad(set_to_none=True)
            raise
        self.done += 1
        if self._parts.balancer is not None:
            self._parts.balancer.after_step(result.expert_loads)
        return result

    # Which rows this rank gives.

    @property
    def data_ranks(self) -> int:
        """How many shares of the rows there are: replicate · shard; 1 for submodels, each of which takes its own."""
        return 1 if self._declared.strategy.submodels else self._declared.strategy.axes.data

    @property
    def data_rank(self) -> int:
        """Which of them this rank gives."""
        if self._declared.strategy.submodels or world_size() == 1:
            return 0
        rank, groups = torch.distributed.get_rank(), DeviceGroup.of_pipeline(self._declared.strategy)
        return next(group for group in groups if rank in group.ranks).index(DATA_AXES, rank)

    # State.

    @property
    def model(self) -> nn.Module:
        """The parallelized model, which a pipeline's or submodels' ranks cannot call."""
        return self._parts.model

    @property
    def handle(self) -> ShardedModel:
        """That of the parallelized model."""
        return self._parts.handle

    @property
    def optimizer(self) -> Any:
        """The step's; that of PyTorch's where a constructor was given."""
        found = self._parts.optimizer
        return getattr(found, "inner", found)

    @property
    def plan(self) -> tuple[str, ...]:
        """Stages and schedule of a pipeline, or the submodels and what crosses between them, a line each."""
        parts = self._parts
        if parts.submodels is not None:
            return tuple(parts.submodels.plan.splitlines())
        return () if parts.parallel.pipeline is None else tuple(parts.parallel.pipeline.plan.described)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: under `tensors` each parameter, buffer and tensor of the optimizer by its name in a
        checkpoint, not copied, with its Layout; under `state` the rest as JSON. A collective.

        Raises StrategyError under a memory budget, where tensors are not on the device: `save` reads them one by one.
        """
        self._refuse_budget("state_dict")
        tensors, optimizer = saved_tensors(self.handle, self.optimizer)
        return {"tensors": tensors, "state": {**self._state(), "optimizer": optimizer}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave under the same strategy (a copy of it: tensors are not copied). Other
        strategies read what `save` wrote. Raises CheckpointError for other tensors."""
        self._refuse_budget("load_state_dict")
        if isinstance(self.optimizer, TorchOptimizer):
            raise StrategyError(
                "load_state_dict: an optimizer of PyTorch's is taken up from a folder: save, load"
            )
        pieces, _ = saved_tensors(self.handle, self.optimizer)
        given = state["tensors"]
        for name in {**pieces, **given}:
            mine, theirs = pieces.get(name), given.get(name)
            if mine is None or theirs is None or mine.local.shape != theirs.local.shape:
                raise CheckpointError(
                    f"{name} is of another model or strategy; read it from a folder: save, load"
                )
        with torch.no_grad():
            for name, piece in pieces.items():
                piece.local.copy_(given[name].local)
        self._resume(state["state"], state["state"]["optimizer"])

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of model, optimizer and step into `folder`: verified, and taken up under any other
        strategy (docs/checkpoints.md). A collective. Raises CheckpointError."""
        save(Path(folder), self.handle, self.optimizer, self.done, self._state())

    def load(self, folder: str | Path) -> None:
        """Go on from the newest checkpoint in `folder`, whatever its strategy. A collective. Raises CheckpointError."""
        self._resume(load(Path(folder), self.handle, self.optimizer), None)

    def _state(self) -> dict[str, Any]:
        parts = self._parts
        hf: Any = getattr(self.model, "config", None)
        known = json.loads(hf.to_json_string(use_diff=False)) if hasattr(hf, "to_json_string") else None
        experts = {} if parts.balancer is None else {"experts": parts.balancer.state()}
        return {"step": self.done, "model_config": known, **experts}

    def _resume(self, state: Mapping[str, Any], optimizer: Any) -> None:
        if optimizer is not None:
            self.optimizer.load_state(optimizer)
        if self._parts.balancer is not None:
            self._parts.balancer.load_state(state.get("experts"))
        self.done = int(state["step"])

    def _refuse_budget(self, what: str) -> None:
        if self._parts.parallel.budget is not None:
            raise StrategyError(
                f"{what}: memory.device keeps tensors elsewhere between steps; use save and load, which read them one "
                "by one"
            )

    @property
    def memory(self) -> StepMemory:
        """Bytes of this rank. A collective where a constructor made the optimizer."""
        parts = self._parts
        state = Counter[str]()
        for one in parts.handle.owned():
            state["parameters"] += one.local.nbytes
            state["gradients"] += 0 if one.grad is None else one.grad.nbytes
        state["buffers"] = sum(one.nbytes for one in parts.model.buffers() if not one.is_meta)
        tensors, _ = saved_tensors(parts.handle, self.optimizer)
        state["optimizer"] = sum(
            one.local.nbytes for name, one in tensors.items() if name.startswith("optimizer.")
        )
        budget, graphs = parts.parallel.budget, parts.parallel.graphs
        most, by_kind = None, dict[str, int]()
        if budget is not None:
            most = budget.peak
        elif graphs is not None and graphs.captured:
            last = graphs.captured[-1]
            whole = last.plain if last.loop is None else repeated(last.loop, self.config.micro_batches)
            found = peak(whole)
            most, by_kind = found.bytes, {str(kind): size for kind, size in found.by_kind.items()}
        return StepMemory(
            dict(state),
            most,
            by_kind,
            None if budget is None else budget.bytes,
            () if budget is None else tuple(budget.plans),
            int(self._allocated),
        )

    @property
    def _allocated(self) -> float:
        return float(backend(self._parts.device.type).memory_allocated())

    def predict(self, cluster: Cluster | str, batch: Batch | None = None) -> Prediction:
        """What this step takes on a cluster, a preset's name or a file, by simulation. No ranks are needed.

        `batch`: rows of a data rank, of whose shape the steps are; needed before the first step. Raises ConfigError for
        a cluster that is too small, StrategyError for submodels and in a process that has a process group.
        """
        declared = self._declared
        if declared.strategy.submodels:
            raise StrategyError(
                "predict: the step of submodels is not simulated; hyper-parallel plan estimates it"
            )
        if torch.distributed.is_initialized():
            raise StrategyError(
                "predict: ranks are simulated by a process group of their own, and this process has one; call "
                "hp.step(model, strategy).predict(cluster, batch) in a process without one"
            )
        plain = declared.module(declared.run()) if self._made is None else self._made.plain
        if plain is None or (batch is None and self._made is None):
            raise StrategyError("predict: give it a batch, and a model that can be copied")
        config = self.config if batch is None else declared.run(batch, declared.multiple(plain))
        known = cluster if isinstance(cluster, Cluster) else cluster_of(cluster, config)
        return predict_run(config, known, model=without_values(plain))

    @property
    def config(self) -> RunConfig:
        """The run file that the step is."""
        return self._parts.config

    def close(self) -> None:
        """Give back the tiers of a memory budget; the model's values are on the device then."""
        budget = None if self._made is None else self._made.parallel.budget
        if budget is not None:
            budget.bring_back()
            budget.close()

    @property
    def _parts(self) -> StepParts:
        if self._made is None:
            raise StrategyError(
                "the model is parallelized for the shape of the first batch, and there was none: give "
                "hp.step(..., batch=…) one, whose values do not count"
            )
        return self._made
