"""Predicted against measured step times on this machine: python benchmarks/fidelity.py

1. `hyper-parallel calibrate` measures this machine's operators and collectives (no model); `--cluster FILE` takes an
   earlier measurement instead.
2. Each case below is predicted from its run file and that cluster file, as `hyper-parallel simulate` does.
3. Each case runs on real workers: the graph engine's whole steps, each in fresh processes, nothing beside them; the
   median of the steps is taken.

Nothing is fitted to the cases. What is done is kept, so that an interrupted run goes on where it stopped; `--again`
begins anew. `--operators CASE` shows, for a case on one worker, where prediction and measurement differ, by operator.
docs/fidelity.md is written from the result.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import training
from commandline import Only, run
from fidelity_report import calibrated, error, errors
from measure import RESULTS, timed
from pages import Benchmark, table
from processes import fresh, threads_of, workers
from shapes import gpt2, llama

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import backend
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.run_inputs import micro_batch, model_of
from hyper_parallel.graph import lower
from hyper_parallel.graph.pass_manager import rewritten
from hyper_parallel.graph.profile import Profiler
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.shard import init_weights, parallelize
from hyper_parallel.simulator import simulate
from hyper_parallel.step.capture_train_step import batch_inputs, capture_step, state
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe

CLUSTER = RESULTS / "fidelity-cluster.yaml"
PARTIAL = RESULTS / "fidelity-partial.json"
WARM, STEPS = 3, 12
"""Steps before the clock, and measured ones."""


@dataclass(frozen=True)
class Case:
    """A run."""

    model: dict[str, Any]
    sequence: int
    batch: int
    axes: dict[str, int]
    strategy: dict[str, Any]

    @property
    def workers(self) -> int:
        """How many run it."""
        return self.run.effective_strategy.axes.world

    @property
    def run(self) -> RunConfig:
        """Its run file."""
        given = {
            "version": 1,
            "out": "runs/fidelity",
            "model": {"config": self.model},
            "data": {"train": "python-stdlib", "sequence": self.sequence},
            "train": {"batch": self.batch, "optimizer": {"name": "adamw", "lr": 1e-4}},
            "strategy": {"axes": self.axes, **self.strategy},
        }
        return config.from_dict(given, source="fidelity")


def _llama(hidden: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return llama(hidden, layers, heads, positions=2048, tie_word_embeddings=tied)


def _case(
    model: dict[str, Any], length: int, batch: int, axes: dict[str, int] | None = None, **strategy: Any
) -> Case:
    return Case(model, length, batch, axes or {}, strategy)


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = gpt2(384, 6, 6, vocabulary=4096, positions=512, **NO_DROPOUT)
GEMMA = {
    "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "sliding_window": 128,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

CASES = {
    "llama, width 256, length 256, tied": _case(_llama(256, 6, 8, tied=True), 256, 8),
    "llama, width 512, length 512": _case(_llama(512, 8, 8), 512, 4),
    "llama, width 768, length 256": _case(_llama(768, 6, 12), 256, 4),
    "llama, width 1024, length 128": _case(_llama(1024, 4, 16), 128, 8),
    "llama, width 256, length 1024": _case(_llama(256, 6, 8), 1024, 2),
    "gpt2, width 384": _case(GPT2, 256, 8),
    "gemma2, width 384": _case(GEMMA, 256, 4),
    "mixtral, 8 experts": _case(MIXTRAL, 256, 4),
    "llama, 4 workers, shard 4": _case(_llama(512, 6, 8), 256, 8, {"shard": 4}),
    "llama, 4 workers, shard 2 · tensor 2": _case(
        _llama(512, 6, 8), 256, 8, {"shard": 2, "tensor": 2}, sequence=True
    ),
    "llama, 4 workers, tensor 4": _case(_llama(512, 6, 8), 256, 8, {"tensor": 4}),
    "llama, 4 workers, context 4": _case(_llama(512, 6, 8), 512, 4, {"context": 4}),
    "mixtral, 4 workers, expert 4": _case(MIXTRAL, 256, 8, {"shard": 4, "expert": 4}),
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
    step = _prepared(case, rank)[1]
    for _ in range(WARM):
        step()
    return [timed(step, world) for _ in range(STEPS)]


def _prepared(case: Case, rank: int = 0, *, profiled: bool = False) -> tuple[Any, Any]:
    """The executable, or its profiler, of a case, and what runs one step of it."""
    from hyper_parallel.graph import executable

    given = case.run
    strategy = given.effective_strategy
    model = model_of(given, [])
    parallelize(model, strategy, lowering="traceable")
    init_weights(model, given.seed)
    recipe = Recipe.of(given, model)
    rows, length = micro_batch(given), given.data.sequence
    step = rewritten(capture_step(recipe, training.shape_of(rows, length)), passes(strategy))
    ran: Any = Profiler(step, backend("cpu").Clock(), _balanced(step)) if profiled else executable(step)
    held = {name: tensor.detach() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()}
    micro = training.micro_batch(rows, length, 4096, seed=rank)
    tokens = torch.tensor(float(given.train.batch * length))
    count = 0

    def host(point: str, values: Any) -> torch.Tensor | None:
        if point == "load":
            return torch.zeros(CONTROL_VECTOR)
        values[0].tolist()
        return None

    def one() -> None:
        nonlocal count
        inputs = batch_inputs([micro], torch.tensor(count), tokens, torch.tensor(1.0, dtype=torch.float64))
        ran.run({**held, **inputs}, host)
        count += 1

    return ran, one


def _balanced(step: Any) -> dict[Any, int]:
    from hyper_parallel.graph.dynamic_sizes import balanced_sizes

    return balanced_sizes(step)


# Operators


def by_operator(name: str, cluster: Cluster) -> None:
    """Print where a case's prediction and measurement differ."""
    case = CASES[name]
    profiler, step = _prepared(case, profiled=True)
    for _ in range(WARM):
        step()
    profiler._runs.clear()
    for _ in range(STEPS):
        step()
    measured = profiler.timeline(device="here")
    trace = lower({"all": profiler._step}, sizes=_balanced(profiler._step))
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


