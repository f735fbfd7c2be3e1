"""Forward passes beside backward passes of a pipeline, on links that are emulated and on clusters that are simulated.

    python benchmarks/pipeline_overlap.py                measured, on 4 CPU workers
    python benchmarks/pipeline_overlap.py --simulate     predicted, on described clusters

Measured: pipeline 2 × tensor 2 over gloo, with the links of the tensor axis emulated: a collective is over when
`latency + bytes / bandwidth` have passed on its group's queue, in which one follows another; a worker that waits sleeps
until then. Each case takes a run with and without `overlap_forward_backward` in the same processes, in blocks of four
steps (with · without · without · with, or the reverse); a step's time is that of the slowest worker. The gradients of
both runs are compared first: they have the same bits. Four workers share what cores there are, so links are as slow
as they have to be for waiting, and not computing, to take most of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import RESULTS, answer_of, free_port, paired_ratio, timed, write
from torch import Tensor

from hyper_parallel import config
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import cluster_of, predict_run
from hyper_parallel.graph import execute
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.step.pipeline_build import BuiltPipeline, build_pipeline
from hyper_parallel.verify.matrix import build_model, draw_batch
from hyper_parallel.verify.pipeline_step import pipeline_batch

Settings = dict[str, Any]
WORLD, ROWS, LENGTH = 4, 16, 64
SMALL: Settings = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
SIZE: Settings = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA: Settings = {"model_type": "llama", **SIZE}
MIXTRAL: Settings = {
    "model_type": "mixtral", **SIZE, "num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
RESULT = RESULTS / "pipeline_overlap.json"


@dataclass(frozen=True)
class Case:
    """A model under a strategy without its schedule."""

    model: Settings
    strategy: Settings
    batch: int
    length: int

    def run(self, schedule: str, *, overlap: bool) -> RunConfig:
        """The run file."""
        pipeline = {"schedule": schedule, "overlap_forward_backward": overlap}
        return config.from_dict(
            {
                "version": 1,
                "out": "unused",
                "model": {"config": self.model},
                "data": {"train": ["unused"], "sequence": self.length},
                "train": {"batch": self.batch, "micro_batch": 1},
                "strategy": {"version": 1, "check": False, **self.strategy, "pipeline": pipeline},
            }
        )


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


usual_kernel = execute.kernel


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
        """Forward and backward passes of all micro-batches."""
        self.built.train(self._batch, self._tokens)

    def gradients(self) -> list[Tensor]:
        """Of the last step, those of this worker."""
        return [one.grad for one in self._owned if one.grad is not None]


def worker(rank: int, port: int, schedule: str, links: Links, blocks: int, answers: Any) -> None:
    """One rank; rank 0 answers with the times of steps with and without pairs, block by block."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    execute.kernel = links.kernel
    runs = {name: Run(MEASURED.run(schedule, overlap=name == "with")) for name in ("with", "without")}
    for run in runs.values():
        run.step()
    same = all(
        torch.equal(one, other)
        for one, other in zip(runs["with"].gradients(), runs["without"].gradients(), strict=True)
    )
    equal = torch.tensor(float(same))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    times: dict[str, list[float]] = {"with": [], "without": []}
    waited = dict.fromkeys(times, 0.0)
    draw = random.Random(0)
    for _ in range(blocks):
        order = ["with", "without", "without", "with"]
        found: dict[str, list[float]] = {"with": [], "without": []}
        if draw.random() < 0.5:
            order = ["without", "with", "with", "without"]
        for name in order:
            before = links.waited
            found[name].append(timed(runs[name].step, WORLD))
            waited[name] += links.waited - before
        for name, two in found.items():
            times[name].append(sum(two) / 2)
    if rank == 0:
        count = sum(map(len, runs["with"].built.plan.schedule.pairs))
        answers.put({"times": times, "same_bits": bool(equal), "pairs": count, "waited": waited})
    dist.barrier()
    dist.destroy_process_group()


def measure(schedule: str, links: Links, blocks: int) -> dict[str, Any]:
    """Steps with pairs beside steps without, on emulated links."""
    port = free_port()
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, port, schedule, links, blocks, answers))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    found = answer_of(processes, answers)
    times = found.pop("times")
    waited = {name: seconds / (2 * blocks) for name, seconds in found.pop("waited").items()}
    return {
        **found,
        "latency_s": links.latency,
        "bandwidth_bytes_s": links.bandwidth,
        "with_over_without": paired_ratio(times["with"], times["without"]),
        "slept_s_of_rank_0": waited,
    }


def simulate(case: Case, schedule: str) -> dict[str, Any]:
    """Predicted steps on H100s."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--schedule", choices=SCHEDULES, action="append")
    parser.add_argument("--latency", type=float, default=2e-3, help="seconds of each collective")
    parser.add_argument("--bandwidth", type=float, default=10e6, help="bytes per second")
    parser.add_argument("--blocks", type=int, default=12)
    given = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for schedule in given.schedule or SCHEDULES:
        if given.simulate:
            for title, case in SIMULATED.items():
                found = simulate(case, schedule)
                print(
                    f"{title}, {schedule}: simulated step {found['ratio']:.3f} of that without pairs",
                    flush=True,
                )
                result.setdefault("simulated", {}).setdefault(title, {})[schedule] = found
        else:
            found = measure(schedule, Links(given.latency, given.bandwidth), given.blocks)
            ratio = found["with_over_without"]
            print(
                f"{schedule}: {ratio['ours_s'] * 1e3:.0f} ms with pairs, {ratio['theirs_s'] * 1e3:.0f} ms without, "
                f"ratio {ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), same bits: "
                f"{found['same_bits']}",
                flush=True,
            )
            found["load"] = os.getloadavg()[0]
            result.setdefault("emulated_links", {})[schedule] = found
    kept = {name: result[name] for name in ("simulated", "emulated_links") if name in result}
    print("written to", write("pipeline_overlap", kept))


if __name__ == "__main__":
    main()
