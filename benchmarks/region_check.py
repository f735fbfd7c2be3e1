"""What the check of a strategy before training costs and catches: python benchmarks/region_check.py [--rounds 3]

- **Published shapes**, never run here: seconds of the check for the first time and from what was remembered, in this
  process, with the copy that it ran.
- **Runs of two workers**: seconds of `hyper-parallel train` with one step, without the check, with it for the first
  time, and with it remembered; rounds with the three in turns.
- **Modules of a user's own** (tests/harness/modules.py): those that mix features between split projections have to be
  refused, each with rules that pass, the others accepted.

Writes benchmarks/results/region_check.json; ends with 1 when a module is judged wrongly.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import write
from rich.console import Console
from rich.table import Table

from hyper_parallel.shard.parallelize import _on_simulated_ranks as spread
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.region_check import check
from hyper_parallel.shard.region_check.reduced_model import Reduced
from hyper_parallel.shard.region_check.sample_inputs import SeenCall, TokenCall
from hyper_parallel.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import modules

Settings = dict[str, Any]

_LLAMA: Settings = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
SHAPES: dict[str, tuple[Settings, Settings]] = {
    "Llama-3 8B": (
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        {"axes": {"shard": 2, "tensor": 4}, "sequence": True},
    ),
    "Llama-3 70B": (
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        {"axes": {"shard": 8, "tensor": 8}, "sequence": True},
    ),
    "Llama-3 70B, 2D": (
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        {"axes": {"shard": 4, "tensor_x": 4, "tensor_y": 4}},
    ),
    "Gemma 3 27B": (
        {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
        },
        {"axes": {"shard": 2, "tensor": 8}, "sequence": True},
    ),
    "Qwen3 30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        {"axes": {"shard": 16, "expert": 16}},
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3"},
        {"axes": {"shard": 32, "context": 2, "tensor": 8, "expert": 64}},
    ),
}
_TINY: Settings = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
RUNS: dict[str, tuple[Settings, Settings]] = {
    "Llama, tensor 2": ({"model_type": "llama", **_TINY}, {"axes": {"tensor": 2}}),
    "Llama, shard 2": ({"model_type": "llama", **_TINY}, {"axes": {"shard": 2}}),
    "Llama, context 2": ({"model_type": "llama", **_TINY}, {"axes": {"context": 2}}),
    "Gemma 3, tensor 2, sequence": (
        {"model_type": "gemma3_text", **_TINY, "head_dim": 16},
        {"axes": {"tensor": 2}, "sequence": True},
    ),
    "Phi-3, tensor 2": ({"model_type": "phi3", **_TINY}, {"axes": {"tensor": 2}}),
    "Qwen3-MoE, expert 2": (
        {"model_type": "qwen3_moe", **_TINY, **_EXPERTS},
        {"axes": {"shard": 2, "expert": 2}},
    ),
}
VARIANTS = ("without", "first", "remembered")


def model_of(settings: Settings) -> torch.nn.Module:
    """An unmodified Transformers model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def measure_shapes() -> dict[str, Settings]:
    """Seconds of a check of each published shape."""
    found = {}
    for name, (settings, declared) in SHAPES.items():
        model, strategy = model_of(settings), Strategy(**declared)
        plan = make_plan(model, strategy)
        calls = [TokenCall(128, 0, 0), TokenCall(128, 0, 0, positions=False)]
        seconds = []
        for _ in VARIANTS[1:]:
            wall, cpu = time.perf_counter(), time.process_time()
            refusal = check._refusal(model, strategy, plan, calls, spread)
            assert refusal is None, refusal
            seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
        small = next(check.reduce(model, plan, strategy))
        found[name] = {
            "strategy": declared,
            "parameters": sum(p.numel() for p in model.parameters()),
            "copy": {
                "layers": small.layers,
                "widths_divided_by": small.factor,
                "ranks": small.strategy.axes.world,
                "parameters": sum(p.numel() for p in small.model.parameters()),
            },
            "first_s": seconds[0][0],
            "first_cpu_s": seconds[0][1],
            "remembered_s": seconds[1][0],
        }
    return found


def measure_runs(rounds: int, folder: Path) -> dict[str, Settings]:
    """Seconds of the command for one step."""
    import yaml

    found: dict[str, Settings] = {}
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    for name, (settings, strategy) in RUNS.items():
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for turn in range(rounds):
            for variant in VARIANTS:
                run = {
                    "version": 1,
                    "out": f"run-{turn}-{variant}",
                    "model": {"config": settings},
                    "data": {
                        "train": "text.txt",
                        "sequence": 32,
                        "tokenizer": {"vocab_size": 300},
                        "cache": str(folder / "data"),
                    },
                    "train": {"steps": 1, "batch": 4},
                    "strategy": {**strategy, "check": variant != "without"},
                    "launch": {"device": "cpu", "threads": 1},
                    "trackers": [],
                }
                (folder / "run.yaml").write_text(yaml.safe_dump(run))
                cache = folder / (f"cache-{turn}" if variant != "without" else "none")
                seconds[variant].append(_seconds(folder, {**os.environ, "XDG_CACHE_HOME": str(cache)}))
                subprocess.run(["rm", "-rf", folder / run["out"]], check=True)
        found[name] = {variant: statistics.median(times) for variant, times in seconds.items()}
        found[name]["rounds"] = rounds
        subprocess.run(["rm", "-rf", *folder.glob("cache-*")], check=True)
    return found


def _seconds(folder: Path, environment: dict[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "train", "run.yaml", "train.sample.tokens=0"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - begun


def judge_modules() -> Settings:
    """How many modules are judged rightly, and how many refusals name rules that pass."""
    strategy = Strategy(axes={"tensor": 2}, rules=modules.RULES)
    call = SeenCall.of((torch.zeros(2, 6, modules.WIDTH),), {})
    wrongly, advised, refused = [], 0, 0
    for right, kinds in ((False, modules.BROKEN), (True, modules.RIGHT)):
        for name, between in kinds.items():
            model = modules.Model(between)
            found = check._on_a_copy(model, strategy, make_plan(model, strategy), [call], spread)
            if isinstance(found, Reduced) != right:
                wrongly.append(name)
            if isinstance(found, str):
                refused += 1
                advised += "right, and checked" in found
    return {
        "broken": len(modules.BROKEN),
        "broken_refused": refused,
        "refusals_with_rules_that_pass": advised,
        "right": len(modules.RIGHT),
        "judged_wrongly": wrongly,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        judged = judge_modules()
        console.print(judged)
        shapes = measure_shapes()
        table = Table("published shape", "copy", "first, s", "of CPU, s", "remembered, s")
        for name, row in shapes.items():
            copy = row["copy"]
            table.add_row(
                name,
                f"{copy['layers']} layers, {copy['parameters'] / 1e6:.1f}M, {copy['ranks']} ranks",
                f"{row['first_s']:.1f}",
                f"{row['first_cpu_s']:.1f}",
                f"{row['remembered_s']:.2f}",
            )
        console.print(table)
        runs = measure_runs(options.rounds, Path(folder))
    table = Table("run of one step", *(f"{variant}, s" for variant in VARIANTS))
    for name, row in runs.items():
        table.add_row(name, *(f"{row[variant]:.1f}" for variant in VARIANTS))
    console.print(table)
    console.print(write("region_check", {"modules": judged, "shapes": shapes, "runs": runs}))
    return 1 if judged["judged_wrongly"] else 0


if __name__ == "__main__":
    sys.exit(main())
