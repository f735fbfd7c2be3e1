"""Patterns of user loops, drawn from a grammar, under three budgets each; the C library's allocator is the witness.

    python benchmarks/user_loops.py

`harness.user_loops` has the grammar: settings in containers, side effects, caches, views, dtypes, wrappers, memory that
changes, several models. Each cell is a pattern and a budget (the least that its plans accept, 1.3 times that, much), in
a forked process of its own, so that a segmentation fault is an outcome like another. A cell is

- right: losses, gradients, what parts of the loop keep, weights and the random state are those of the plain loop;
- refused: by one line of an error of the project's, with the model usable afterwards;
- uncaptured: right, and a line says that calls run without a budget;
- wrong, traceback, crash, timeout: everything else; over: right, and above the budget.

From each call until its backward pass is over, bytes that the allocator has given to tensors are counted
(`allocations`). The time of guards is that of looking at Python state and at the call's tensors, which each call of a
planned kind does, beside the time of the step; a Llama of 12 layers and a GPT-2 of 12. Results:
benchmarks/results/user_loops.json.
"""

from __future__ import annotations

import collections
import importlib
import json
import logging
import os
import pickle
import signal
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from allocations import Allocations, compiled
from commandline import run
from measure import quiet
from pages import Benchmark
from processes import fresh, scratch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from harness.user_loops import STEPS, batch_of, built, drawn, values
from hyper_parallel.errors import BudgetError, HyperParallelError

BENCHMARK = Benchmark("user_loops")
MUCH, HOST = 8 << 20, "32MiB"
BUDGETS = {"least": 1.0, "1.3 of the least": 1.3, "much": None}
PER_PROCESS = 15
SECONDS = 240
"""After which a cell has hung."""
NO_BUDGET = "run uncaptured"
"""What the line says of calls without a budget."""


class Lines(logging.Handler):
    """Keeps the log's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Peak:
    """The most bytes of each step's passes."""

    def __init__(self) -> None:
        self.peak, self.where = 0, ""

    def watch(self, net: Any, optimizer: torch.optim.Optimizer, batch: Any) -> AbstractContextManager[Any]:
        there = [*net.parameters(), *net.buffers(), *batch.values()]
        there += [p.grad for p in net.parameters() if p.grad is not None]
        there += [x for state in optimizer.state.values() for x in state.values()]
        return _Watching(self, [x for x in there if isinstance(x, Tensor) and x.layout == torch.strided])


class _Watching(Allocations):
    def __init__(self, peak: Peak, there: Sequence[Tensor]) -> None:
        super().__init__(there)
        self._of = peak

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._of.peak, self._of.where = max((self._of.peak, self._of.where), (self.peak, self.where))


def run_cell(
    pattern: Sequence[tuple[str, str]], room: float | None, own: Sequence[Tensor], least: int = 1
) -> dict[str, Any]:
    """One pattern with so many times the least budget; None for much. `least`: where the search for it begins."""
    budget = MUCH if room is None else max(1, int(least * room))
    for _ in range(8):
        lines = Lines()
        logging.getLogger("hyper_parallel").addHandler(lines)
        net, peak = built(pattern), Peak()
        try:
            hp.offload(net, budget=budget, host=HOST)
            found = values(net, peak.watch)
        except BudgetError as error:
            if room is None or error.floor is None:
                return _refused(net, error)
            budget = max(budget + 1, int(error.floor * room))
            continue
        except HyperParallelError as error:
            return _refused(net, error)
        finally:
            logging.getLogger("hyper_parallel").removeHandler(lines)
            hp.release(net)
        off = distance(found, own)
        said = [line for line in lines.lines if NO_BUDGET in line]
        came = "wrong" if off is None or off > 0 else "uncaptured" if said else "right"
        if came == "right" and peak.peak > budget and not any(part.computes for part in net.parts):
            came = "over"
        return {
            "came": came,
            "off": off,
            "budget": budget,
            "peak": peak.peak,
            "where": peak.where,
            "said": said[:1],
        }
    return {"came": "wrong", "why": f"each budget that was said to do was refused, the last {budget}"}


def _refused(net: Any, error: HyperParallelError) -> dict[str, Any]:
    """A refusal; it is wrong where the model does not run afterwards, or where it takes several lines."""
    hp.release(net)
    came = "refused" if "\n" not in str(error) else "wrong"
    with suppress(RuntimeError):
        net(**{name: x.to(net.head.weight.dtype) if name == "x" else x for name, x in batch_of(0).items()})
    held = [x for part in net.parts for x in part.seen(net)]
    empty = [x for x in held if type(x) is not Tensor or (x.numel() and not x.untyped_storage().nbytes())]
    return {"came": "wrong" if empty else came, "why": str(error)}


