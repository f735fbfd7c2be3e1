"""From a run file to an Inspection: the step is captured with a few layers of each kind, as `simulate` captures it.

What grows with the layers is extrapolated (`step_figures`); parameters, gradients and optimizer state are those of each
layer's kind. A step that cannot be captured still gets these, from every parameter's Layout.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import CaptureError, ConfigError
from hyper_parallel.estimate.build_trace import captured_step
from hyper_parallel.estimate.inspect_report import Inspection, collapsed, collective_rows, parameter_rows
from hyper_parallel.estimate.predict import Progress, predict_run
from hyper_parallel.estimate.prediction import count_micro_batches, micro_batch, model_of
from hyper_parallel.estimate.stage_capture import capture_stages
from hyper_parallel.estimate.stage_price import gathered_bytes
from hyper_parallel.estimate.step_figures import (
    LAYERS,
    Calls,
    Resident,
    StepFigures,
    calls_of,
    captured_micro_batches,
    figures_of,
    resident_of,
)
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.runtime.build_program import choose_schedule
from hyper_parallel.runtime.stage_costs import sum_bytes
from hyper_parallel.schedule import Costs, stages_of
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.layer_kinds import layer_kinds, with_layers
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import format_bytes


def inspect_run(
    config: RunConfig,
    rank: int = 0,
    *,
    model: nn.Module | None = None,
    whole: bool = False,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """What `rank` keeps and sends in one step of a run, without its workers, its data and its weights.

    `model`: on the meta device, in place of the one that the file describes. `whole`: capture all layers. `cluster`:
    the peak is that of `predict_run` on it, in the order in which training runs the step; without one, that of the
    order of the model's code. `cache` and `progress`: as of `predict_run`.

    Raises ConfigError or StrategyError; with a cluster also as `predict_run`.
    """
    found = _inspected(config, rank, model, whole)
    if cluster is None:
        return found
    timeline = predict_run(config, cluster, model=model, cache=cache, progress=progress).timeline
    peak = timeline.peak_of(timeline.trace.classes[rank])
    return replace(
        found,
        peak=peak.bytes,
        peak_by_kind={str(kind): size for kind, size in peak.by_kind.items()},
        ordered_on=timeline.cluster,
    )


def _inspected(config: RunConfig, rank: int, model: nn.Module | None, whole: bool) -> Inspection:
    """The inspection in the order of the model's code."""
    strategy = config.effective_strategy
    world = strategy.axes.world
    if not 0 <= rank < world:
        raise ConfigError(f"--rank: {rank} is none of the {world} ranks, 0 to {world - 1}, of the strategy")
    notes: list[str] = []
    if strategy.axes.pipeline > 1:
        return inspect_stages(config, rank, model if model is not None else model_of(config, notes), notes)
    plain = model if model is not None else model_of(config, notes)
    plan = make_plan(plain, strategy)
    kinds = layer_kinds(plain, plan, strategy)
    inspected = _Inspected(plain, plan, config, rank)
    try:
        resident, figures = inspected.of_layers([] if whole else kinds)
    except CaptureError as refusal:
        resident, figures = inspected.of_layouts(), None
        notes.append(
            "the step cannot be captured, so that activations, gathered weights, transients and collectives are not "
            f"counted, and parameters, gradients and optimizer state are those of the Layouts: {refusal}"
        )
    saved: Counter[str] = figures.saved if figures else Counter()
    return Inspection(
        world=world,
        axes={axis: strategy.axes.degree(axis) for axis in (*strategy.axes.order, "expert")},
        rank=rank,
        parameters=sum(p.numel() for p in plain.parameters()),
        rows=parameter_rows(plain, plan, resident.items(), saved),
        gathered=figures.gathered if figures else 0,
        transient=figures.transient if figures else 0,
        peak=figures.peak if figures else None,
        collectives=collective_rows(figures.calls) if figures else [],
        micro_batches=count_micro_batches(config),
        micro_batch=micro_batch(config),
        sequence=config.data.sequence,
        kinds=[len(kind) for kind in kinds],
        whole=whole or not kinds,
        balanced=bool(plan.experts),
        notes=notes,
    )


