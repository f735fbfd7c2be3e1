"""Forward passes beside backward passes of a pipeline, on links that are emulated and on clusters that are simulated.

    python benchmarks/pipeline_overlap.py                measured, on 4 CPU workers
    python benchmarks/pipeline_overlap.py --simulate     predicted, on described clusters

Measured: pipeline 2 × tensor 2 over gloo, with the links of the tensor axis emulated: a collective is over when
`latency + bytes / bandwidth` have passed on its group's queue, in which one follows another; a worker that waits sleeps
until then. Each case takes steps with and without `overlap_forward_backward` in turns in the same processes; a step's
time is that of the slowest worker. The gradients of both runs are compared first: they have the same bits. Four workers
share what cores there are, so links are as slow as they have to be for waiting, and not computing, to take most of a
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
from commandline import run
from measure import in_turns, load, paired_ratio, timed
from pages import Benchmark
from processes import workers
from shapes import Fields, llama, run_file
from torch import Tensor

from harness.equivalence import build_model, draw_batch
from hyper_parallel import config
from hyper_parallel.compat.dispatch import kernel as usual_kernel
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import cluster_of, predict_run
from hyper_parallel.graph import execute
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.step.pipeline_build import BuiltPipeline, build_pipeline
from hyper_parallel.verify.step import pipeline_batch

BENCHMARK = Benchmark("pipeline_overlap")
WORLD, ROWS, LENGTH = 4, 16, 64
SMALL = llama(128, 4, 4, inner=256, kv=4, vocabulary=256, positions=LENGTH)
LLAMA = llama(4096, 8, 32, inner=14336, kv=8, vocabulary=32000, positions=4096, head_dim=128)
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": None}
MIXTRAL = {**LLAMA, "model_type": "mixtral", **EXPERTS}


@dataclass(frozen=True)
class Case:
    """A model under a strategy without its schedule."""

    model: Fields
    strategy: Fields
    batch: int
    length: int

    def run(self, schedule: str, *, overlap: bool) -> RunConfig:
        pipeline = {"schedule": schedule, "overlap_forward_backward": overlap}
        strategy = {"check": False, **self.strategy, "pipeline": pipeline}
        train = {"batch": self.batch, "micro_batch": 1}
        return config.from_dict(run_file(self.model, sequence=self.length, strategy=strategy, train=train))


BFLOAT16 = {"precision": {"param": "float32", "compute": "bfloat16", "reduce": "float32"}}
OPTIMIZER = {"memory": {"shard": "optimizer"}, **BFLOAT16}
MEASURED = Case(SMALL, {"axes": {"pipeline": 2, "tensor": 2}}, ROWS, LENGTH)
SIMULATED = {
    "Llama 8B's layers, tensor 8 in a node": Case(
        LLAMA, {"axes": {"pipeline": 2, "tensor": 8}, "sequence": True, **BFLOAT16}, 32, 4096
    ),
    "Mixtral's layers, 16 experts over 8 ranks of a node": Case(
        MIXTRAL, {"axes": {"pipeline": 2, "shard": 8, "expert": 8}, **OPTIMIZER}, 128, 4096
    ),
    "Mixtral's layers, 16 experts over 16 ranks of 2 nodes": Case(
        MIXTRAL, {"axes": {"pipeline": 2, "shard": 16, "expert": 16}, **OPTIMIZER}, 256, 4096
    ),
}
SCHEDULES = ("1f1b", "dualpipev")


@dataclass
class Links:
    """Emulated links: when each group's queue is free, and when each collective under way is over."""

    latency: float
    bandwidth: float
    """Bytes per second."""
    waited: float = 0.0
    """Seconds that this worker slept."""
    _free: dict[str, float] = field(default_factory=dict)
    _over: dict[int, tuple[float, Tensor]] = field(default_factory=dict)

    def kernel(self, operator: Any) -> Callable[..., Any]:
        """What runs an operator of a graph, its collectives on these links."""
        found = usual_kernel(operator)
        if getattr(operator, "namespace", "") != "_c10d_functional":
            return found

        def begin(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = found(value, *args, **kwargs)
            group = str(kwargs.get("group_name", args[-1] if args else ""))
            seconds = self.latency + value.numel() * value.element_size() / self.bandwidth
            begun = max(time.perf_counter(), self._free.get(group, 0.0))
            self._free[group] = begun + seconds
            self._over[id(result)] = begun + seconds, result
            return result

        def wait(value: Tensor) -> Any:
            over, _ = self._over.pop(id(value), (0.0, value))
            left = over - time.perf_counter()
            if left > 0:
                time.sleep(left)
                self.waited += left
            return found(value)

        return wait if "wait" in str(operator) else begin


class Run:
    """A pipeline on this worker, step after step on the same batch."""

    def __init__(self, run: RunConfig) -> None:
        model = build_model(MEASURED.model, "cpu")
        self.built: BuiltPipeline = build_pipeline(run, model, True, "cpu")
        whole = draw_batch(MEASURED.model, ROWS, LENGTH)
        self._batch = pipeline_batch(model, run, whole)
        self._tokens = valid_tokens(whole["labels"]).float()
        self._owned = sharded(model).owned()

    def step(self) -> None:
        self.built.train(self._batch, self._tokens)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self._owned if one.grad is not None]