def distance(found: Sequence[Tensor], own: Sequence[Tensor]) -> float | None:
    """How far values are off, of the norm of the plain loop's, above rounding; None where they are not comparable."""
    if [x.shape for x in found] != [x.shape for x in own]:
        return None
    most = 0.0
    for a, b in zip(found, own, strict=True):
        if torch.equal(a, b) or a.dtype != b.dtype:
            most = max(most, 0.0 if a.dtype == b.dtype else 1.0)
            continue
        off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))
        bound = 10 * torch.finfo(a.dtype).eps if a.dtype.is_floating_point else 0.0
        most = max(most, off if not off <= bound else 0.0)
    return most


def forked(pattern: Sequence[tuple[str, str]], room: float | None, least: int = 1) -> dict[str, Any]:
    """A cell in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            try:
                own = values(built(pattern))
            # A pattern whose parts do not go together is none.
            except Exception as error:
                result = {"came": "none", "why": f"{type(error).__name__}: {error}"}
            else:
                result = run_cell(pattern, room, own, least)
        # Whatever it is: a traceback is an outcome.
        except BaseException as error:
            result = {
                "came": "traceback",
                "why": f"{type(error).__name__}: {error}",
                "at": traceback.format_exc()[-1500:],
            }
        with os.fdopen(writing, "wb") as file:
            file.write(pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    if answer:
        found: dict[str, Any] = pickle.loads(answer)
        return found
    by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"came": "timeout" if by == signal.SIGALRM else "crash", "why": f"signal {by}"}


def cells(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """All budgets of some patterns."""
    _plan_quickly()
    rows = []
    for seed in seeds:
        pattern, least = drawn(seed), 1
        for name, room in BUDGETS.items():
            row: dict[str, Any] = {
                "seed": seed,
                "pattern": [f"{group}: {part}" for group, part in pattern],
                "room": name,
            }
            row |= forked(pattern, room, least)
            rows.append(row)
            least = row.get("budget", least)
            if row["came"] == "none":
                break
    return rows


def _plan_quickly() -> None:
    quiet(threads=1)
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("hyper_parallel").propagate = False
    logging.getLogger("hyper_parallel").setLevel(logging.INFO)
    for module, name, value in (("solve", "WORK", 0), ("graph_search", "PLANS", 1)):
        setattr(importlib.import_module(f"hyper_parallel.offloading.schedule.{module}"), name, value)


def guard_times(rounds: int = 15) -> dict[str, Any]:
    """Seconds that guards take of a step."""
    from hyper_parallel.offloading.autograd import plan_cache

    _plan_quickly()
    found = {}
    for family in ("llama", "gpt2"):
        sizes: dict[str, Any] = {"vocab_size": 2048}
        sizes |= (
            {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 12, "num_attention_heads": 4}
            if family == "llama"
            else {"n_embd": 128, "n_layer": 12, "n_head": 4}
        )
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).train()
        model = hp.offload(model, budget="1GiB", host="64MiB")
        ids = torch.randint(2048, (4, 128))
        guards: list[float] = []
        ready = plan_cache.Plans.ready

        def timed(*arguments: Any, _ready: Any = ready, _guards: list[float] = guards) -> Any:
            begun = time.perf_counter()
            answer = _ready(*arguments)
            _guards.append(time.perf_counter() - begun)
            return answer

        plan_cache.Plans.ready = timed  # type: ignore[assignment,method-assign]
        steps = []
        for _ in range(rounds + 3):
            begun = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            steps.append(time.perf_counter() - begun)
        plan_cache.Plans.ready = ready  # type: ignore[method-assign]
        guard, step = statistics.median(guards[3:]), statistics.median(steps[3:])
        modules = len(list(model.modules()))
        hp.release(model)
        found[family] = {"modules": modules, "guards_s": guard, "step_s": step, "share": guard / step}
    return found


def summarized(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Outcomes, and how many patterns there were."""
    ran = [row for row in rows if row["came"] != "none"]
    return {
        "patterns": len({row["seed"] for row in ran}),
        "cells": len(ran),
        "outcomes": dict(collections.Counter(row["came"] for row in ran)),
    }


def main(patterns: int = 150, first: int = 0) -> bool:
    """Run so many patterns from a seed on; whether a cell is wrong."""
    rows: list[dict[str, Any]] = []
    guards = fresh(guard_times)
    print(json.dumps(guards), flush=True)
    with scratch() as folder:
        library, seed = compiled(folder), first
        while summarized(rows)["patterns"] < patterns:
            for row in fresh(cells, list(range(seed, seed + PER_PROCESS)), LD_PRELOAD=str(library)):
                if summarized(rows)["patterns"] < patterns or row["seed"] == rows[-1]["seed"]:
                    rows.append(row)
                    print(
                        row["seed"], row["room"], row["pattern"], row["came"], row.get("why", ""), flush=True
                    )
            seed += PER_PROCESS
            BENCHMARK.keep(
                {
                    "summary": summarized(rows),
                    "steps": STEPS,
                    "guards": guards,
                    "cells": [r for r in rows if r["came"] != "none"],
                }
            )
    return not {row["came"] for row in rows} <= {"right", "refused", "uncaptured", "none"}


if __name__ == "__main__":
    run(main)
