"""Predicted against measured step times on this machine: python benchmarks/fidelity.py

1. `hyper-parallel calibrate` measures this machine's operators and collectives (no model); `--cluster FILE` takes an
   earlier measurement instead.
2. Each case below is predicted from its run file and that cluster file, as `hyper-parallel simulate` does.
3. Each case runs on real workers: the graph engine's whole steps, each in fresh processes, nothing beside them; the
   median of the steps is taken.

Nothing is fitted to the cases. What is measured is kept, so that an interrupted run goes on where it stopped; `--again`
begins anew. `--operators CASE` shows, for a case on one worker, where prediction and measurement differ, by operator.
docs/fidelity.md is written from the result.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import training
from campaigns import Rows
from commandline import Again, Only, run
from fidelity_report import calibrated, error, errors
from measure import RESULTS, timed
from pages import Benchmark, spaced, table
from processes import fresh, threads_of, workers
from shapes import Fields, gpt2, llama, run_file

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import backend
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.prediction import micro_batch, model_of
from hyper_parallel.graph import StepGraph, executable, lower
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.pass_manager import rewritten
from hyper_parallel.graph.profile import Profiler
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.shard import init_weights, parallelize
from hyper_parallel.simulator import simulate
from hyper_parallel.step.capture_train_step import batch_inputs, capture_step, state
from hyper_parallel.step.recipe import Recipe

CLUSTER = RESULTS / "fidelity-cluster.yaml"
WARM, STEPS = 3, 12
"""Steps before the clock, and measured ones."""


@dataclass(frozen=True)
class Case:
    """A run."""

    model: Fields
    sequence: int
    batch: int
    strategy: Fields = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """How many run it."""
        return self.run.effective_strategy.axes.world

    @property
    def run(self) -> RunConfig:
        """Its run file."""
        train = {"batch": self.batch, "optimizer": {"name": "adamw", "lr": 1e-4}}
        file = run_file(self.model, sequence=self.sequence, strategy=self.strategy, train=train)
        return config.from_dict(file, source="fidelity")


def _llama(hidden: int, layers: int, heads: int, *, tied: bool = False) -> Fields:
    return llama(hidden, layers, heads, positions=2048, tie_word_embeddings=tied)


GPT2 = gpt2(384, 6, 6, vocabulary=4096, positions=512, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
GEMMA = {
    "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "sliding_window": 128,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

CASES = {
    "llama, width 256, length 256, tied": Case(_llama(256, 6, 8, tied=True), 256, 8),
    "llama, width 512, length 512": Case(_llama(512, 8, 8), 512, 4),
    "llama, width 768, length 256": Case(_llama(768, 6, 12), 256, 4),
    "llama, width 1024, length 128": Case(_llama(1024, 4, 16), 128, 8),
    "llama, width 256, length 1024": Case(_llama(256, 6, 8), 1024, 2),
    "gpt2, width 384": Case(GPT2, 256, 8),
    "gemma2, width 384": Case(GEMMA, 256, 4),
    "mixtral, 8 experts": Case(MIXTRAL, 256, 4),
    "llama, 4 workers, shard 4": Case(_llama(512, 6, 8), 256, 8, {"axes": {"shard": 4}}),
    "llama, 4 workers, shard 2 · tensor 2": Case(
        _llama(512, 6, 8), 256, 8, {"axes": {"shard": 2, "tensor": 2}, "sequence": True}
    ),
    "llama, 4 workers, tensor 4": Case(_llama(512, 6, 8), 256, 8, {"axes": {"tensor": 4}}),
    "llama, 4 workers, context 4": Case(_llama(512, 6, 8), 512, 4, {"axes": {"context": 4}}),
    "mixtral, 4 workers, expert 4": Case(MIXTRAL, 256, 8, {"axes": {"shard": 4, "expert": 4}}),
}


# Measured


def measure(case: Case) -> list[float]:
    """Seconds of each step, the slowest worker's."""
    threads = threads_of(case.workers)
    if case.workers == 1:
        return list(fresh(worker, 0, 1, case, threads=threads))
    return list(workers(worker, case.workers, case, threads=threads)[0])


def worker(rank: int, world: int, case: Case) -> list[float]:
    """Seconds of each step, on one of the workers."""
    torch.set_num_threads(threads_of(world))
    graph, stepping = _prepared(case, rank)
    step = stepping(executable(graph))
    for _ in range(WARM):
        step()
    return [timed(step, world) for _ in range(STEPS)]


def _prepared(case: Case, rank: int = 0) -> tuple[StepGraph, Callable[[Any], Callable[[], None]]]:
    """The step of a case, and what makes of its executable, or profiler, a function that runs the next step."""
    given = case.run
    strategy = given.effective_strategy
    model = model_of(given, [])
    parallelize(model, strategy, lowering="traceable")
    init_weights(model, given.seed)
    recipe = Recipe.of(given, model)
    rows, length = micro_batch(given), given.data.sequence
    step = rewritten(capture_step(recipe, training.shape_of(rows, length)), passes(strategy))
    held = {name: tensor.detach() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()}
    micro = [training.micro_batch(rows, length, 4096, seed=rank)]
    tokens, one = torch.tensor(float(given.train.batch * length)), torch.ones((), dtype=torch.float64)

    def stepping(ran: Any) -> Callable[[], None]:
        numbers = itertools.count()
        return lambda: ran.run(
            {**held, **batch_inputs(micro, torch.tensor(next(numbers)), tokens, one)}, training.silent_host
        )

    return step, stepping


