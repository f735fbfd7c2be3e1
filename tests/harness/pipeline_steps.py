"""Steps of pipelines on real gloo workers, beside the step of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.equivalence import build_model, draw_batch, family_config
from harness.families import FAMILIES
from harness.ranks import run_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.experts.loads import take_loads, update_biases
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.step.pipeline_build import build_pipeline
from hyper_parallel.verify.report import Report, compare
from hyper_parallel.verify.run import alone
from hyper_parallel.verify.step import (
    StepOutcome,
    Tensors,
    merged,
    pipeline_batch,
    run_pipeline_step,
    run_step,
)

Settings = Mapping[str, Any]
FIELDS = ("input_ids", "labels", "position_ids")


def settings_of(family: str, layers: int | None = None, **changes: Any) -> dict[str, Any]:
    """A family's config, with another number of layers and other changes."""
    found = {**FAMILIES[family], **changes}
    if layers is not None:
        found["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
        if "layer_types" in found:
            found["layer_types"] = [found["layer_types"][at % 2] for at in range(layers)]
    return found


@dataclass(frozen=True)
class Case:
    """One step of one model under one strategy."""

    family: Settings
    strategy: Settings
    train: Settings = field(default_factory=lambda: {"micro_batch": 1})
    change: Callable[[nn.Module], nn.Module] | None = None
    """Makes the model from the family's: a function at the top of a module."""
    documents: bool = True
    """Rows hold several documents."""
    evaluates: bool = False
    """The held-out loss of the same rows is compared too, after the update."""

    @property
    def config(self) -> RunConfig:
        """The run file of the workers."""
        return family_config(self.family, {"check": False, **self.strategy}, self.train)

    def model(self) -> nn.Module:
        """The model, with the values of the seed."""
        model: Any = build_model(self.family, "cpu")
        # What runs where nobody says another thing, and what is captured; one by one, experts are not.
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "grouped_mm"
        if self.change is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = self.change(model)
        return model.train()

    def batch(self) -> Tensors:
        """The whole batch."""
        rows = self.config.train.batch
        if "vision_config" in self.family:
            special = min(self.family[key] for key in self.family if key.endswith("token_id"))
            found = draw_batch({"vocab_size": special}, rows)
        else:
            found = draw_batch(self.family, rows)
        if not self.documents:
            found["position_ids"] = torch.arange(found["input_ids"].size(1)).repeat(rows, 1)
        return found


def one_device(case: Case) -> tuple[StepOutcome, Tensors]:
    """The step of the whole model on one device, in the same precision and with the rows of the same micro-batches
    together; and the model's buffers after it."""
    strategy = alone(case.config.strategy)
    config = family_config(case.family, {"precision": strategy.precision.model_dump()}, case.train)
    model = case.model()
    parallelize(model, strategy, lowering="traceable", alone=True)
    batch = case.batch()
    outcome = run_step(model, config, batch, data=case.config.strategy.axes.data)
    _correct_routers(model, config)
    if case.evaluates:
        with torch.no_grad():
            ids, labels, positions = (batch[key] for key in FIELDS)
            sums = causal_lm_loss(model.eval(), ids, labels, positions, 1.0)
        outcome = replace(outcome, loss=outcome.loss + float(sums))
    return outcome, _buffers(model)


def _correct_routers(model: nn.Module, config: RunConfig) -> None:
    """As behind a step: the biases of routers, by the loads of the whole batch."""
    rate, handle = config.train.router_bias_rate, sharded(model)
    if rate:
        update_biases(model, handle.over_all_ranks(take_loads(handle)), rate)


def _buffers(model: nn.Module) -> Tensors:
    """Its buffers, by name."""
    return {name: one.detach().clone() for name, one in model.named_buffers()}


@dataclass(frozen=True)
class Ran:
    """What one worker's part of a case came to."""

    outcome: StepOutcome | None
    plan: str = ""
    refused: str = ""
    buffers: Tensors = field(default_factory=dict)
    """Those that its stages hold."""


def _worker(rank: int, world: int, cases: list[tuple[Case, Tensors]]) -> list[Ran]:
    return [_run(case, same) for case, same in cases]


def _run(case: Case, same: Tensors) -> Ran:
    try:
        model = case.model()
        built = build_pipeline(case.config, model, case.documents, "cpu")
        batch = case.batch()
        outcome = run_pipeline_step(model, built, case.config, batch, same)
        _correct_routers(model, case.config)
        if case.evaluates:
            micro = pipeline_batch(model, case.config, batch).micro
            handle = sharded(model)
            sums = built.evaluate(micro) * handle.axes.speaks(LOSS_AXES, handle.rank)
            outcome = replace(outcome, loss=outcome.loss + float(handle.over_all_ranks(sums)))
        held = {
            name: one
            for name, one in _buffers(model).items()
            if sharded(model).pipeline.owns(name)  # type: ignore[union-attr]
        }
        found = Ran(outcome, built.plan.described[0], buffers=held)
    except HyperParallelError as refusal:
        found = Ran(None, refused=str(refusal))
    dist.barrier()
    return found


@dataclass(frozen=True)
class Compared:
    """A case beside one device."""

    report: Report | None
    plan: str = ""
    refused: str = ""
    gradients: Tensors = field(default_factory=dict)
    buffers: float = 0.0
    """The largest difference of any worker's buffers."""

    @property
    def error(self) -> float:
        """The worst of loss, norm, gradients and updated values, relative to the largest element."""
        if self.report is None:
            return float("inf")
        pairs = (self.report.loss, self.report.grad_norm)
        scalars = [abs(many / one - 1) for one, many in pairs]
        return max(*scalars, *(max(p.gradient, p.value) for p in self.report.parameters))


def against_one_device(world: int, cases: Sequence[Case], timeout: float = 240.0) -> list[Compared]:
    """Each case on `world` workers, one after the other, beside one device."""
    torch.manual_seed(0)
    ones = [_reference(case) for case in cases]
    given = [(case, one.gradients) for case, (one, _) in zip(cases, ones, strict=True)]
    by_rank: list[list[Ran]] = run_ranks(_worker, world, given, timeout=timeout)
    return [
        _compared(case, one, buffers, [found[at] for found in by_rank])
        for at, (case, (one, buffers)) in enumerate(zip(cases, ones, strict=True))
    ]


def _reference(case: Case) -> tuple[StepOutcome, Tensors]:
    """The step of one device, which cases share that differ in the strategy alone."""
    strategy = case.config.strategy
    at = repr((case.family, case.train, case.change, case.documents, case.evaluates, alone(strategy)))
    at += repr(case.config.micro_batch * strategy.axes.data)
    if at not in _KNOWN:
        _KNOWN[at] = one_device(case)
    return _KNOWN[at]


_KNOWN: dict[str, tuple[StepOutcome, Tensors]] = {}


def _compared(case: Case, one: StepOutcome, buffers: Tensors, ran: list[Ran]) -> Compared:
    refused = next((found.refused for found in ran if found.refused), "")
    outcomes = [found.outcome for found in ran if found.outcome is not None]
    if len(outcomes) < len(ran):
        return Compared(None, refused=refused)
    whole = merged(outcomes)
    off = [
        _off(value, buffers[name])
        for found in ran
        for name, value in found.buffers.items()
        if name in buffers
    ]
    precision = case.config.strategy.precision.compute
    report = compare(one, whole, "", "", precision)
    return Compared(report, ran[0].plan, gradients=whole.gradients, buffers=max(off, default=0.0))


def _off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