def worker(rank: int, world: int, schedule: str, links: Links, rounds: int) -> dict[str, Any]:
    """Steps with and without pairs on one rank."""
    mock.patch.object(execute, "kernel", links.kernel).start()
    runs = {name: Run(MEASURED.run(schedule, overlap=name == "with")) for name in ("with", "without")}
    for one in runs.values():
        one.step()
    gradients = zip(runs["with"].gradients(), runs["without"].gradients(), strict=True)
    equal = torch.tensor(float(all(torch.equal(one, other) for one, other in gradients)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)

    def measure(step: Callable[[], object]) -> tuple[float, float]:
        before = links.waited
        return timed(step, world), links.waited - before

    found = in_turns({name: one.step for name, one in runs.items()}, rounds, measure)
    (times, slept), (times_without, slept_without) = (zip(*found[name], strict=True) for name in runs)
    paired = runs["with"].built.plan.schedule
    assert paired is not None
    return {
        "same_bits": bool(equal),
        "pairs": sum(map(len, paired.pairs)),
        "latency_s": links.latency,
        "bandwidth_bytes_s": links.bandwidth,
        "with_over_without": paired_ratio(times, times_without),
        "slept_s_of_rank_0": {"with": fmean(slept), "without": fmean(slept_without)},
    }


def simulated(case: Case, schedule: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for overlap in (False, True):
        run = case.run(schedule, overlap=overlap)
        prediction = predict_run(run, cluster_of("h100", run))
        assert prediction.pipeline is not None
        timeline = prediction.timeline
        found["with" if overlap else "without"] = {
            "simulated_step_s": timeline.step,
            "simulated_peak_bytes": max(timeline.peak_of(group).bytes for group in timeline.trace.ops),
            "pairs": prediction.pipeline.pairs,
        }
    found["ratio"] = found["with"]["simulated_step_s"] / found["without"]["simulated_step_s"]
    return found


def main(
    simulate: bool = False,
    schedule: Annotated[tuple[str, ...], SCHEDULES] = SCHEDULES,
    latency: Annotated[float, "seconds of each collective"] = 2e-3,
    bandwidth: Annotated[float, "bytes per second"] = 10e6,
    rounds: int = 24,
) -> None:
    """Measure or simulate; the other part of the result stays."""
    kept = BENCHMARK.kept()
    result = {name: kept.get(name, {}) for name in ("simulated", "emulated_links")}
    for name in schedule:
        if simulate:
            for title, case in SIMULATED.items():
                found = result["simulated"].setdefault(title, {})[name] = simulated(case, name)
                print(title, name, found, flush=True)
        else:
            found = workers(worker, WORLD, name, Links(latency, bandwidth), rounds)[0] | {"load": load()}
            result["emulated_links"][name] = found
            print(name, found, flush=True)
    BENCHMARK.keep({name: part for name, part in result.items() if part})


if __name__ == "__main__":
    run(main)
