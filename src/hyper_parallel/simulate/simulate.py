"""A Program on a Cluster gives a Timeline."""

from __future__ import annotations

from hyper_parallel.cluster import Cluster
from hyper_parallel.program import Alone, Program, Timeline
from hyper_parallel.simulate.costs import Costs, check_fits, main_dtype
from hyper_parallel.simulate.engine import Only, Run


def simulate(
    program: Program, cluster: Cluster, *, algorithm: str | None = None, masking: bool = True
) -> Timeline:
    """When each op would run.

    `algorithm` is how collectives over several link levels run (`Cluster.legs`). `masking` also runs the kernels and
    the collectives alone, which end-to-end masking needs; without it a search is three times as fast. Raises
    ProgramError for a program that cannot run, ConfigError for a cluster that lacks what it needs.
    """
    program.check()
    check_fits(program, cluster)
    costs = Costs(cluster, algorithm, program.world)
    dtype = main_dtype(op for ops in program.ops.values() for op in ops)
    spans = Run(program, costs).spans()
    tiers = [cluster.tier(name) for name in program.tiers]
    return Timeline(
        program,
        spans,
        predicted=True,
        device=costs.device.name,
        cluster=cluster.name,
        source=_source(cluster),
        peak_flops=costs.device.peak(dtype) if dtype else None,
        alone=Alone(_step(program, costs, "compute"), _step(program, costs, "comm")) if masking else None,
        capacity={tier.name: tier.bytes / tier.ranks for tier in tiers},
    )


def alone(program: Program, cluster: Cluster, only: Only, *, algorithm: str | None = None) -> float:
    """The step's seconds with only its kernels (`compute`) or only its collectives (`comm`) taking any time.

    Ops still wait for one another, and ranks for ranks. Errors as of `simulate`.
    """
    program.check()
    check_fits(program, cluster)
    return _step(program, Costs(cluster, algorithm, program.world), only)


def _source(cluster: Cluster) -> str:
    """Where the constants come from, and how many of them are not public."""
    if not cluster.estimates:
        return cluster.source
    count = len(cluster.estimates)
    told = f"{count} estimate{'s' * (count != 1)} among them"
    return f"{cluster.source} ({told})" if cluster.source else told


def _step(program: Program, costs: Costs, only: Only) -> float:
    return max((span.end for span in Run(program, costs, only).spans()), default=0.0)
