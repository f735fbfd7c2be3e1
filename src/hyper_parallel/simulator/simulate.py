"""Simulates a Trace on a Cluster and returns a Timeline."""

from __future__ import annotations

from functools import partial

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.simulator.engine import Only, Run
from hyper_parallel.simulator.op_costs import Costs, check_fits, main_dtype
from hyper_parallel.trace import Alone, Timeline, Trace


def simulate(
    trace: Trace, cluster: Cluster, *, algorithm: Algorithm = None, masking: bool = True
) -> Timeline:
    """The predicted Timeline of a Trace.

    `algorithm` selects how collectives over several link levels run (`Cluster.legs`). With `masking` the kernels alone
    and the collectives alone are simulated too, when `Timeline.alone` is first asked for. Raises
    TraceError for a trace that cannot run, ConfigError for a cluster that lacks a needed part.
    """
    trace.check()
    check_fits(trace, cluster)
    costs = Costs(cluster, algorithm, trace.world)
    dtype = main_dtype(op for ops in trace.ops.values() for op in ops)
    spans = Run(trace, costs).spans()
    tiers = [cluster.tier(name) for name in trace.tiers]
    return Timeline(
        trace,
        spans,
        predicted=True,
        device=costs.device.name,
        cluster=cluster.name,
        source=source_of(cluster),
        peak_flops=costs.device.peak(dtype) if dtype else None,
        alone_of=partial(_alone, trace, costs) if masking else None,
        capacity={tier.name: tier.bytes / tier.ranks for tier in tiers},
    )


def alone(trace: Trace, cluster: Cluster, only: Only, *, algorithm: Algorithm = None) -> float:
    """The step's seconds with only its kernels (`compute`) or only its collectives (`comm`) taking any time.

    Dependencies between ops and ranks still hold. Errors as of `simulate`.
    """
    trace.check()
    check_fits(trace, cluster)
    return _step(trace, Costs(cluster, algorithm, trace.world), only)


def source_of(cluster: Cluster) -> str:
    """The source of the constants, and the number of estimated ones."""
    if not cluster.estimates:
        return cluster.source
    count = len(cluster.estimates)
    count_of_estimates = f"{count} estimate{'s' * (count != 1)} among them"
    return f"{cluster.source} ({count_of_estimates})" if cluster.source else count_of_estimates


def _alone(trace: Trace, costs: Costs) -> Alone:
    return Alone(_step(trace, costs, "compute"), _step(trace, costs, "comm"))


def _step(trace: Trace, costs: Costs, only: Only) -> float:
    return max((span.end for span in Run(trace, costs, only).spans()), default=0.0)
