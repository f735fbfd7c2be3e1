"""Do pipelines compute what one device computes? python benchmarks/verify_pipelines.py [--parts a b] [--only TEXT]

A cell is one training step on real gloo workers: loss, gradient norm, every gradient and every updated value against
one device.

- **schedules**: every schedule on 2 and 4 ranks, with 1 and 2 stages on each, for 8 families
- **products**: pipeline × shard × replicate × tensor (1D and 2D) × context × expert, up to 8 workers
- **large**: the same on 16 and 32 workers

A cell is right (within 1e-5), refused (with the reason), or wrong. Cells run several to a start of workers; where a
start fails, each of its cells runs alone. The result is written after each start; cells that it has are left out unless
`--again` is given. Ends with 1 when a cell is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from campaigns import Rows
from commandline import Again, Only, run
from measure import quiet
from pages import Benchmark

from harness.pipeline_steps import Case, Compared, against_one_device, settings_of
from harness.ranks import RanksError

BENCHMARK = Benchmark("verify_pipelines", key="cells")
TOLERANCE = 1e-5
PER_START = 12
PARTS = ("schedules", "products", "large")

FAMILIES = ("llama-tied", "qwen3", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "deepseek-v3")
ONE_STAGE = ("gpipe", "1f1b", "1f1b-split", "zb-h1", "zb-h2", "auto")
TWO_STAGES = ("interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipev", "auto")

SEQUENCE = {"sequence": True}
RING, ULYSSES = {"context": {"method": "ring"}}, {"context": {"method": "ulysses"}}
Product = tuple[str, dict[str, int], dict[str, Any]]
"""A family, axes beside those of the pipeline, and what else its strategy has."""
PRODUCTS: dict[str, Product] = {
    "shard 2": ("llama-tied", {"shard": 2}, {}),
    "shard 4, optimizer": ("llama-tied", {"shard": 4}, {"memory": {"shard": "optimizer"}}),
    "replicate 2 · shard 2, gradients": (
        "qwen3",
        {"replicate": 2, "shard": 2},
        {"memory": {"shard": "gradients"}},
    ),
    "tensor 2, sequence": ("gemma3", {"tensor": 2}, SEQUENCE),
    "tensor 4": ("llama-tied", {"tensor": 4}, {}),
    "tensor 2 × 2": ("llama-tied", {"tensor_x": 2, "tensor_y": 2}, {}),
    "context 2, ring": ("gemma3", {"context": 2}, RING),
    "context 4, ring": ("llama", {"context": 4}, RING),
    "context 2, ulysses": ("llama-tied", {"context": 2}, ULYSSES),
    "shard 2 · tensor 2, sequence": ("llama-tied", {"shard": 2, "tensor": 2}, SEQUENCE),
    "shard 2 · context 2": ("qwen3", {"shard": 2, "context": 2}, {}),
    "context 2 · tensor 2": ("gemma2", {"context": 2, "tensor": 2}, {}),
    "shard 2 · expert 2": ("mixtral", {"shard": 2, "expert": 2}, {}),
    "shard 4 · expert 4": ("deepseek-v3", {"shard": 4, "expert": 4}, {}),
    "tensor 2 · expert 2": ("mixtral", {"tensor": 2, "expert": 2}, {}),
    "shard 2 · tensor 2 · expert 4": ("mixtral", {"shard": 2, "tensor": 2, "expert": 4}, {}),
    "context 2 · tensor 2 · expert 2": ("qwen3-moe", {"context": 2, "tensor": 2, "expert": 2}, {}),
}
OF_EXPERTS = {"shard": 2, "context": 2, "expert": 4}
LARGE: dict[str, Product] = {
    "shard 2 · context 2 · tensor 2": ("llama-tied", {"shard": 2, "context": 2, "tensor": 2}, SEQUENCE),
    "shard 2 · tensor 2 × 2": ("llama-tied", {"shard": 2, "tensor_x": 2, "tensor_y": 2}, {}),
    "shard 2 · context 2 · tensor 2 · expert 4": ("mixtral", {**OF_EXPERTS, "tensor": 2}, {}),
    "shard 2 · context 2 · tensor 2 × 2 · expert 4": (
        "mixtral",
        {**OF_EXPERTS, "tensor_x": 2, "tensor_y": 2},
        {},
    ),
}


def family(name: str, layers: int) -> dict[str, Any]:
    """Its config with so many layers; with experts also with the auxiliary loss, and gpt2 with dropout."""
    auxiliary = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    changes: dict[str, Any] = {"mixtral": auxiliary, "qwen3-moe": auxiliary, "gpt2": dropout}
    return settings_of(name, layers, **changes.get(name, {}))


def cells() -> dict[str, tuple[str, Case]]:
    found: dict[str, tuple[str, Case]] = {}
    for name in FAMILIES:
        for ranks in (2, 4):
            for virtual, schedules in ((1, ONE_STAGE), (2, TWO_STAGES)):
                for schedule in schedules:
                    pipeline = {"schedule": schedule, "virtual": virtual}
                    strategy: dict[str, Any] = {"axes": {"pipeline": ranks}, "pipeline": pipeline}
                    title = f"{name}, {schedule}, {ranks} ranks × {virtual}"
                    found[title] = "schedules", Case(family(name, ranks * virtual), strategy)
    for part, products in (("products", PRODUCTS), ("large", LARGE)):
        for title, (name, product, more) in products.items():
            for ranks in (2, 4):
                axes = {"pipeline": ranks, **product}
                data = axes.get("shard", 1) * axes.get("replicate", 1)
                train = {"micro_batch": 1, "batch": max(8, data * ranks)}
                case = Case(family(name, ranks), {**more, "axes": axes}, train)
                world = case.config.strategy.axes.world
                if (world <= 8) == (part == "products") and world <= 32:
                    found[f"{name}, pipeline {ranks} · {title}"] = part, case
    return found


def judge(case: Case, found: Compared) -> dict[str, Any]:
    said = {"workers": case.config.strategy.axes.world, "plan": found.plan}
    if found.report is None:
        return {**said, "status": "refused", "reason": found.refused}
    right = found.report.ok and found.error <= TOLERANCE and found.buffers == 0.0
    cell = {**said, "status": "right" if right else "wrong", "error": found.error}
    return cell if right else {**cell, "reason": "; ".join(found.report.failures[:3]) or "buffers differ"}


def started(world: int, part: dict[str, Case]) -> dict[str, Any]:
    """The cells of one start of workers, each alone where the start fails."""
    try:
        found = against_one_device(world, list(part.values()), timeout=180.0 + 30.0 * len(part) * world / 4)
    except RanksError as error:
        if len(part) == 1:
            return {name: {"workers": world, "status": "wrong", "reason": str(error)[-600:]} for name in part}
        cells: dict[str, Any] = {}
        for name, case in part.items():
            cells |= started(world, {name: case})
        return cells
    return {name: judge(case, one) for (name, case), one in zip(part.items(), found, strict=True)}


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {"tolerance": TOLERANCE, "counts": Counter(cell["status"] for cell in cells.values())}


def main(parts: Annotated[tuple[str, ...], PARTS] = PARTS, only: Only = "", again: Again = False) -> bool:
    """Run what is missing; whether a cell is wrong."""
    quiet()
    rows = Rows(BENCHMARK, summary=summary)
    left: dict[int, dict[str, Case]] = {}
    asked = {name: case for name, (part, case) in cells().items() if part in parts}
    for name in rows.missing(asked, only, again):
        left.setdefault(asked[name].config.strategy.axes.world, {})[name] = asked[name]
    for world, cases in sorted(left.items()):
        names = list(cases)
        each = PER_START if world <= 4 else 2
        for at in range(0, len(names), each):
            rows.rows |= started(world, {name: cases[name] for name in names[at : at + each]})
            rows.rows = dict(sorted(rows.rows.items()))
            rows.write()
            print(f"{world} workers: {at + each} of {len(names)}, {summary(rows.rows)['counts']}", flush=True)
    for name, cell in rows.rows.items():
        if cell["status"] != "right":
            print(f"{cell['status']}: {name}: {cell['reason']}")
    return any(cell["status"] == "wrong" for cell in rows.rows.values())


if __name__ == "__main__":
    run(main)
