"""The parts of one training run on one rank, made from its run file before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hyper_parallel.config import CheckpointConfig, RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch import Worker
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.experts.loads import has_biases
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import Built, Parallelized, build, fill
from hyper_parallel.step.capture_train_step import state as state_of
from hyper_parallel.step.epochs import with_steps
from hyper_parallel.step.expert_balance import ExpertBalancer
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.profiling import Profiling, StepTraces
from hyper_parallel.step.recipe import MakeOptimizer, Recipe
from hyper_parallel.step.submodel_run import SubmodelBatches
from hyper_parallel.train.checkpoint_state import RunCheckpoints
from hyper_parallel.train.evaluate import Evaluation
from hyper_parallel.train.reporter import Reporter
from hyper_parallel.train.summary import BudgetMeter
from hyper_parallel.workload import mfu


class Meter:
    """Adds up the seconds of steps, without what lies between them (evaluation, saving)."""

    def __init__(self, flops_per_token: float, devices: int, peak: float | None) -> None:
        self._flops, self._devices, self._peak = flops_per_token, devices, peak
        self.seconds = 0.0
        self.steps = 0
        self._tokens = 0
        self._marked = (0.0, 0, 0)
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self, tokens: int) -> float:
        """The step ended; the host had waited for the device's gradients in it. `tokens`: positions computed, over all
        ranks. The step's seconds."""
        seconds = time.perf_counter() - self._began
        self.seconds += seconds
        self.steps += 1
        self._tokens += tokens
        return seconds

    def rates(self) -> dict[str, float]:
        """`seconds` a step, `tokens_per_second` and, with a known peak, `mfu`, of the steps since the last call."""
        seconds, steps, tokens = self._marked
        self._marked = (self.seconds, self.steps, self._tokens)
        return self._rates(self.seconds - seconds, self.steps - steps, self._tokens - tokens)

    def overall(self) -> dict[str, float]:
        """The same over all steps; empty before the first."""
        return self._rates(self.seconds, self.steps, self._tokens)

    def _rates(self, seconds: float, steps: int, tokens: int) -> dict[str, float]:
        if not steps or seconds <= 0:
            return {}
        rates = {"seconds": seconds / steps, "tokens_per_second": tokens / seconds}
        if self._peak is not None:
            rates["mfu"] = mfu(tokens * self._flops, seconds, self._devices, self._peak)
        return rates


class SaveInterval:
    """The interval that `checkpoint.every` declares, as one rank's clock sees it.

    Clocks differ between ranks: what `elapsed` says is a wish, on which the ranks agree in the step itself.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._seconds, self._clock = config.every_steps, config.every_seconds, clock
        self._began = clock()

    def elapsed(self) -> bool:
        """Whether the time since the last checkpoint, or since the run began, is up."""
        return self._seconds is not None and self._clock() - self._began >= self._seconds

    def reached(self, step: int) -> bool:
        """Whether steps are counted and `step` updates are a multiple of the interval. Equal on every rank."""
        return self._steps is not None and step % self._steps == 0

    def saved(self) -> None:
        """A checkpoint is being written: the time begins anew."""
        self._began = self._clock()


@dataclass(frozen=True)
class RunParts:
    """The parts of a run. They have their state; which there are does not change."""

    config: RunConfig
    worker: Worker
    built: Built
    handle: ShardedModel
    recipe: Recipe
    balancer: ExpertBalancer | None
    """Places experts by their loads; None where the strategy does not ask for it."""
    prompt: list[int]
    """Token ids that the sample goes on from; empty where none is wanted."""
    batches: Batches | SubmodelBatches
    evaluation: Evaluation | None
    """None of submodels, which evaluate by themselves."""
    checkpoints: RunCheckpoints
    reporter: Reporter
    meter: Meter
    interval: SaveInterval
    profiling: Profiling | None
    """On rank 0 of a run that asks for one, of steps that are one graph."""
    traces: StepTraces | None
    """Of a run that asks for a profile, and has parts of the model on several ranks."""
    budget_meter: BudgetMeter | None
    """None without a memory budget."""

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module | None, worker: Worker) -> RunParts:
        """Raises what `step.build.build` does, and ConfigError for a bias rate of a model without such biases."""
        device = worker.device
        built = build(config, model, device)
        config = with_steps(config, built.text)
        train = config.train
        handle = sharded(built.model)
        # Now, so that a prompt that the chat template does not take costs no run.
        prompt = built.text.prompt(train.sample.prompt) if train.sample else []
        if train.router_bias_rate and not has_biases(built.model):
            raise ConfigError(
                f"train.router_bias_rate is {train.router_bias_rate}, but no router of "
                f"{type(built.model).__name__} has a bias to correct; leave it out"
            )
        recipe = recipe_of(config, built, handle, device)
        balancer = ExpertBalancer.of(handle, recipe.optimizer)
        flops = built.flops.per_token(config.data.sequence)
        peak = worker.backend.peak_flops(getattr(torch, config.effective_strategy.precision.compute))
        tokens = train.batch * config.data.sequence
        return cls(
            config,
            worker,
            built,
            handle,
            recipe,
            balancer,
            prompt,
            built.submodels.batches
            if built.submodels is not None
            else Batches(
                built.text.train,
                built.text.order,
                train.batch,
                config.micro_batch,
                handle,
                device,
                balance=config.data.balance,
            ),
            None
            if built.submodels is not None
            else Evaluation(
                built.text.eval,
                train.eval.batches,
                train.batch,
                config.micro_batch,
                handle,
                device,
                LossConfig(chunk=train.loss.chunk),
            ),
            RunCheckpoints(config, built, recipe.optimizer, balancer),
            Reporter(config, leads=worker.rank == 0),
            Meter(flops, worker.world, peak),
            SaveInterval(config.checkpoint),
            Profiling(train.profile, Path(config.out), worker, flops * tokens, peak)
            if train.profile is not None and worker.rank == 0 and built.accumulate is None
            else None,
            StepTraces(train.profile.steps, Path(config.out), worker)
            if train.profile is not None and built.accumulate is not None
            else None,
            None if built.budget is None else BudgetMeter(built.budget),
        )

    def held_out_loss(self, ends: Callable[[], bool]) -> float | None:
        """As `Evaluation.loss`; None also where nothing is held out."""
        if self.built.submodels is not None:
            return self.built.submodels.evaluate(ends)
        if not self.evaluation:
            return None
        return self.evaluation.loss(self.model, ends, self.built.pipeline)

    @property
    def model(self) -> nn.Module:
        """The parallelized model."""
        return self.built.model


def recipe_of(
    config: RunConfig,
    built: Parallelized,
    handle: ShardedModel,
    device: torch.device,
    make_optimizer: MakeOptimizer = build_optimizer,
) -> Recipe:
    """The step, of a model that has values; under a budget its state is where it rests between steps."""
    try:
        with built.settling():
            fill(built, config, device)
            recipe = Recipe.of(config, built.model, make_optimizer)
        if built.budget is not None:
            known = state_of(handle, recipe.optimizer)
            built.budget.settle_others({name: tensor.detach() for name, (_, tensor) in known.items()})
    except BaseException:
        if built.budget is not None:
            built.budget.close()
        raise
    return recipe
