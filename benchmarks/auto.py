"""What `strategy: auto` picks beside the best of all strategies, each measured: python benchmarks/auto.py

Five small models on four workers of this machine, over loopback. For each model every strategy that the file leaves
open is built as `train` would build it, and stepped in turns with others, round after round, after a round that warms
up; a strategy's time is the median of its steps on the slowest rank. A dozen are built at a time, each dozen by new
processes, since many at once slow each other down, unequally; what `auto` picks is built with each dozen, and
brings their times to one scale. What takes `DROP` times as long as the best of its dozen after a round is not stepped
in further ones. The best of all and what `auto` picks are then built once more, together, and stepped more often: the
ratio is theirs. The machine is measured once before, as the first run on it would. What `auto` picks is what the
workers of a run come to, tries included; it is asked `STARTS` times, and the worst of its picks counts.

`--again` asks it anew and steps its picks with the best of those that were all measured before.

Layers are not computed again and the micro-batch is given, in all of them: the one only adds work where memory is no
matter, and the other would treble the time of this benchmark.
"""

from __future__ import annotations

import argparse
import bisect
import cmd
import difflib
import gc
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from campaigns import Rows
from commandline import run
from measure import taken_seconds
from pages import Benchmark, spaced, table
from processes import scratch
from shapes import Fields, gpt2, llama

from hyper_parallel import config as files
from hyper_parallel import launch
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import entry
from hyper_parallel.planner.auto.candidates import ranked
from hyper_parallel.planner.auto.entry import together
from hyper_parallel.planner.auto.machine import measured, read_off
from hyper_parallel.planner.auto.open_axes import Overrides, overrides_of, precision_of, question_of, resolved
from hyper_parallel.planner.auto.trial_process import step_of
from hyper_parallel.step.build import build

WORLD = 4
TOGETHER = 12
"""Strategies that are built at a time."""
LAST = 8
"""The best of all, which are stepped once more."""
STARTS = 3
"""How often `auto` is asked."""
ROUNDS, LAST_ROUNDS, STEPS = 2, 6, 3
"""After a round that warms up."""
DROP = 1.6
TASK = "HYPER_PARALLEL_BENCHMARK_TASK"
"""The environment's name for the file with the strategies, and how often each is stepped."""

MODELS: dict[str, dict[str, Any]] = {
    "Llama, wide": {"config": llama(512, 2, 8, inner=1024, vocabulary=1024), "sequence": 64},
    "Llama, narrow": {"config": llama(128, 3, 8, inner=384, vocabulary=1024), "sequence": 256},
    "Llama, deep and thin": {"config": llama(64, 6, 8, inner=128, vocabulary=1024), "sequence": 64},
    "GPT-2": {"config": gpt2(256, 2, 4, vocabulary=1024, positions=512), "sequence": 128},
    "Qwen3-MoE": {
        "config": {
            **llama(128, 2, 4, inner=256, kv=4, vocabulary=1024),
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
        },
        "sequence": 128,
        "axes": {"shard": "auto", "tensor": "auto", "expert": "auto"},
    },
}


def run_of(
    folder: Path, model: Fields, workers: int, strategy: Fields, *, data: Fields, train: Fields
) -> RunConfig:
    """A run of a model on modules of Python's library."""
    text = [module.__file__ for module in (argparse, bisect, cmd, difflib)]
    return files.from_dict(
        {
            "version": 1,
            "out": str(folder / "run"),
            "model": {"config": model},
            "data": {"train": text, "cache": str(folder / "cache"), **data},
            "train": train,
            "strategy": strategy,
            "launch": {"workers": workers},
            "trackers": [],
        }
    )


def picked(config: RunConfig, target: str) -> tuple[Overrides, list[str]]:
    """What `auto` picks on the run's workers, and what it says. `target`: what they run, which asks it."""
    if code := launch.run(config, target):
        raise SystemExit(f"the workers ended with {code}")
    written = Path(config.out) / entry.STRATEGY_FILE
    said = [line.removeprefix("# ") for line in written.read_text().splitlines() if line.startswith("#")]
    return entry.read_choice(written), said


