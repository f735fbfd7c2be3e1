"""Steps eagerly, from their graph, and from their graph compiled: python benchmarks/engine.py

The same unmodified Llama, the same data and the same strategy, in the same processes, steps taking turns:
- eager: the model's own code, parameters sharded by FSDP2;
- graph: the whole step captured once and run as generated Python (`train.engine: graph`);
- compiled: that graph with its layers compiled by Inductor (`train.compile`).
Each does a whole step: forward, loss, backward, global norm and clipping, update, and the host reads the loss.

1 worker and 4 workers (shard 2 · tensor 2, sequence), on the quickstart's model and on a wider one. Compile times are
of one process after the other: the second finds what the first has left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import answer_of, free_port, paired_ratio, timed, write
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import Stepper

ENGINES = ("eager", "graph", "compiled")
Step = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    hidden: int
    inner: int
    layers: int
    heads: int
    sequence: int
    batch: int
    tied: bool
    vocabulary: int = 4096

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=512,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=0,
        )


CASES = {
    "quickstart": Case(256, 704, 6, 8, sequence=256, batch=8, tied=True),  # examples/quickstart.yaml
    "wider": Case(512, 1408, 8, 8, sequence=512, batch=4, tied=False),
}


def recipe_of(model: LlamaForCausalLM) -> Recipe:
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3))
    return Recipe(
        model, hp.sharded(model), optimizer, schedule(ScheduleConfig(name="constant"), 1000), clip=1.0
    )


def parallelized(case: Case, strategy: hp.Strategy, engine: str, values: bool) -> Recipe:
    with torch.device("meta"):
        model = LlamaForCausalLM(case.config)
    hp.parallelize(model, strategy, lowering="fsdp" if engine == "eager" else "traceable")
    if values:
        hp.init_weights(model, seed=0)
    return recipe_of(model)


def batch_of(case: Case, recipe: Recipe) -> StepBatch:
    """This rank's rows of one batch, which every step computes again."""
    ids = torch.randint(
        case.vocabulary, (case.batch, case.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    handle = recipe.handle
    rows = torch.arange(case.batch).tensor_split(handle.strategy.axes.data)[handle.data_index]
    positions = torch.arange(case.sequence).expand(len(rows), -1).contiguous()
    mine = ids[rows]
    micro = MicroBatch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions, rows)
    return StepBatch(0, list(range(case.batch)), [micro], torch.tensor(float(micro.labels.numel())))


def stepper_of(
    case: Case, strategy: hp.Strategy, engine: str, artifacts: Path
) -> tuple[Step, dict[str, float]]:
    """A step, and how long its graph took to be captured and compiled."""
    recipe = parallelized(case, strategy, engine, values=True)
    batch = batch_of(case, recipe)
    seconds: dict[str, float] = {}
    if engine == "eager":
        stepper: Stepper | GraphStepper = Stepper(recipe)
    else:
        shadow = parallelized(case, strategy, engine, values=False)
        begun = time.perf_counter()
        graphs = Graphs(shadow, "cpu", artifacts if engine == "compiled" else None)
        assert graphs.ready(BatchShape.of(batch.micro)), graphs.refused
        assert graphs.uncompiled is None, graphs.uncompiled
        seconds[f"{engine}_ready_s"] = time.perf_counter() - begun
        stepper = GraphStepper(recipe, graphs)
    stepper.begin(batch)

    def step() -> float:
        return stepper.run(load_next=lambda: batch, memory=0.0).loss

    return step, seconds


def worker(rank: int, world: int, port: int, case: Case, rounds: int, artifacts: Path, answers: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    strategy = hp.Strategy(axes={"shard": 2, "tensor": 2}, sequence=True) if world > 1 else hp.Strategy()
    steps: dict[str, Step] = {}
    ready: dict[str, float] = {}
    for engine in ENGINES if rounds else ("compiled",):
        steps[engine], seconds = stepper_of(case, strategy, engine, artifacts)
        ready.update(seconds)
    losses = {engine: [step() for _ in range(3)] for engine, step in steps.items()}  # warm-up
    times: dict[str, list[float]] = {engine: [] for engine in steps}
    for turn in range(rounds):
        # Whoever goes first meets other caches; take turns.
        order = [*steps][turn % len(steps) :] + [*steps][: turn % len(steps)]
        for engine in order:
            times[engine].append(timed(steps[engine], world))
    last = {engine: step() for engine, step in steps.items()}
    if rank == 0:
        answers.put((times, ready, losses, last))
    if world > 1:
        dist.destroy_process_group()


def started(world: int, case: Case, rounds: int, artifacts: Path) -> Any:
    """What rank 0 of `world` new processes answers."""
    port = free_port()
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, world, port, case, rounds, artifacts, answers))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return answer_of(processes, answers)


def run(world: int, case: Case, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder)
        _, cold, _, _ = started(world, case, 0, artifacts)
        times, warm, first, last = started(world, case, rounds, artifacts)
    eager = times["eager"]
    return {
        "graph": paired_ratio(times["graph"], eager),
        "compiled": paired_ratio(times["compiled"], eager),
        "spread": {
            e: statistics.quantiles(t, n=4)[2] / statistics.quantiles(t, n=4)[0] for e, t in times.items()
        },
        "captured_s": warm["graph_ready_s"],
        "captured_and_compiled_cold_s": cold["compiled_ready_s"],
        "captured_and_compiled_warm_s": warm["compiled_ready_s"],
        "first_losses": first,
        "last_loss": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="steps of each engine that are timed")
    parser.add_argument("--case", choices=[*CASES], action="append")
    parser.add_argument("--workers", type=int, choices=(1, 4), action="append")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    for name in given.case or CASES:
        for world in given.workers or (1, 4):
            r = result[f"{name}, {world} workers"] = run(world, CASES[name], given.rounds)
            print(f"{name}, {world} worker(s): eager {r['graph']['theirs_s'] * 1e3:.0f} ms")
            for engine in ("graph", "compiled"):
                ratio = r[engine]
                print(
                    f"  {engine} {ratio['ours_s'] * 1e3:.0f} ms, ratio {ratio['ratio']:.3f} "
                    f"(95%: {ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['pairs']:.0f} rounds)"
                )
            print(
                f"  captured in {r['captured_s']:.1f} s; captured and compiled in "
                f"{r['captured_and_compiled_cold_s']:.1f} s, from the cache in "
                f"{r['captured_and_compiled_warm_s']:.1f} s"
            )
    print(write("engine", {"cases": result}))


if __name__ == "__main__":
    main()