def _here(given: str) -> Cluster:
    """This machine, as an interrupted run has measured it."""
    if given:
        CLUSTER.write_text(Path(given).read_text())
    return calibrated(4, CLUSTER, str(CLUSTER) if CLUSTER.exists() else None)


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
    for count, found in result["errors"].items():
        yield (
            f"{count} worker{'s' * (count != '1')}: mean absolute error {found['mean']:.1%}, "
            f"worst {found['worst']:.1%} of {found['cases']:.0f} cases."
        )
    yield ""
    yield (
        f"Measured on {where['cpu']}, {where['cores']} cores, PyTorch {where['torch']}. Milliseconds a step; spread "
        "is the"
    )
    yield "distance between the quartiles of the measured steps, as a share of their median."
    yield ""

    def row(name: str, one: Mapping[str, Any]) -> Iterator[str]:
        yield name
        yield from (f"{one[which] * 1e3:.1f}" for which in ("predicted", "measured"))
        yield from (f"{_spread(one):.0%}", f"{error(one):+.1%}")

    yield from table(
        "Case | predicted | measured | spread | error",
        (tuple(row(name, one)) for name, one in result["cases"].items()),
    )


BENCHMARK = Benchmark("fidelity", {"fidelity.md": page})


def main(
    cluster: Annotated[str, "an earlier calibration of this machine"] = "",
    again: Annotated[bool, "forget what was measured before"] = False,
    only: Only = "",
    operators: Annotated[str, "show the differences by operator of the case that has this in its name"] = "",
) -> None:
    """Measure what is not measured yet, and write the result and the page."""
    if again:
        CLUSTER.unlink(missing_ok=True)
        PARTIAL.unlink(missing_ok=True)
    here = _here(cluster)
    if operators:
        by_operator(next(name for name in CASES if operators in name), here)
        return
    done: dict[str, Any] = json.loads(PARTIAL.read_text()) if PARTIAL.exists() else {}
    for name, case in CASES.items():
        if only not in name:
            continue
        if name not in done:
            times = measure(case)
            done[name] = {"workers": case.workers, "measured": statistics.median(times), "steps": times}
            PARTIAL.write_text(json.dumps(done))
        # Predicted anew: it is quick, and the cost model may have changed.
        one = done[name]
        one["predicted"] = predict_run(case.run, here.for_workers(case.workers)).timeline.step
        print(
            f"{name:40} predicted {one['predicted'] * 1e3:8.1f} ms  measured {one['measured'] * 1e3:8.1f} ms "
            f"(spread {_spread(one):4.0%})  error {error(one):+6.1%}",
            flush=True,
        )
    if only:
        return
    summary = {str(n): errors(one for one in done.values() if one["workers"] == n) for n in (1, 4)}
    BENCHMARK.keep({"cases": done, "errors": summary, "device": _rates(here)})
    PARTIAL.unlink(missing_ok=True)
    CLUSTER.unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
