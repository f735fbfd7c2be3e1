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

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from measure import RESULTS, machine, write
from pages import DOCS, put

from hyper_parallel import config
from hyper_parallel.calibrate import Settings, calibrate
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
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, capture_step, state
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe

CLUSTER = RESULTS / "fidelity-cluster.yaml"
PARTIAL = RESULTS / "fidelity-partial.json"
PAGE = DOCS / "fidelity.md"
WARM, STEPS = 3, 12
"""Steps before the clock, and measured ones."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


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
        tree = {
            "version": 1,
            "out": "runs/fidelity",
            "model": {"config": self.model},
            "data": {"train": "python-stdlib", "sequence": self.sequence},
            "train": {"batch": self.batch, "optimizer": {"name": "adamw", "lr": 1e-4}},
            "strategy": {"axes": self.axes, **self.strategy},
        }
        path = RESULTS / f".fidelity-{os.getpid()}.yaml"
        path.write_text(yaml.safe_dump(tree))
        try:
            return config.load(path)
        finally:
            path.unlink()


def _llama(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    return {**LLAMA, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads // 2, **more}


def _case(
    model: dict[str, Any], length: int, batch: int, axes: dict[str, int] | None = None, **strategy: Any
) -> Case:
    return Case(model, length, batch, axes or {}, strategy)


GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_embd": 384,
    "n_layer": 6,
    "n_head": 6,
    "n_positions": 512,
}
GEMMA = {
    "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "sliding_window": 128,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

CASES = {
    "llama, width 256, length 256, tied": _case(_llama(256, 6, 8, tie_word_embeddings=True), 256, 8),
    "llama, width 512, length 512": _case(_llama(512, 8, 8), 512, 4),
    "llama, width 768, length 256": _case(_llama(768, 6, 12), 256, 4),
    "llama, width 1024, length 128": _case(_llama(1024, 4, 16), 128, 8),
    "llama, width 256, length 1024": _case(_llama(256, 6, 8), 1024, 2),
    "gpt2, width 384": _case({**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, 256, 8),
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    threads = max(1, len(os.sched_getaffinity(0)) // case.workers)
    started = [
        context.Process(target=_worker, args=(rank, case, port, threads, queue))
        for rank in range(case.workers)
    ]
    for process in started:
        process.start()
    found = []
    while len(found) < case.workers:
        if any(process.exitcode not in (None, 0) for process in started):
            for process in started:
                process.terminate()
            raise RuntimeError("a worker failed; its traceback is above")
        if not queue.empty():
            found.append(queue.get())
        time.sleep(0.05)
    for process in started:
        process.join()
    return [max(times) for times in zip(*found, strict=True)]


def _worker(rank: int, case: Case, port: int, threads: int, queue: Any) -> None:
    torch.set_num_threads(threads)
    if case.workers > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.workers
        )
    run = _prepared(case, rank)[1]
    for _ in range(WARM):
        run()
    times = []
    for _ in range(STEPS):
        if case.workers > 1:
            dist.barrier()
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    queue.put(times)
    if case.workers > 1:
        dist.destroy_process_group()


def _prepared(case: Case, rank: int = 0, *, profiled: bool = False) -> tuple[Any, Any]:
    """The executable, or its profiler, of a case, and what runs one step of it."""
    from hyper_parallel.graph import executable

    run = case.run
    model = model_of(run, [])
    parallelize(model, run.effective_strategy, lowering="traceable")
    init_weights(model, run.seed)
    recipe = Recipe.of(run, model)
    rows, length = micro_batch(run), run.data.sequence
    strategy = run.effective_strategy
    step = rewritten(capture_step(recipe, BatchShape(((rows, length),), (False,))), passes(strategy))
    ran: Any = Profiler(step, backend("cpu").Clock(), _balanced(step)) if profiled else executable(step)
    held = {name: tensor.detach() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()}
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(4096, (rows, length + 1), generator=draw)
    positions = torch.arange(length).expand(rows, -1).contiguous()
    micro = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.arange(rows))
    tokens = torch.tensor(float(run.train.batch * length))
    count = 0

    def host(point: str, values: Any) -> torch.Tensor | None:
        if point == "load":
            return torch.zeros(CONTROL_VECTOR)
        values[0].tolist()
        return None

    def one() -> None:
        nonlocal count
        given = batch_inputs([micro], torch.tensor(count), tokens, torch.tensor(1.0, dtype=torch.float64))
        ran.run({**held, **given}, host)
        count += 1

    return ran, one


def _balanced(step: Any) -> dict[Any, int]:
    from hyper_parallel.graph.dynamic_sizes import balanced_sizes

    return balanced_sizes(step)


# Operators


def operators(name: str, cluster: Cluster) -> None:
    """Print where a case's prediction and measurement differ."""
    case = CASES[name]
    profiler, run = _prepared(case, profiled=True)
    for _ in range(WARM):
        run()
    profiler._runs.clear()
    for _ in range(STEPS):
        run()
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
    for (op, layout), (ours, theirs, calls) in sorted(sums.items(), key=lambda x: -abs(x[1][0] - x[1][1]))[
        :30
    ]:
        ratio = ours / theirs if theirs else float("nan")
        print(f"{op:55} {layout:36} {calls:6.0f} {ours * 1e3:10.2f} {theirs * 1e3:10.2f} {ratio:6.2f}")