class _Inspected:
    """A run as one of its ranks."""

    def __init__(self, model: nn.Module, plan: Plan, config: RunConfig, rank: int) -> None:
        self._model, self._plan, self._config, self._rank = model, plan, config, rank
        self._strategy = config.effective_strategy
        self._stands_for = captured_micro_batches(count_micro_batches(config))

    def of_layers(self, kinds: Sequence[Sequence[int]]) -> tuple[Mapping[str, Resident], StepFigures]:
        """What the rank keeps of each parameter, and the step's figures; without `kinds` of all layers captured.

        Raises CaptureError.
        """
        if not kinds:
            step = self._step(self._model, self._strategy)
            return resident_of(step), self._figures(step)
        # The last of each kind, so that the last layer is the model's; of a kind with one layer more all of them.
        ends = [kind if len(kind) <= LAYERS + 1 else kind[-LAYERS:] for kind in kinds]
        keep = sorted(layer for end in ends for layer in end)
        step = self._captured(keep)
        total = base = self._figures(step)
        for kind, end in zip(kinds, ends, strict=True):
            if len(kind) > len(end):
                more = self._captured(sorted([*keep, kind[-len(end) - 1]]))
                total = total.plus(self._figures(more), len(kind) - len(end), base)
        places = {layer: keep.index(kind[-1]) for kind in kinds for layer in kind}
        return self._resident_of_all(resident_of(step), places), total

    def of_layouts(self) -> dict[str, Resident]:
        """What the rank keeps of each parameter, computed from the parameters' Layouts."""
        model = copy.deepcopy(self._model)
        with fake_ranks(self._strategy.axes.world, self._rank):
            parallelize(model, self._strategy, lowering="traceable")
            state: Counter[str] = Counter()
            for key, piece in build_optimizer(model, self._config.train.optimizer).pieces().items():
                # optimizer.<kind>.<parameter>
                state[key.split(".", 2)[2]] += piece.local.nbytes
            found = {}
            for parameter in sharded(model).parameters():
                shape = parameter.layout.local_shape(sharded(model).mesh.coordinate(self._rank))
                size = math.prod(shape) * parameter.parameter.element_size()
                gradient = size if parameter.parameter.requires_grad else 0
                found[parameter.name] = Resident(size, gradient, state[parameter.name])
            return found

    def _captured(self, keep: Sequence[int]) -> StepGraph:
        return self._step(*with_layers(self._model, self._plan, self._strategy, keep))

    def _step(self, model: nn.Module, strategy: Strategy) -> StepGraph:
        rewrites = passes(strategy, ordered=False)
        with replace(current_step(), pads_values=True).installed():
            return captured_step(
                model, self._config, strategy, len(self._stands_for), rewrites, rank=self._rank
            )

    def _figures(self, step: StepGraph) -> StepFigures:
        return figures_of(
            step, self._strategy, self._stands_for, lambda module: collapsed(module, self._plan.layers)
        )

    def _resident_of_all(
        self, captured: Mapping[str, Resident], places: Mapping[int, int]
    ) -> dict[str, Resident]:
        """By the names of the whole model; `places`: of each layer, the captured one of its kind."""
        prefix = f"{self._plan.layers}."
        found = {}
        for name in self._plan.parameters:
            known = name
            if name.startswith(prefix):
                layer, _, own = name.removeprefix(prefix).partition(".")
                known = f"{prefix}{places[int(layer)]}.{own}"
            if known in captured:
                found[name] = captured[known]
        return found


# Inspection of one rank of a pipeline: what it keeps of its stages, and what these send within their own mesh.
#
# The stages are cut as training cuts them where it knows no device: by FLOPs and bytes (`graph.stage_cut.flops_cost`).


def inspect_stages(config: RunConfig, rank: int, model: nn.Module, notes: list[str]) -> Inspection:
    """What `rank` keeps and sends. `model`: on the meta device.

    Raises ConfigError or StrategyError, and CaptureError for a step that cannot be captured.
    """
    strategy = config.effective_strategy
    groups = DeviceGroup.of_pipeline(strategy)
    world, count = strategy.axes.world, count_micro_batches(config)
    if not 0 <= rank < world:
        raise ConfigError(f"--rank: {rank} is none of the {world} ranks, 0 to {world - 1}, of the strategy")
    place = next(at for at, group in enumerate(groups) if rank in group.ranks)
    stages = stages_of(strategy.pipeline, strategy.axes.pipeline)
    placement = choose_schedule(strategy.pipeline, len(groups), count, Costs.even(stages)).placement
    found = capture_stages(model, config, flops_cost, lambda _: None, notes)
    mine = [stage for stage, at in enumerate(placement) if at == place]
    saved: Counter[str] = Counter()
    calls: Calls = Counter()
    gathered = transient = 0
    kept: list[tuple[str, Resident]] = []
    modules: set[str] = set()
    for stage in mine:
        one = found.partition.stages[found.captured[stage]]
        figures = figures_of(
            one.step, strategy.of_stage, (count,), lambda module: collapsed(module, found.plan.layers)
        )
        calls += figures.calls
        for once in found.once(one):
            if once is not None:
                calls += calls_of(once, once.nodes, strategy.of_stage, (1,))
        saved += figures.saved
        gathered = max(gathered, gathered_bytes(one.step) + figures.gathered)
        transient = max(transient, figures.transient)
        kept += [(name, found.resident[name]) for name in found.parameters(one) if name in found.resident]
        modules |= {node.meta["module"] for node in one.step.nodes}
        modules |= {name.rpartition(".")[0] for name, _ in kept}
        notes.append(_crosses(stage, found.counts[stage], one))
    notes.append(
        "activations are those of one micro-batch; how many are in flight at once, and so the peak, depends on the "
        "schedule: see hyper-parallel simulate. The norm and the loss are summed over all ranks once a step, besides"
    )
    return Inspection(
        world=world,
        axes={axis: strategy.axes.degree(axis) for axis in ("pipeline", *strategy.axes.order, "expert")},
        rank=rank,
        parameters=sum(p.numel() for p in model.parameters()),
        rows=parameter_rows(found.model, found.plan, kept, saved, modules),
        gathered=gathered,
        transient=transient,
        peak=None,
        collectives=collective_rows(calls),
        micro_batches=count,
        micro_batch=micro_batch(config),
        sequence=config.data.sequence,
        kinds=[found.counts[stage] for stage in mine],
        whole=True,
        balanced=bool(found.plan.experts),
        notes=notes,
    )


def _crosses(stage: int, layers: int, one: Stage) -> str:
    ahead, back = sum_bytes(one.sends), sum_bytes(one.gradients_out)
    sent = [f"{format_bytes(ahead)} forward"] * bool(ahead) + [f"{format_bytes(back)} back"] * bool(back)
    return f"stage {stage}: {layers} layers; sends {' and '.join(sent) or 'nothing'} in each micro-batch"
