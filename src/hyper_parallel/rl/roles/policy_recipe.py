"""The actor's update as a recipe of the training step, which both engines run, and its graphs.

A step's loss is the policy's in place of next-token prediction's: it takes more inputs for each position, and adds up
metrics beside itself. All else (gradients, norm, clipping, the update; capture, passes, compilation) is `step`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config import DataConfig
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.rl.losses.policy import PolicyObjective
from hyper_parallel.rl.roles.models import trained_policy
from hyper_parallel.rl.roles.policy_update import (
    GivenGradient,
    MetricSums,
    MicroRows,
    PolicyTokens,
    means,
    metric_names,
    settings_of,
)
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import token_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import Optimizer, build_optimizer
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe, StepResult

_SUMS = 4 + CONTROL_VECTOR
"""Numbers of `StepSums`; metrics follow."""
GRADIENT = ("gradient",)
"""The input of a loss whose gradient by each log-probability is known (`answer_objective`)."""


@dataclass(frozen=True)
class PolicyRecipe(Recipe):
    """An update of the policy, without its samples."""

    settings: PolicyObjective = field(kw_only=True)
    temperature: float = field(kw_only=True)
    tokenwise: tuple[str, ...] = field(kw_only=True)
    """What the loss takes of each position."""
    names: tuple[str, ...] = field(kw_only=True)
    """Of the metrics that are added up."""
    metrics: MetricSums = field(default_factory=MetricSums, kw_only=True)
    """Of the micro-batches of the step under way."""

    @classmethod
    def of_policy(cls, config: RLConfig, model: nn.Module, optimizer: Optimizer) -> PolicyRecipe:
        """Of a run, on its parallelized model."""
        rl, settings = config.rl, settings_of(config.rl)
        proximal, reference = rl.objective != "behaviour", rl.kl > 0
        others = [name for name, there in (("proximal", proximal), ("reference", reference)) if there]
        return cls(
            model,
            sharded(model),
            optimizer,
            schedule(rl.schedule, rl.updates),
            rl.grad_clip,
            seed=config.seed,
            settings=settings,
            temperature=rl.temperature,
            tokenwise=GRADIENT if rl.of_answers else ("weights", "behaviour", "advantages", *others),
            names=() if rl.of_answers else metric_names(settings, proximal=proximal, reference=reference),
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """As of `Recipe`."""
        return self.tokenwise

    def micro_batch(self, one: MicroRows, objective: PolicyTokens | GivenGradient) -> MicroBatch:
        """What the step takes for a micro-batch, whose loss is this one."""
        rows = one.rows
        return MicroBatch(
            rows.input_ids,
            rows.labels,
            rows.position_ids,
            torch.tensor(one.places, device=rows.labels.device),
            several=False,
            extra=dict(zip(self.tokenwise, objective.inputs, strict=True)),
        )

    def loss_of(
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
        """As of `Recipe`: the policy's loss, whose weights divide it, so that `tokens` is not used."""
        assert position_ids is not None
        objective: PolicyTokens | GivenGradient
        if self.tokenwise == GRADIENT:
            objective = GivenGradient(self.temperature, **inputs)
        else:
            objective = PolicyTokens(
                settings=self.settings,
                temperature=self.temperature,
                weights=inputs["weights"],
                behaviour=inputs["behaviour"],
                advantages=inputs["advantages"],
                proximal=inputs.get("proximal"),
                reference=inputs.get("reference"),
                sums=self.metrics,
            )
        return token_loss(model, input_ids, labels, position_ids, objective, micro_batches=micro_batches)

    def sums(self) -> Mapping[str, Tensor]:
        """As of `Recipe`."""
        total = self.metrics.total
        return {} if total is None else {"metrics": total}

    def forget(self) -> None:
        """As of `Recipe`."""
        self.metrics.total = None

    def tokens(self, batch: StepBatch) -> Tensor:
        """1: the loss is divided by the weights of its tokens."""
        return batch.tokens

    def summed(self, loss: Tensor, norm: Tensor, tokens: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Recipe`, the sums of the metrics behind the others, fp64."""
        values, loads = super().summed(loss, norm, tokens, said)
        total, handle = self.metrics.total, self.handle
        if total is None:
            return values, loads
        added = handle.over_all_ranks(total * handle.axes.speaks(LOSS_AXES, handle.rank))
        return torch.cat([values.double(), added]), loads

    def result(self, values: Tensor, loads: Tensor, batch: StepBatch) -> StepResult:
        """As of `Recipe`, with the means of the metrics."""
        found = super().result(values[:_SUMS], loads, batch)
        return replace(found, metrics=means(self.names, values[_SUMS:]))


def positions_of(model: Any) -> int:
    """The most positions of a row of the model; what a computer can count to where it does not say."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found or sys.maxsize


def captured_policy(
    config: RLConfig, tokenizer: Tokenizer, device: torch.device
) -> tuple[nn.Module, Graphs | None]:
    """The actor's model with its values, and the graphs of its updates; None where it runs its own code. A collective.

    Raises what `trained_policy` does.
    """
    role = config.roles.actor
    if role.engine == "eager":
        return trained_policy(config, tokenizer, role.strategy, device), None
    shadow = trained_policy(config, tokenizer, role.strategy, device, lowering="traceable", filled=False)
    recipe = PolicyRecipe.of_policy(config, shadow, build_optimizer(shadow, config.rl.optimizer))
    artifacts = None
    if role.compile:
        cache: str = DataConfig.model_fields["cache"].default
        artifacts = Path(cache).expanduser() / "compiled"
    model = trained_policy(
        config, tokenizer, role.strategy, device, lowering="traceable", like=sharded(shadow)
    )
    return model, Graphs(recipe, device, artifacts)