# The whole


def main() -> None:
    """Measure what is not measured yet, and write the result and the page."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--cluster", type=Path, help="an earlier calibration of this machine")
    arguments.add_argument("--again", action="store_true", help="forget what was measured before")
    arguments.add_argument("--only", help="cases whose name holds this")
    arguments.add_argument("--operators", metavar="CASE", help="show a case's differences by operator")
    given = arguments.parse_args()
    if given.again:
        CLUSTER.unlink(missing_ok=True)
        PARTIAL.unlink(missing_ok=True)
    cluster = _cluster(given.cluster)
    if given.operators:
        operators(next(name for name in CASES if given.operators in name), cluster)
        return
    done: dict[str, Any] = json.loads(PARTIAL.read_text()) if PARTIAL.exists() else {}
    for name, case in CASES.items():
        if given.only and given.only not in name:
            continue
        if name not in done:
            times = measure(case)
            done[name] = {"workers": case.workers, "measured": statistics.median(times), "steps": times}
            PARTIAL.write_text(json.dumps(done))
        # Predicted anew: it is quick, and the cost model may have changed.
        done[name]["predicted"] = predict_run(case.run, cluster.for_workers(case.workers)).timeline.step
        print(_line(name, done[name]), flush=True)
    if given.only:
        return
    summary = {str(n): _errors([one for one in done.values() if one["workers"] == n]) for n in (1, 4)}
    write("fidelity", {"cases": done, "errors": summary, "device": _rates(cluster)})
    PARTIAL.unlink(missing_ok=True)
    CLUSTER.unlink(missing_ok=True)
    put(PAGE, "fidelity.py", _page(done, summary).splitlines())
    print(f"written: {RESULTS / 'fidelity.json'}, {PAGE}")


def _cluster(path: Path | None) -> Cluster:
    if path is not None:
        CLUSTER.write_text(path.read_text())
    if not CLUSTER.exists():
        calibrate(Settings(workers=4, folder=RESULTS), lambda said: print(said, file=sys.stderr)).dump(
            CLUSTER
        )
    return Cluster.load(CLUSTER)


def _rates(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What the calibration came to, in a few numbers, by the number of workers that compute at once."""
    found = {}
    for workers in sorted({case.workers for case in CASES.values()}):
        device = cluster.for_workers(workers).device
        assert device is not None, "a calibration describes the device"
        found[str(workers)] = {
            "matrix FLOP/s": dict(device.matrix),
            "memory B/s": device.memory.read,
            "launch s": device.launch,
        }
    return found


def _error(one: dict[str, Any]) -> float:
    return float(one["predicted"] / one["measured"] - 1)


def _errors(found: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(_error(one)) for one in found]
    return {"mean": statistics.mean(errors), "worst": max(errors), "cases": float(len(errors))}


def _spread(one: dict[str, Any]) -> float:
    """(Third quartile − first) / median of the measured steps: how quiet the machine was."""
    first, _, third = statistics.quantiles(one["steps"], n=4)
    return float((third - first) / one["measured"])


def _line(name: str, one: dict[str, Any]) -> str:
    return (
        f"{name:40} predicted {one['predicted'] * 1e3:8.1f} ms  measured {one['measured'] * 1e3:8.1f} ms "
        f"(spread {_spread(one):4.0%})  error {_error(one):+6.1%}"
    )


def _page(done: dict[str, Any], summary: dict[str, dict[str, float]]) -> str:
    where = machine()
    rows = [
        f"| {name} | {one['predicted'] * 1e3:.1f} | {one['measured'] * 1e3:.1f} | {_spread(one):.0%} "
        f"| {_error(one):+.1%} |"
        for name, one in done.items()
    ]
    said = [
        f"{workers} worker{'s' * (workers != '1')}: mean absolute error {found['mean']:.1%}, "
        f"worst {found['worst']:.1%} of {found['cases']:.0f} cases.\n"
        for workers, found in summary.items()
    ]
    return f"""{"".join(said)}
Measured on {where["cpu"]}, {where["cores"]} cores, PyTorch {where["torch"]}. Milliseconds a step; spread is the
distance between the quartiles of the measured steps, as a share of their median.

| Case | predicted | measured | spread | error |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
