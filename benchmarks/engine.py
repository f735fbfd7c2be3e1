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

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from commandline import run
from measure import in_turns, paired_ratio, quartile_ratio, timed
from pages import Benchmark
from processes import scratch, threads_of, workers
from shapes import NO_ENDS, Fields, llama
from training import ENGINES, Step, build, engine_step, recipe_of, step_batch

import hyper_parallel as hp
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.step.recipe import Recipe

BENCHMARK = Benchmark("engine")
CASES: dict[str, tuple[Fields, int, int]] = {
    # examples/quickstart.yaml
    "quickstart": (llama(256, 6, 8, tie_word_embeddings=True, **NO_ENDS), 8, 256),
    "wider": (llama(512, 8, 8, **NO_ENDS), 4, 512),
}
"""Model, rows and tokens of a row."""


def recipe(fields: Fields, strategy: hp.Strategy, engine: str, values: str | None = "cpu") -> Recipe:
    """The step of an engine; without values it is what a graph is captured from."""
    lowering: Lowering = "fsdp" if engine == "eager" else "traceable"
    return recipe_of(build(fields, strategy, lowering=lowering, values=values))


def worker(rank: int, world: int, case: str, rounds: int, artifacts: Path) -> tuple[dict[str, Any], ...]:
    """Seconds of steps by engine, seconds until graphs were ready, and the first and the last losses."""
    fields, rows, length = CASES[case]
    strategy = hp.Strategy(axes={"shard": 2, "tensor": 2}, sequence=True) if world > 1 else hp.Strategy()
    steps: dict[str, Step] = {}
    ready: dict[str, float] = {}

    def make_ready(engine: str) -> None:
        own, shadow = recipe(fields, strategy, engine), recipe(fields, strategy, engine, values=None)
        batch = step_batch(own, rows, length, fields["vocab_size"])
        begun = time.perf_counter()
        steps[engine] = engine_step(engine, own, lambda: shadow, batch, artifacts)
        ready[engine] = time.perf_counter() - begun

    for engine in ENGINES if rounds else ("compiled",):
        make_ready(engine)
    losses = {engine: [step() for _ in range(3)] for engine, step in steps.items()}  # warm-up
    times = in_turns(steps, rounds, partial(timed, world=world))
    return times, ready, losses, {engine: step() for engine, step in steps.items()}


def measured(case: str, world: int, rounds: int) -> dict[str, Any]:
    with scratch() as artifacts:
        (_, cold, _, _), (times, warm, first, last) = (
            workers(worker, world, case, count, artifacts, threads=threads_of(world))[0]
            for count in (0, rounds)
        )
    return {
        "graph": paired_ratio(times["graph"], times["eager"]),
        "compiled": paired_ratio(times["compiled"], times["eager"]),
        "spread": {engine: quartile_ratio(seconds) for engine, seconds in times.items()},
        "captured_s": warm["graph"],
        "captured_and_compiled_cold_s": cold["compiled"],
        "captured_and_compiled_warm_s": warm["compiled"],
        "first_losses": first,
        "last_loss": last,
    }


def main(
    rounds: Annotated[int, "steps of each engine that are timed"] = 40,
    case: Annotated[tuple[str, ...], tuple(CASES)] = tuple(CASES),
    worlds: Annotated[tuple[int, ...], (1, 4)] = (1, 4),
) -> None:
    result = {}
    for name in case:
        for world in worlds:
            row = result[f"{name}, {world} workers"] = measured(name, world, rounds)
            print(name, world, row, flush=True)
    BENCHMARK.keep({"cases": result})


if __name__ == "__main__":
    run(main)
