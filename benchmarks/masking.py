"""How much communication runs beside computation, without and with the overlap pass: all simulated.

    python benchmarks/masking.py [--only WORD] [--again]

A case is a model of a published shape, a cluster preset and a strategy. The step of one rank is captured,
with two micro-batches, layers recomputed in the backward pass and weights gathered again, as training rewrites it. It
is put into the schedule that trainers have without an overlap pass (`hyper_parallel.overlap.fsdp_baseline_schedule`:
weights asked for one layer ahead, gradients reduced beside the next layer, everything else waited for where it begins)
and simulated; then the captured step goes through `overlap`, within the device's memory. Of the batches listed for a
case, the first at which the usual schedule masks 55% to 65% of the communication by blocked time is taken; a case
without one shows the closest. Experts are taken to get equally many rows. Nothing here ran on such a cluster.

Masking has two definitions (`hyper_parallel.trace.Timeline`): by blocked time, 1 − exposed / communication, and end
to end, (T_comp + T_comm − step) / T_comm, which also pays for kernels that are slower beside a collective. No schedule
can mask more than min(1, T_comp / T_comm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commandline import Again, Only, run
from pages import Benchmark
from shapes import LLAMA_70B, Fields, llama
from training import build, recipe_of, shape_of

import hyper_parallel as hp
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import StepGraph, lower
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.pass_manager import rewritten
from hyper_parallel.graph.step_context import StepContext
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap import FsdpBaseline, overlap
from hyper_parallel.simulator import simulate
from hyper_parallel.step.capture_train_step import capture_step
from hyper_parallel.trace import Timeline

BENCHMARK = Benchmark("masking")
NAIVE = (0.55, 0.65)
MICRO = 2


@dataclass(frozen=True)
class Case:
    model: str
    layers: int
    """Of the published model's depth, how many are captured; head and tail weigh more with fewer."""
    cluster: str
    axes: dict[str, int]
    batches: tuple[tuple[int, int], ...]
    """(rows of a micro-batch on a rank, positions) to try."""

    @property
    def name(self) -> str:
        axes = " · ".join(f"{axis} {degree}" for axis, degree in self.axes.items())
        return f"{self.model}, {self.layers} layers, {self.cluster}, {axes}"

    @property
    def strategy(self) -> hp.Strategy:
        return hp.Strategy(
            axes=self.axes,
            sequence=self.axes.get("tensor", 1) > 1,
            precision={"compute": "bfloat16"},
            memory={"recompute": "layer"},
        )


CASES = (
    Case("llama-70b", 16, "h100", {"shard": 8, "tensor": 8}, ((2, 8192), (4, 8192), (6, 8192), (8, 8192))),
    Case("llama-70b", 16, "cloudmatrix384", {"shard": 8, "tensor": 8}, ((1, 2048), (1, 1536), (1, 1024))),
    Case("llama-70b", 16, "cloudmatrix384", {"shard": 16, "tensor": 4}, ((1, 4096), (1, 3072), (1, 6144))),
    Case("mixtral-8x7b", 8, "h100", {"shard": 8, "expert": 8}, ((1, 1024), (1, 2048))),
    Case("mixtral-8x7b", 8, "cloudmatrix384", {"shard": 8, "expert": 4}, ((1, 2048), (1, 3072), (1, 1536))),
    Case("deepseek-v3", 4, "h100", {"shard": 512, "expert": 8}, ((3, 4096),)),
    Case("deepseek-v3", 4, "cloudmatrix384", {"shard": 256, "expert": 8}, ((1, 4096), (1, 6144))),
)


MIXTRAL = llama(4096, 32, 32, inner=14336, kv=8, vocabulary=32000, positions=32768, sliding_window=None)
MIXTRAL |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, Fields] = {
    "llama-70b": {**LLAMA_70B, "max_position_embeddings": 131072},
    "mixtral-8x7b": MIXTRAL,
    # Values padded to the size of the keys, as flash attention takes them; one dense layer for the three of 61.
    "deepseek-v3": {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "v_head_dim": 192},
}


def captured(case: Case, rows: int, length: int) -> StepGraph:
    """The step of rank 0, as training rewrites it."""
    strategy = case.strategy
    fields = {**MODELS[case.model], "num_hidden_layers": case.layers}
    with fake_ranks(strategy.axes.world, 0):
        recipe = recipe_of(build(fields, strategy))
        with StepContext(even_load=1.0).installed():
            step = capture_step(recipe, shape_of(rows, length, MICRO))
        return rewritten(step, passes(strategy, ordered=False))


def simulated(step: StepGraph, cluster: Cluster, sizes: Mapping[Any, int]) -> Timeline:
    """What a step would take where every rank runs it."""
    ranks = {rank for group in step.groups.values() for rank in group.ranks} | {0}
    trace = lower({"all": step}, dict.fromkeys(sorted(ranks), "all"), sizes=sizes, views=False)
    return simulate(trace, cluster)


def figures(timeline: Timeline) -> dict[str, float | None]:
    alone, masked = timeline.alone, timeline.masked
    assert alone is not None
    return {
        "step_s": timeline.step,
        "masked_blocked": masked.blocked,
        "masked_end_to_end": masked.end_to_end,
        "communication_s": timeline.communicating,
        "compute_alone_s": alone.compute,
        "communication_alone_s": alone.communication,
        "allowed": min(1.0, alone.compute / alone.communication),
        "peak_bytes": timeline.peak.bytes,
    }


def measured(case: Case) -> dict[str, Any]:
    """The batch at which the usual schedule masks as much as was looked for, and what the overlap pass makes of it."""
    cluster = Cluster.named(f"{case.cluster}x{case.strategy.axes.world}")
    assert cluster.device is not None
    memory, tried = cluster.device.memory.bytes, []
    best: tuple[float, StepGraph, Timeline, dict[str, Any]] | None = None
    for rows, length in case.batches:
        step = captured(case, rows, length)
        naive = simulated(FsdpBaseline()(step), cluster, balanced_sizes(step))
        share = naive.masked.blocked or 0.0
        fits = naive.peak.bytes <= memory
        tried.append({"rows": rows, "positions": length, "masked_blocked": share, "fits": fits})
        print(tried[-1], flush=True)
        away = max(NAIVE[0] - share, share - NAIVE[1], 0.0) + (0.0 if fits else 1.0)
        if best is None or away < best[0]:
            best = (away, step, naive, {"rows": rows, "positions": length})
        if not away:
            break
    assert best is not None
    away, step, naive, batch = best
    found = overlap(step, cluster)
    return {
        "case": case.name,
        "simulated": True,
        "cluster_source": cluster.source,
        **batch,
        "micro_batches": MICRO,
        "nodes": len(list(step.nodes)),
        "naive_in_range": not away,
        "fits": found.after.peak.bytes <= memory,
        "device_bytes": memory,
        "naive": figures(naive),
        "overlap": figures(found.after),
        "chosen": str(found.chosen) if found.chosen else None,
        "tried": tried,
    }


def main(only: Only = "", again: Again = False) -> None:
    cases: dict[str, Any] = BENCHMARK.kept().get("simulated", {})
    for case in CASES:
        if only in case.name and (again or case.name not in cases):
            cases[case.name] = measured(case)
            print(cases[case.name], flush=True)
            BENCHMARK.keep({"simulated": cases})


if __name__ == "__main__":
    run(main)