# Operators


def by_operator(name: str, cluster: Cluster) -> None:
    """Print where a case's prediction and measurement differ."""
    graph, stepping = _prepared(CASES[name])
    profiler = Profiler(graph, backend("cpu").Clock(), balanced_sizes(graph))
    step = stepping(profiler)
    for _ in range(WARM):
        step()
    profiler._runs.clear()
    for _ in range(STEPS):
        step()
    measured = profiler.timeline(device="here")
    trace = lower({"all": graph}, sizes=balanced_sizes(graph))
    predicted = simulate(trace, cluster.for_workers(1), masking=False)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for ours, theirs in zip(predicted.spans, measured.spans, strict=True):
        work = ours.op.work
        key = (work.op if work else ours.op.name, f"{work.kind} {work.layout} {work.dtype}" if work else "")
        for at, amount in enumerate((ours.end - ours.start, theirs.end - theirs.start, 1)):
            sums[key][at] += amount
    print(
        f"{name}: predicted {predicted.step * 1e3:.1f} ms, measured {measured.step * 1e3:.1f} ms (with the clock)"
    )
    print(f"{'operator':55} {'layout':36} {'calls':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}  ms")
    for (op, layout), (mine, real, calls) in sorted(sums.items(), key=lambda x: -abs(x[1][0] - x[1][1]))[:30]:
        ratio = mine / real if real else float("nan")
        print(f"{op:55} {layout:36} {calls:6.0f} {mine * 1e3:10.2f} {real * 1e3:10.2f} {ratio:6.2f}")


# The whole


def _rates(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What the calibration came to, in a few numbers, by the number of workers that compute at once."""
    found = {}
    for count in sorted({case.workers for case in CASES.values()}):
        device = cluster.for_workers(count).device
        assert device is not None, "a calibration describes the device"
        found[str(count)] = {
            "matrix FLOP/s": dict(device.matrix),
            "memory B/s": device.memory.read,
            "launch s": device.launch,
        }
    return found


def _spread(one: Mapping[str, Any]) -> float:
    """(Third quartile − first) / median of the measured steps: how quiet the machine was."""
    first, _, third = statistics.quantiles(one["steps"], n=4)
    return float((third - first) / one["measured"])


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/fidelity.md."""
    where = result["machine"]

    def row(name: str, one: Mapping[str, Any]) -> Iterator[str]:
        yield name
        yield from (f"{one[which] * 1e3:.1f}" for which in ("predicted", "measured"))
        yield from (f"{_spread(one):.0%}", f"{error(one):+.1%}")

    return spaced(
        (
            f"{count} worker{'s' * (count != '1')}: mean absolute error {found['mean']:.1%}, "
            f"worst {found['worst']:.1%} of {found['cases']:.0f} cases."
            for count, found in result["errors"].items()
        ),
        f"Measured on {where['cpu']}, {where['cores']} cores, PyTorch {where['torch']}. Milliseconds a step; spread "
        "is the\ndistance between the quartiles of the measured steps, as a share of their median.",
        table(
            "Case | predicted | measured | spread | error",
            (tuple(row(name, one)) for name, one in result["cases"].items()),
        ),
    )


BENCHMARK = Benchmark("fidelity", {"fidelity.md": page}, key="cases")


def main(
    cluster: Annotated[str, "an earlier calibration of this machine"] = "",
    again: Again = False,
    only: Only = "",
    operators: Annotated[str, "show the differences by operator of the case that has this in its name"] = "",
) -> None:
    """Measure what is not measured yet, and write the result and the page."""
    # Cases that were measured beside another calibration are forgotten.
    again = again or not (cluster or CLUSTER.exists())
    here = calibrated(4, CLUSTER, cluster or (None if again else str(CLUSTER)))
    if operators:
        by_operator(next(name for name in CASES if operators in name), here)
        return

    def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
        counts = sorted({one["workers"] for one in rows.values()})
        told = {str(n): errors(one for one in rows.values() if one["workers"] == n) for n in counts}
        return {"errors": told, "device": _rates(here)}

    result = Rows(BENCHMARK, again, summary)
    for name, case in CASES.items():
        if only not in name:
            continue
        if name not in result.rows:
            times = measure(case)
            result.rows[name] = {
                "workers": case.workers,
                "measured": statistics.median(times),
                "steps": times,
            }
        # Predicted anew: it is quick, and the cost model may have changed.
        one = result.rows[name]
        one["predicted"] = predict_run(case.run, here.for_workers(case.workers)).timeline.step
        if not only:
            result.write()
        print(
            f"{name:40} predicted {one['predicted'] * 1e3:8.1f} ms  measured {one['measured'] * 1e3:8.1f} ms "
            f"(spread {_spread(one):4.0%})  error {error(one):+6.1%}",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
