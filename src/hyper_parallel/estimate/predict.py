"""Prediction from a run file: its step is captured as one rank of a fake process group, then simulated.

Every rank of a strategy runs the same ops on as many bytes (their indices differ, and weights that do not divide are
taken as rank 0 has them), so that one rank class stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import TokenDispatch
from hyper_parallel.cluster.presets import with_devices
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.build_trace import StoredTrace, TraceStore, load_of, trace_of
from hyper_parallel.estimate.predict_pipeline import predict_pipeline
from hyper_parallel.estimate.prediction import Prediction, has_experts, micro_batch, model_of
from hyper_parallel.graph import Pass, StepGraph
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.liveness import peak
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.offloading.pass_pipeline import described_offload, passes
from hyper_parallel.offloading.schedule.offload_pass import explained
from hyper_parallel.simulator import simulate
from hyper_parallel.step.out_of_memory import head_of
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload import flops_of_model

Progress = Callable[[str], None]


def predict_run(
    config: RunConfig,
    cluster: Cluster,
    *,
    model: nn.Module | None = None,
    as_written: bool = False,
    explain: bool = False,
    fused: bool | None = None,
    dispatch: TokenDispatch | None = None,
    cache: Path | None = None,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """What a step of a run would take on a cluster. Nothing is allocated, and no data or weights are read.

    Collectives are in the order that training on that cluster would choose, and the peak is that of this order; with
    `as_written` both are of the order of the model's code, in which each collective is waited for where it begins.
    `model`: on the meta device, in place of the one that the file describes. `explain`: tell what a memory budget
    moves, and how far from the best that is. `fused`: memory-bound operators are priced as fused kernels; left out,
    where the file has them compiled (`train.compile: true`). `dispatch`: the library that sends tokens to experts; left
    out, a row for each expert, as `train` sends them. `cache`: a folder of Traces of earlier predictions, in which a
    step that was captured before is found (`estimate.build_trace`); left out, it is captured. `limit`: bytes; a step
    without a budget that holds more in the order of the model's code is neither ordered nor simulated. `progress` is
    told what is being done.

    Raises ConfigError, StrategyError, CaptureError for a step that cannot be written down as a graph, or AboveLimit.
    """
    # Views take time on a host only, which computes what was captured; other devices have attention as one kernel.
    views = prices_views(cluster)
    with replace(current_step(), pads_values=not views).installed():
        return _predicted(
            config,
            cluster,
            model,
            as_written,
            explain,
            fused,
            dispatch,
            views,
            cache,
            limit,
            progress or (lambda _: None),
        )


@uncollected()
def _predicted(
    config: RunConfig,
    cluster: Cluster,
    model: nn.Module | None,
    as_written: bool,
    explain: bool,
    fused: bool | None,
    dispatch: TokenDispatch | None,
    views: bool,
    cache: Path | None,
    limit: float | None,
    say: Progress,
) -> Prediction:
    strategy = config.effective_strategy
    if explain and strategy.memory.device is None and strategy.axes.pipeline == 1:
        raise ConfigError(
            "--explain tells what a memory budget moves, and the file has none; set one, for example "
            "strategy.memory.device=10GiB strategy.memory.host=64GiB"
        )
    notes: list[str] = []
    plain = model if model is not None else model_of(config, notes)
    parameters = sum(p.numel() for p in plain.parameters())
    tokens = config.train.batch * config.data.sequence
    flops = flops_of_model(plain).per_token(config.data.sequence) * tokens
    if fused is None:
        fused = config.train.compile is True
    if strategy.axes.pipeline > 1:
        return predict_pipeline(
            config,
            cluster,
            plain,
            algorithm=dispatch or collective_algorithm(strategy),
            views=views,
            fused=fused,
            explain=explain,
            say=say,
            notes=notes,
        )
    # What is explained was planned in this process.
    store = TraceStore(cache) if cache is not None and not explain else None
    pricing = {"as_written": as_written, "views": views, "fused": fused}
    key = None if store is None else store.key(plain, config, cluster, pricing)
    kept = None if store is None or key is None else store.find(key)
    if kept is None:
        kept = _captured(plain, config, cluster, as_written, explain, fused, views, limit, say)
        if store is not None and key is not None:
            store.save(key, kept)
    else:
        say("captured before: read from the cache")
    trace = kept.trace
    notes += kept.notes
    trace = replace(trace, model_flops=flops)
    say(f"simulating {len(trace.ops['all']):,} ops on {cluster.name or cluster.source}")
    timeline = simulate(trace, cluster, algorithm=dispatch or collective_algorithm(strategy))
    mixture = has_experts(plain)
    if mixture:
        notes.append(_loads(load_of(strategy)))
    return Prediction(
        timeline,
        strategy,
        parameters,
        tokens,
        config.data.sequence,
        micro_batch(config),
        head_of(plain),
        tuple(notes),
        mixture=mixture,
    )


def _captured(
    model: nn.Module,
    config: RunConfig,
    cluster: Cluster,
    as_written: bool,
    explain: bool,
    fused: bool,
    views: bool,
    limit: float | None,
    say: Progress,
) -> StoredTrace:
    """The Trace of a step that is captured now."""
    strategy = config.effective_strategy
    world = strategy.axes.world
    offload = described_offload(strategy, cluster, say)
    notes: list[str] = []
    trace = trace_of(
        model,
        config,
        classes=dict.fromkeys(range(world), "all"),
        views=views,
        fused=fused,
        passes_of=lambda smaller: _checked(
            passes(smaller, cluster, ordered=not as_written, offload=offload),
            limit if offload is None else None,
        ),
        say=say,
        notes=notes,
    )
    if as_written and world > 1 and strategy.overlap.schedule != "none":
        notes.append("collectives are waited for where they begin (--as-written); training orders them")
    if offload is not None:
        say("looking for bounds" if explain else "planned")
        notes += [explained(found) if explain else str(found) for found in offload.found]
    return StoredTrace(trace, notes)


def _checked(rewrites: Sequence[Pass], limit: float | None) -> Sequence[Pass]:
    """The passes, with a limit on memory checked before collectives are ordered."""
    if limit is None:
        return rewrites
    return [WithinMemory(one, limit) if SCHEDULE in one.provides else one for one in rewrites]


def cluster_of(name: str, config: RunConfig, ranks: int | None = None) -> Cluster:
    """The cluster that a command names, as `ranks` workers of this run see it.

    Raises ConfigError for a cluster that is not known or too small, and for ranks that the strategy does not have.
    """
    cluster = Cluster.named(name)
    axes = config.effective_strategy.axes
    world = axes.world
    if ranks is not None and ranks != world:
        names = ("pipeline", *axes.order)
        degrees = " · ".join(f"{axis} {axes.degree(axis)}" for axis in names if axes.degree(axis) > 1)
        raise ConfigError(
            f"--ranks {ranks}: the strategy's axes multiply to {world} ({degrees or 'one rank'}); "
            + _axes_for(ranks, world, axes.replicate, axes.shard)
        )
    if cluster.ranks is not None and not cluster.shared and cluster.ranks < world:
        raise ConfigError(
            f"--cluster {name}: has {cluster.ranks} devices, and the strategy's axes multiply to {world}; "
            f"{with_devices(name, world)}, or make the axes smaller"
        )
    if world > 1 and not cluster.links and not cluster.shared:
        raise ConfigError(
            f"--cluster {name}: describes no links between devices, and the strategy has {world} ranks; measure "
            "them with hyper-parallel calibrate --workers, or set axes of one rank"
        )
    return replace(cluster.for_workers(world), name=cluster.name or name)


def prices_views(cluster: Cluster) -> bool:
    """Whether a view takes time on this cluster's device: the host's, where it was measured."""
    device = cluster.device
    return device is not None and any(
        table.kind == "view" or ".view" in table.op for table in device.efficiency.memory
    )


def _axes_for(ranks: int, world: int, replicate: int, shard: int) -> str:
    """What to write so that the axes multiply to so many."""
    if ranks % world == 0 and ranks > world:
        times = ranks // world
        return f"for {ranks} set strategy.axes.shard={shard * times} or strategy.axes.replicate={replicate * times}"
    fixed = world // shard
    if ranks % fixed == 0:
        return f"for {ranks} set strategy.axes.shard={ranks // fixed}"
    return f"choose degrees that multiply to {ranks} (its factors: {_factors(ranks)}), or leave --ranks out"


def _factors(number: int) -> str:
    found, divisor = [], 2
    while number > 1 and divisor <= math.isqrt(number):
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return " · ".join(map(str, [*found, *([number] if number > 1 else [])])) or "1"


def collective_algorithm(strategy: Strategy) -> str | None:
    """How a file has its collectives priced; None for the quickest that the cluster has."""
    return "flat" if strategy.placement.collectives == "flat" else None


def _loads(load: float) -> str:
    if load == 1.0:
        return "every expert is taken to get as many rows as the others"
    return (
        f"the rank's experts are taken to get {load:g} times their even share of the rows, as many as memory is kept "
        "for (strategy.memory.expert_load)"
    )


class AboveLimit(Exception):
    """A step that holds more than it may."""

    def __init__(self, peak: int, limit: float) -> None:
        super().__init__(f"the step holds {peak} bytes at once, and may hold {limit:.0f}")
        self.peak = peak
        """Bytes."""


@dataclass(frozen=True)
class WithinMemory:
    """A pass that orders collectives, for steps whose peak before it is at most `bytes`."""

    orders: Pass
    bytes: float

    @property
    def name(self) -> str:
        """Of the pass."""
        return self.orders.name

    @property
    def provides(self) -> frozenset[str]:
        """Of the pass."""
        return self.orders.provides

    @property
    def conflicts(self) -> frozenset[str]:
        """Of the pass."""
        return self.orders.conflicts

    def __call__(self, step: StepGraph) -> StepGraph:
        """The ordered step. Raises AboveLimit."""
        found = peak(step, balanced_sizes(step)).bytes
        if found > self.bytes:
            raise AboveLimit(found, self.bytes)
        return self.orders(step)