def _model(name: str, folder: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Everything of one model; `before`: of which all strategies were measured."""
    cluster = measured(WORLD, print)
    asked = MODELS[name]
    strategy = {"axes": asked.get("axes", "auto"), "memory": {"recompute": "none"}}
    data = {"sequence": asked["sequence"], "tokenizer": {"vocab_size": 512}}
    train = {"batch": 4, "micro_batch": 1, "steps": 1}
    config = run_of(folder, asked["config"], WORLD, strategy, data=data, train=train)
    begun = time.monotonic()
    picks, told = zip(*(picked(config, "auto:choose") for _ in range(STARTS)), strict=True)
    took = (time.monotonic() - begun) / STARTS
    strategies: dict[str, Overrides] = {}
    for laid in _strategies(config, cluster):
        strategies.setdefault(key_of(laid), laid)
    begun = time.monotonic()
    times = before["all"] if before else _all(config, picks[0], strategies, folder)
    measuring = before["measuring_s"] if before else time.monotonic() - begun
    keys = list(map(key_of, picks))
    best = [key for key in sorted(times, key=lambda key: times[key]) if key not in keys][:LAST]
    last = _timed(config, [strategies[key] for key in dict.fromkeys([*keys, *best])], LAST_ROUNDS, folder)
    scale = last[keys[0]] / times[keys[0]]
    timed = {key: seconds * scale for key, seconds in times.items()} | last
    worst, least = max(keys, key=lambda key: last[key]), min(last, key=lambda key: last[key])
    found = {
        "strategies": len(timed),
        "refused": len(strategies) - len(timed),
        "best": json.loads(least),
        "best_s": last[least],
        "picked": json.loads(worst),
        "picked_s": last[worst],
        "ratio": last[worst] / last[least],
        "ratios": [last[key] / last[least] for key in keys],
        "median_s": sorted(timed.values())[len(timed) // 2],
        "worst_s": max(timed.values()),
        "told": told,
        "choosing_s": took,
        "measuring_s": measuring,
        "load": os.getloadavg()[1],
        "all": dict(sorted(timed.items(), key=lambda one: one[1])),
    }
    print(f"{name}: {found['ratio']:.3f} of the best of {len(timed)}: {worst} beside {least}", flush=True)
    return found


def _all(
    config: RunConfig, picked: Overrides, strategies: dict[str, Overrides], folder: Path
) -> dict[str, float]:
    """Times of every strategy that can be built, in those of the picked one."""
    mine = key_of(picked)
    keys = [key for key in strategies if key != mine]
    times = {mine: 1.0}
    for start in range(0, len(keys), TOGETHER - 1):
        dozen = [strategies[key] for key in keys[start : start + TOGETHER - 1]]
        found = _timed(config, [picked, *dozen], ROUNDS, folder)
        times |= {key: seconds / found[mine] for key, seconds in found.items()}
        print(f"  {min(start + len(dozen), len(keys))} of {len(keys)} measured", flush=True)
    return times


def _timed(config: RunConfig, strategies: Sequence[Overrides], rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of strategies that are built at once, without those that cannot be."""
    found = folder / "found.json"
    task = {"strategies": strategies, "rounds": rounds, "steps": STEPS, "drop": DROP, "out": str(found)}
    (folder / "task.json").write_text(json.dumps(task))
    os.environ[TASK] = str(folder / "task.json")
    if code := launch.run(resolved(config, strategies[0]), "auto:measure"):
        raise SystemExit(f"the workers ended with {code}")
    told = zip(strategies, json.loads(found.read_text()), strict=True)
    return {key_of(laid): seconds for laid, seconds in told if seconds is not None}


def _strategies(config: RunConfig, cluster: Cluster) -> Iterator[Overrides]:
    """All that the file leaves open."""
    seen, constants = read_off(cluster, precision_of(config))
    question = question_of(config, seen, WORLD, 1)
    for one in ranked(question, constants):
        yield overrides_of(config, one, seen, question.workload.shape.layers)


def key_of(laid: Overrides) -> str:
    """A strategy by its content."""
    return json.dumps(laid["strategy"], sort_keys=True)


# The workers.


def choose(config: RunConfig, worker: Worker) -> None:
    """What `train` does first: the strategy is chosen, and written to the run's folder."""
    together(config, worker)


def measure(config: RunConfig, worker: Worker) -> None:
    """What each of the four workers runs: its strategies are built, then stepped round after round.

    What is `drop` times as slow as the best after a round is stepped no more.
    """
    task = json.loads(Path(os.environ[TASK]).read_text())
    steps: dict[int, Callable[[], None]] = {}
    for index, laid in enumerate(task["strategies"]):
        try:
            run = resolved(config, laid)
            steps[index] = step_of(run, build(run, device=worker.device), worker.device)
        except HyperParallelError:
            continue
    slowest = dict.fromkeys(steps, math.inf)
    taken = defaultdict[int, list[float]](list)
    going = list(steps)
    for turn in range(task["rounds"] + 1):
        for index in going:
            taken[index] += _stepped(steps[index], task["steps"])
        if turn == 0:  # it warms up
            taken.clear()
            continue
        medians = torch.tensor([statistics.median(taken[index]) for index in steps])
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        slowest = dict(zip(slowest, medians.tolist(), strict=True))
        going = [index for index in going if slowest[index] <= task["drop"] * min(slowest.values())]
    if worker.rank == 0:
        Path(task["out"]).write_text(
            json.dumps([slowest.get(index) for index in range(len(task["strategies"]))])
        )


def _stepped(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of a few steps, each begun by all ranks together."""
    gc.collect()
    gc.disable()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        seconds.append(taken_seconds(step))
    gc.enable()
    return seconds


# What is shown.


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/plan.md."""
    models, where = found["models"], found["machine"]
    within = sum(one["ratio"] <= 1.1 for one in models.values())
    return spaced(
        "The strategy that `auto` picks, compared with the best of all strategies (`benchmarks/auto.py`; without "
        "recomputation, with micro-batches of one sequence). The benchmark first runs a few steps of every strategy, a "
        f"dozen at a time, and drops those {DROP} times as slow as the best of their dozen after one round. It then "
        f"times the {LAST} best and the picked ones in alternation; the table shows these times. `auto` ran "
        f"{found['starts']} times; the table shows the worst of its picks:",
        table(
            "Model | Strategies | Best | `auto` picked | Of the best | Each time | Median strategy | Worst",
            (tuple(_cells(name, one)) for name, one in models.items()),
            "lrrrrrrr",
        ),
        f"{within} of {len(models)} picks are within 10% of the best of all. Measured on {where['cpu']}, "
        f"{where['cores']} cores, PyTorch {where['torch']}; the load of the machine over five minutes was up to "
        f"{max(one['load'] for one in models.values()):.1f}, including the {found['workers']} workers.",
    )


def _cells(name: str, one: Mapping[str, Any]) -> Iterator[object]:
    yield from (name, one["strategies"])
    yield from (f"{one[f'{which}_s'] * 1e3:.1f} ms: {_told(one[which])}" for which in ("best", "picked"))
    yield f"{one['ratio']:.2f}"
    yield ", ".join(f"{ratio:.2f}" for ratio in one["ratios"])
    yield from (f"{one[which] / one['best_s']:.2f}" for which in ("median_s", "worst_s"))


def _told(strategy: Mapping[str, Any]) -> str:
    """A strategy in a few words."""
    axes = " · ".join(f"{name} {degree}" for name, degree in strategy["axes"].items())
    more = [strategy.get("memory", {}).get("shard"), strategy.get("context", {}).get("method")]
    return ", ".join([axes, *filter(None, more), *(["sequence"] if strategy.get("sequence") else [])])


BENCHMARK = Benchmark("auto", {"plan.md": page}, key="models")


def main(
    models: Annotated[tuple[str, ...], tuple(MODELS)] = tuple(MODELS),
    again: Annotated[bool, "only what is picked, beside the best of before"] = False,
) -> None:
    """Measure each model; one that is left out keeps its earlier row."""
    shown = {"workers": WORLD, "starts": STARTS, "rounds": LAST_ROUNDS, "steps": STEPS}
    everything = not again and set(models) == set(MODELS)
    rows = Rows(BENCHMARK, again=everything, summary=lambda rows: shown)
    with scratch() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder)  # the machine is measured anew
        for name in models:
            rows.add(name, _model(name, folder, rows.rows.get(name) if again else None))


if __name__ == "__main__":
    run(main)
