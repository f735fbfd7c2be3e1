"""Inspection of one rank of a pipeline: what it keeps of its stages, and what these send within their own mesh.

The stages are cut as training cuts them where it knows no device: by FLOPs and bytes (`graph.stage_cut.flops_cost`).
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.inspect_report import Inspection, collapsed, collective_rows, parameter_rows
from hyper_parallel.estimate.run_inputs import count_micro_batches, micro_batch
from hyper_parallel.estimate.stage_capture import capture_stages
from hyper_parallel.estimate.stage_price import gathered_bytes
from hyper_parallel.estimate.step_figures import Calls, Resident, calls_of, figures_of
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.runtime.choose_schedule import choose_schedule
from hyper_parallel.runtime.stage_costs import sum_bytes
from hyper_parallel.schedule import Costs, stages_of
from hyper_parallel.units import format_bytes


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
