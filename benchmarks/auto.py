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
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from auto_workers import TASK
from measure import RESULTS, machine
from pages import DOCS, put

from hyper_parallel import config as files
from hyper_parallel import launch
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.planner.auto import saved_choice
from hyper_parallel.planner.auto.machine import measured
from hyper_parallel.planner.auto.query import precision_of, question_of
from hyper_parallel.planner.auto.resolved import Overrides, overrides_of, resolved
from hyper_parallel.planner.enumerate import ranked
from hyper_parallel.planner.measured_constants import read_off

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
NAME = "auto.json"
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 1024,
}

MODELS: dict[str, dict[str, Any]] = {
    "Llama, wide": {
        "config": {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            **HEADS,
        },
        "sequence": 64,
    },
    "Llama, narrow": {
        "config": {
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            **HEADS,
        },
        "sequence": 256,
    },
    "Llama, deep and thin": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            **HEADS,
        },
        "sequence": 64,
    },
    "GPT-2": {
        "config": {
            "model_type": "gpt2",
            "n_embd": 256,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "vocab_size": 1024,
        },
        "sequence": 128,
    },
    "Qwen3-MoE": {
        "config": {
            "model_type": "qwen3_moe",
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "head_dim": 32,
            **HEADS,
            "num_attention_heads": 4,
        },
        "sequence": 128,
        "axes": {"shard": "auto", "tensor": "auto", "expert": "auto"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="only these, separated by semicolons")
    parser.add_argument("--kept", action="store_true", help="the machine as it was measured before")
    parser.add_argument("--again", action="store_true", help="only what is picked, beside the best of before")
    parser.add_argument("--page", action="store_true", help="write the page from the figures that are there")
    arguments = parser.parse_args()
    if not arguments.page:
        names = arguments.models.split(";") if arguments.models else list(MODELS)
        goes_on = (arguments.models or arguments.again) and (RESULTS / NAME).exists()
        shown = {
            "machine": machine(),
            "workers": WORLD,
            "starts": STARTS,
            "rounds": LAST_ROUNDS,
            "steps": STEPS,
        }
        models = json.loads((RESULTS / NAME).read_text())["models"] if goes_on else {}
        with tempfile.TemporaryDirectory(prefix="auto-") as folder:
            if not arguments.kept:
                os.environ["XDG_CACHE_HOME"] = folder
            for name in names:
                models[name] = _model(name, Path(folder), models.get(name) if arguments.again else None)
                (RESULTS / NAME).write_text(json.dumps({**shown, "models": models}, indent=1) + "\n")
    put(DOCS / "plan.md", "auto.py", _lines(json.loads((RESULTS / NAME).read_text())))


def _model(name: str, folder: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Everything of one model; `before`: of which all strategies were measured."""
    cluster = measured(WORLD, print)
    run = _run(MODELS[name], folder)
    begun = time.monotonic()
    picks, told = zip(*(_picked(run) for _ in range(STARTS)), strict=True)
    took = (time.monotonic() - begun) / STARTS
    strategies = {_key(laid): laid for laid in _strategies(run, cluster)}
    begun = time.monotonic()
    times = before["all"] if before else _all(run, picks[0], strategies, folder)
    measuring = before["measuring_s"] if before else time.monotonic() - begun
    keys = list(map(_key, picks))
    best = [key for key in sorted(times, key=lambda key: times[key]) if key not in keys][:LAST]
    last = _timed(run, [strategies[key] for key in dict.fromkeys([*keys, *best])], LAST_ROUNDS, folder)
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


def _picked(run: RunConfig) -> tuple[Overrides, list[str]]:
    """What `auto` picks, and what it says."""
    if code := launch.run(run, "auto_workers:choose"):
        raise SystemExit(f"the workers ended with {code}")
    written = Path(run.out) / saved_choice.STRATEGY_FILE
    said = [line.removeprefix("# ") for line in written.read_text().splitlines() if line.startswith("#")]
    return saved_choice.read(written), said


def _all(
    run: RunConfig, picked: Overrides, strategies: dict[str, Overrides], folder: Path
) -> dict[str, float]:
    """Times of every strategy that can be built, in those of the picked one."""
    mine = _key(picked)
    keys = [key for key in strategies if key != mine]
    times = {mine: 1.0}
    for start in range(0, len(keys), TOGETHER - 1):
        dozen = [strategies[key] for key in keys[start : start + TOGETHER - 1]]
        found = _timed(run, [picked, *dozen], ROUNDS, folder)
        times |= {key: seconds / found[mine] for key, seconds in found.items()}
        print(f"  {min(start + len(dozen), len(keys))} of {len(keys)} measured", flush=True)
    return times


def _timed(run: RunConfig, strategies: Sequence[Overrides], rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of strategies that are built at once, without those that cannot be."""
    found = folder / "found.json"
    task = {"strategies": strategies, "rounds": rounds, "steps": STEPS, "drop": DROP, "out": str(found)}
    (folder / "task.json").write_text(json.dumps(task))
    os.environ[TASK] = str(folder / "task.json")
    if code := launch.run(resolved(run, strategies[0]), "auto_workers:measure"):
        raise SystemExit(f"the workers ended with {code}")
    told = zip(strategies, json.loads(found.read_text()), strict=True)
    return {_key(laid): one["seconds"] for laid, one in told if "seconds" in one}


def _run(model: dict[str, Any], folder: Path) -> RunConfig:
    text = [module.__file__ for module in (argparse, bisect, cmd, difflib)]
    return files.from_dict(
        {
            "version": 1,
            "out": str(folder / "run"),
            "model": {"config": model["config"]},
            "data": {
                "train": text,
                "sequence": model["sequence"],
                "tokenizer": {"vocab_size": 512},
                "cache": str(folder / "cache"),
            },
            "train": {"batch": 4, "micro_batch": 1, "steps": 1},
            "strategy": {"axes": model.get("axes", "auto"), "memory": {"recompute": "none"}},
            "launch": {"workers": WORLD},
            "trackers": [],
        }
    )


def _strategies(run: RunConfig, cluster: Cluster) -> Iterator[Overrides]:
    """All that the file leaves open, each once."""
    seen, constants = read_off(cluster, precision_of(run))
    done = set()
    question = question_of(run, seen, WORLD, 1)
    for one in ranked(question, constants):
        laid = overrides_of(run, one, seen, question.workload.shape.layers)
        if _key(laid) not in done:
            done.add(_key(laid))
            yield laid


def _key(laid: Overrides) -> str:
    return json.dumps(laid["strategy"], sort_keys=True)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    models = found["models"]
    yield ""
    yield (
        "The strategy that `auto` picks, compared with the best of all strategies (`benchmarks/auto.py`; without "
        "recomputation, with micro-batches of one sequence). The benchmark first runs a few steps of every strategy, a "
        f"dozen at a time, and drops those {DROP} times as slow as the best of their dozen after one round. It then "
        f"times the {LAST} best and the picked ones in alternation; the table shows these times. `auto` ran "
        f"{found['starts']} times; the table shows the worst of its picks:"
    )
    yield ""
    yield "| Model | Strategies | Best | `auto` picked | Of the best | Each time | Median strategy | Worst |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, one in models.items():
        best, each = one["best_s"], ", ".join(f"{ratio:.2f}" for ratio in one["ratios"])
        yield (
            f"| {name} | {one['strategies']} | {best * 1e3:.1f} ms: {_told(one['best'])} | "
            f"{one['picked_s'] * 1e3:.1f} ms: {_told(one['picked'])} | {one['ratio']:.2f} | {each} | "
            f"{one['median_s'] / best:.2f} | {one['worst_s'] / best:.2f} |"
        )
    within = sum(one["ratio"] <= 1.1 for one in models.values())
    load = max(one["load"] for one in models.values())
    yield ""
    yield (
        f"{within} of {len(models)} picks are within 10% of the best of all. Measured on {found['machine']['cpu']}, "
        f"{found['machine']['cores']} cores, PyTorch {found['machine']['torch']}; the load of the machine over five "
        f"minutes was up to {load:.1f}, including the {found['workers']} workers."
    )
    yield ""


def _told(strategy: dict[str, Any]) -> str:
    """A strategy in a few words."""
    axes = " · ".join(f"{name} {degree}" for name, degree in strategy["axes"].items())
    more = [strategy.get("memory", {}).get("shard", ""), strategy.get("context", {}).get("method", "")]
    return ", ".join(
        [axes, *(word for word in more if word), *(["sequence"] if strategy.get("sequence") else [])]
    )


if __name__ == "__main__":
    main()
