"""Process replay: digests of what the code plans, captures and computes, recorded before a refactoring, compared after.

    python tools/replay.py record before.json [--only 'graph/llama/*'] [--processes 2]
    python tools/replay.py compare before.json after.json

A case is one line of the record, `kind/subject/…`:

    plan/FAMILY/STRATEGY     the sharding plan of a matrix cell
    graph/FAMILY/STRATEGY    rank 0's training step, captured on fake tensors and rewritten by the pass pipeline
    trace/FAMILY/STRATEGY    the priced operations that the step is lowered to
    bits/FAMILY/STRATEGY     parameters, losses and gradient norms of three steps, of some families on simulated ranks
    train/NAME               the same of three steps of `hyper-parallel train`, by real workers, under its options
    simulate/NAME, planner/NAME, inspect/NAME    what the commands print as JSON

Digests see no names of Python's: not those of classes, fields, functions and modules, which a refactoring may change. A
refusal's digest is that of its message. `compare` prints each case that differs and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import fnmatch
import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))  # the matrix is shared with the tests
STEPS = 3
SMALL_WORLD = 4
"""Ranks up to which steps are computed on simulated ranks; more take minutes."""
COMPUTED = ("llama", "gemma3", "deepseek-v3", "gpt2")
"""Families whose steps are computed: windows, tied weights, latent attention with experts, dropout."""
VOLATILE = ("search_seconds",)
"""Keys of printed answers that are measured on the clock."""

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
TRAINED: dict[str, list[str]] = {
    "one-device": ["launch.workers=1"],
    "eager": ["strategy.axes={shard: 2}", "train.engine=eager"],
    "shard": ["strategy.axes={shard: 2}"],
    "tensor": ["strategy.axes={tensor: 2}", "strategy.sequence=true"],
    "context": ["strategy.axes={context: 2}"],
    "micro-batches": ["strategy.axes={shard: 2}", "train.micro_batch=1", "strategy.memory.recompute=layer"],
    "budget": ["launch.workers=1", "strategy.memory.device=3MiB", "strategy.memory.host=64MiB"],
    "budget-shard": ["strategy.axes={shard: 2}", "strategy.memory.device=3MiB", "strategy.memory.host=64MiB"],
    "muon": ["strategy.axes={shard: 2}", "train.optimizer={name: muon, lr: 1.0e-3}"],
}
SIMULATED: dict[str, list[str]] = {
    "llama-8b": ["examples/simulate/llama-8b.yaml", "--cluster", "h100x64"],
    "llama-8b-ascend": ["examples/simulate/llama-8b.yaml", "--cluster", "cloudmatrix384", "--ranks", "64"],
    "llama-70b": ["examples/simulate/llama-70b.yaml", "--cluster", "h100x256"],
    "mixtral": ["examples/simulate/mixtral-8x7b.yaml", "--cluster", "h100x64"],
    "quickstart-as-written": ["examples/quickstart.yaml", "--cluster", "h100x4", "--as-written"],
    "quickstart-budget": [
        *("examples/quickstart.yaml", "--cluster", "h100x4"),
        *("strategy.memory.device=60MiB", "strategy.memory.host=1GiB", "--explain"),
    ],
}
ASKED: dict[str, list[str]] = {
    "llama-405b": ["--model", "llama-3-405b", "--cluster", "h100x2048", "--batch", "2048"],
    "deepseek-v3": [
        "--model",
        "deepseek-v3",
        "--cluster",
        "h800x2048",
        "--batch",
        "8192",
        "--sequence",
        "4k",
    ],
    "runnable": ["--model", "llama-3-8b", "--cluster", "h100x64", "--batch", "512", "--runnable"],
    "memory": ["--model", "llama-3-8b", "--cluster", "h100x64", "--batch", "512", "--objective", "memory"],
    "fewest": ["--model", "llama-3-70b", "--cluster", "h100", "--batch", "256", "--fit"],
    "lengths": ["--model", "llama-3-8b", "--cluster", "h100x64", "--batch", "256", "--sequence", "8k..128k"],
    "ascend": ["--model", "qwen3-235b-a22b", "--cluster", "cloudmatrix384", "--batch", "1024"],
}
INSPECTED = ["examples/quickstart.yaml", "examples/llama-405b.yaml", "examples/deepseek-v3.yaml"]


def digest(value: Any) -> str:
    """16 hexadecimal digits of a value's content."""
    text = json.dumps(plain(value), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """A value as JSON, without names of classes and fields."""
    import torch

    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        bits = hashlib.sha256(whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        return [str(whole.dtype), list(whole.shape), bits.hexdigest()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return sorted(([plain(key), plain(one)] for key, one in value.items()), key=json.dumps)
    if isinstance(value, Set):
        return sorted(map(plain, value), key=json.dumps)
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    return str(getattr(value, "__name__", value))


def graph_of(step: Any) -> list[Any]:
    """A StepGraph as plain data; nodes by their numbers, process groups by axis and ranks."""
    from torch import fx

    from hyper_parallel.graph.ir import Value

    numbers = {node: index for index, node in enumerate(step.graph.nodes)}

    def shown(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, str) and value in step.groups:
            return plain([step.groups[value].axis, step.groups[value].ranks])
        if isinstance(value, Value):
            return [
                list(map(str, value.shape)),
                list(map(str, value.stride)),
                str(value.dtype),
                value.storage,
            ]
        if isinstance(value, Mapping):
            return [[key, shown(one)] for key, one in sorted(value.items())]
        if isinstance(value, list | tuple | slice):
            parts = [value.start, value.stop, value.step] if isinstance(value, slice) else value
            return [shown(part) for part in parts]
        return plain(value)

    rows = [
        [
            node.op,
            str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else "",
            shown(node.args),
            shown(node.kwargs),
            shown(node.meta.get("value")),
            *(node.meta["region"].phase, node.meta["module"], node.meta["recomputed"]),
        ]
        for node in step.graph.nodes
    ]
    storages = [[str(one.bytes), str(one.device), one.name] for one in step.storages]
    return [rows, plain(step.inputs), step.outputs, storages, plain(step.gradients), plain(step.constants)]


class Cell:
    """One family of the matrix under one of its strategies."""

    def __init__(self, family: str, strategy: str) -> None:
        from harness.equivalence import STRATEGIES, build_model, family_config
        from harness.families import FAMILIES

        self.family = FAMILIES[family]
        self.config = family_config(self.family, STRATEGIES[strategy])
        self.strategy = self.config.strategy
        self.model = build_model(self.family)

    def plan(self) -> Iterator[tuple[str, Any]]:
        from hyper_parallel.shard.plan import make_plan

        yield "plan", make_plan(self.model, self.strategy)

    def graph(self) -> Iterator[tuple[str, Any]]:
        from hyper_parallel.estimate.build_trace import captured_step
        from hyper_parallel.graph.lower import lowered
        from hyper_parallel.offloading.pass_pipeline import passes

        step = captured_step(self.model, self.config, self.strategy, 1, passes(self.strategy, ordered=False))
        yield "graph", graph_of(step)
        found = lowered(step, views=True)
        yield "trace", [found.ops, found.resident]

    def bits(self) -> Iterator[tuple[str, Any]]:
        from harness.equivalence import draw_batch
        from hyper_parallel.verify import run
        from hyper_parallel.verify.step import run_step

        batches = [draw_batch(self.family, seed=step) for step in range(STEPS)]
        with run._ranks(self.config):
            first = run.step_of(self.model, self.config, self.strategy, batches[0], "traceable", None)
            outcomes = [first]
            for batch in batches[1:]:
                self.model.zero_grad(set_to_none=True)
                outcomes.append(run_step(self.model, self.config, batch))
        yield "bits", [[one.loss, one.grad_norm, one.gradients, one.values] for one in outcomes]


def of_cell(kind: str, family: str, strategy: str) -> Iterator[tuple[str, str]]:
    """Digests of one kind of one cell; of one that is refused, its message's."""
    from hyper_parallel.errors import HyperParallelError

    try:
        for name, value in getattr(Cell(family, strategy), kind)():
            yield f"{name}/{family}/{strategy}", digest(value)
    except HyperParallelError as refusal:
        yield f"{kind}/{family}/{strategy}", f"refused {digest(str(refusal))}"


def of_command(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """Digest of what a command answers."""
    if kind == "train":
        yield f"train/{name}", digest(trained(TRAINED[name]))
        return
    arguments = {
        "simulate": lambda: ["simulate", *SIMULATED[name]],
        "planner": lambda: ["plan", *ASKED[name]],
        "inspect": lambda: ["inspect", name],
    }[kind]()
    done = command([*arguments, "--json"], ROOT)
    answer = steady(json.loads(done.stdout)) if not done.returncode else done.stderr
    yield f"{kind}/{name}", digest([done.returncode, answer])


def command(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def steady(answer: Any) -> Any:
    """An answer without what was measured."""
    if isinstance(answer, Mapping):
        return {key: steady(value) for key, value in answer.items() if key not in VOLATILE}
    return [steady(one) for one in answer] if isinstance(answer, list) else answer


def trained(options: Sequence[str]) -> Any:
    """Losses, gradient norms and the last checkpoint's tensors of a short run."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        text = "\n".join(f"def function_{index}(x): return x * {index}" for index in range(400))
        (folder / "text.txt").write_text(text)
        run = {
            "version": 1,
            "out": "out",
            "model": {"config": MODEL},
            "data": {"train": ["text.txt"], "tokenizer": {"vocab_size": 300}, "sequence": 32},
            "train": {"steps": STEPS, "batch": 4, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "checkpoint": {"every": STEPS},
        }
        (folder / "run.yaml").write_text(json.dumps(run))
        done = command(["train", "run.yaml", *options], folder)
        if done.returncode:
            return [done.returncode, done.stderr.replace(str(folder), "")]
        rows = (folder / "out" / "metrics.jsonl").read_text().splitlines()
        metrics = [
            {key: row[key] for key in ("step", "loss", "grad_norm", "lr") if key in row}
            for row in map(json.loads, rows)
        ]
        tensors = {}
        for file in sorted((folder / "out").rglob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                where = str(file.relative_to(folder))
                tensors.update({f"{where} {key}": opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
        return [metrics, tensors]


def cases() -> Iterator[tuple[str, Callable[..., Iterator[tuple[str, str]]], tuple[str, ...]]]:
    """(name, what records it, its arguments)."""
    from harness.equivalence import STRATEGIES, family_config
    from harness.families import FAMILIES, WITH_EXPERTS

    for family, (strategy, fields) in itertools.product(FAMILIES, STRATEGIES.items()):
        if "expert" in fields["axes"] and family not in WITH_EXPERTS:
            continue
        world = family_config(FAMILIES[family], fields).strategy.axes.world
        computed = world <= SMALL_WORLD and family in COMPUTED
        for kind in ("plan", "graph", *(["bits"] if computed else [])):
            yield f"{kind}/{family}/{strategy}", of_cell, (kind, family, strategy)
    commands: dict[str, Sequence[str]] = {
        "train": list(TRAINED),
        "simulate": list(SIMULATED),
        "planner": list(ASKED),
        "inspect": INSPECTED,
    }
    for kind, names in commands.items():
        for name in names:
            yield f"{kind}/{name}", of_command, (kind, name)


def _recorded(
    case: tuple[Callable[..., Iterator[tuple[str, str]]], tuple[str, ...]],
) -> list[tuple[str, str]]:
    record, arguments = case
    return list(record(*arguments))


def record(only: str, processes: int) -> dict[str, str]:
    """All cases whose names match, in processes of their own."""
    chosen = [(how, arguments) for name, how, arguments in cases() if fnmatch.fnmatchcase(name, only)]
    found: dict[str, str] = {}
    os.environ["PYTHONHASHSEED"] = "0"  # some models iterate over sets while they are built or run
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=40) as pool:
        for number, rows in enumerate(pool.imap_unordered(_recorded, chosen), start=1):
            found.update(rows)
            print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the digests of this tree")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", default="*", help="a pattern of case names")
    recording.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    comparing = commands.add_parser("compare", help="two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        found = record(given.only, given.processes)
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} digests: {given.file}")
        return 0
    before, after = (json.loads(file.read_text()) for file in (given.before, given.after))
    differs = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    for name in differs:
        print(f"{name}: {before.get(name, 'absent')} before, {after.get(name, 'absent')} after")
    print(f"{len(before.keys() | after.keys()) - len(differs)} equal, {len(differs)} differ")
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main())
