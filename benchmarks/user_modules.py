"""Modules as users write them, under strategies of real workers, judged by plain PyTorch on one device.

    python benchmarks/user_modules.py [--only written] [--resume]
    python benchmarks/user_modules.py --cost

A cell is three steps of SGD of a module of `harness.own_modules` by real workers over gloo. It is right if each step's
loss, every gradient (and which weights have one), and every weight and buffer after the step are those of one device;
refused if it ends in one line. Exits with 1 when one is wrong, raises anything else, or takes longer than its limit.

`--cost`: what the agreement on collectives, and looking for writes, cost a step of a model without branches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any
from unittest import mock

import torch
from campaigns import Rows, general, one_line
from commandline import Only, run
from measure import in_turns, paired_ratio, quiet
from pages import Benchmark
from torch import Tensor, nn

from harness import RanksError, run_ranks
from harness.own_modules import PATTERNS, STRATEGIES, compared
from hyper_parallel import Strategy, parallelize

LIMIT_S = 60
_FAULTS = ("WRONG", "traceback", "hang")


def judged(name: str, strategy: str) -> dict[str, str]:
    """One cell, as the result file has it."""
    axes = STRATEGIES[strategy]["axes"]
    world = functools.reduce(lambda product, degree: product * degree, axes.values(), 1)
    try:
        outcomes = run_ranks(compared, world, name, strategy, timeout=LIMIT_S)
    except RanksError as error:
        hangs = "hung: ranks" in str(error)
        return {"outcome": "hang" if hangs else "traceback", "detail": one_line(str(error)[-400:], 400)}
    # What one rank refuses, all must.
    outcome, detail = min(outcomes, key=lambda pair: ("WRONG", "refused", "right").index(pair[0]))
    return {"outcome": outcome, "detail": one_line(detail, 400)}


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """How many modules and cells there are, and what they came to."""
    refusals = Counter(general(cell["detail"]) for cell in cells.values() if cell["outcome"] == "refused")
    return {
        "cost": BENCHMARK.kept().get("cost", {}),
        "modules": len({name.partition(" | ")[0] for name in cells}),
        "counts": dict(sorted(Counter(cell["outcome"] for cell in cells.values()).items())),
        "by kind": dict(
            sorted(
                Counter(
                    f"{PATTERNS[name.partition(' | ')[0]].kind}, {cell['outcome']}"
                    for name, cell in cells.items()
                ).items()
            )
        ),
        "refusals": dict(refusals.most_common()),
    }


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class _Layers(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _processor_seconds(step: Any) -> float:
    """Of this thread: gloo's threads wait for the other rank."""
    began = time.thread_time()
    step()
    return time.thread_time() - began


def _costs(rank: int, world: int, width: int, layers: int, tokens: int, rounds: int) -> dict[str, float]:
    """Processor seconds of this rank's step with and without the agreement, in turns: others use the machine, too."""
    quiet(threads=1)

    def step_of(agreed: bool) -> Any:
        torch.manual_seed(0)
        model = _Layers(width, layers)
        module = importlib.import_module("hyper_parallel.shard.parallelize")
        nothing = mock.patch.object(module, "agree_on_collectives")
        with contextlib.nullcontext() if agreed else nothing:
            parallelize(model, Strategy(axes={"shard": world}, check=False))
        x = torch.randn(1, tokens, width)

        def step() -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        return step

    steps = {"agreed": step_of(True), "FSDP2 alone": step_of(False)}
    seconds = in_turns(steps, rounds, _processor_seconds, warm=3)
    return paired_ratio(seconds["agreed"], seconds["FSDP2 alone"])


def main(
    only: Only = "",
    resume: Annotated[bool, "only cells without a result, or with a fault"] = False,
    strategies: Annotated[tuple[str, ...], "among those of the script"] = tuple(STRATEGIES),
    cost: Annotated[bool, "measure a step instead"] = False,
    rounds: int = 20,
) -> bool:
    """Run the cells; whether one is a fault."""
    quiet(threads=1)
    if cost:
        sizes = {"width": 256, "layers": 16, "tokens": 512}
        found = run_ranks(_costs, 2, *sizes.values(), rounds, timeout=600)[0]
        print(found)
        BENCHMARK.keep({**BENCHMARK.kept(), "cost": {**sizes, "workers": 2, **found}})
        return False
    rows = Rows(BENCHMARK, again=not resume, summary=summary)
    for name, pattern in PATTERNS.items():
        for strategy in strategies:
            cell = f"{name} | {strategy}"
            before = rows.rows.get(cell)
            if only not in f"{pattern.kind} {cell}" or (before and before["outcome"] not in _FAULTS):
                continue
            rows.rows[cell] = judged(name, strategy)
            if len(rows.rows) % 20 == 0:
                rows.write()
            print(f"{cell}: {rows.rows[cell]['outcome']} {rows.rows[cell]['detail']}", flush=True)
    rows.write()
    print(summary(rows.rows)["counts"])
    return any(cell["outcome"] in _FAULTS for cell in rows.rows.values())


BENCHMARK = Benchmark("user_modules", key="cells")

if __name__ == "__main__":
    run(main)
