"""Our pipeline runtime beside torch.distributed.pipelining on CPU workers: python benchmarks/pipeline.py

The same Llama with the same weights, cut into the same stages at the same layers, the same loss code, schedule and
micro-batches, in the same processes over gloo: 2 workers with one thread each. A step is the forward and the backward
passes of all micro-batches with the gradients added up; neither side has an optimizer.

Blocks of four steps, ours · theirs · theirs · ours or the reverse, drawn at random; a step's time is that of the
slowest worker after a barrier. The ratio ours / theirs is that of the median steps, its 95% interval a bootstrap over
blocks; `paired` is the median of the blocks' own ratios. First the losses, the gradients, and the orders in which each
rank ran its actions are compared. Each block waits until other processes leave the cores idle, for some seconds at
most, and what they took during it is recorded. Peaks of memory are those of other processes, whose allocations are
counted.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import allocations
import torch
import torch.distributed as dist
from commandline import run
from measure import interval, load, paired_ratio, timed
from pages import Benchmark, table
from pipeline_workers import PEERS, Case, Pairs, System
from processes import scratch, workers

CASES = {
    "hidden 64": Case(64, 4, sequence=32, micro_batches=8),
    "hidden 128": Case(128, 4, sequence=128, micro_batches=8),
    "hidden 256": Case(256, 8, sequence=128, micro_batches=8),
    "hidden 256, 4 micro-batches": Case(256, 8, sequence=128, micro_batches=4),
    "hidden 512": Case(512, 4, sequence=128, micro_batches=4),
}
BLOCKS = {64: 100, 128: 60, 256: 30, 512: 30}
"""By hidden size."""
FEWEST = 8
"""Blocks, whatever time they take."""
Block = tuple[float, float, float]
"""Seconds of a step of ours and of theirs, each the mean of two, and the cores that other processes kept busy."""


class Effort(NamedTuple):
    """How long a schedule is measured."""

    blocks: int
    """At most; 0 counts allocations instead."""
    seconds: float
    """After which no block begins, once there are a few."""
    patience: float
    """Seconds to wait for idle cores before each block."""


def busy_seconds() -> float:
    """What all cores have computed since the machine was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float, share: float = 0.1, look: float = 0.2) -> None:
    """Wait until other processes leave the cores alone, `patience` seconds at most."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before = busy_seconds()
        time.sleep(look)
        if busy_seconds() - before < share * look * (os.cpu_count() or 1):
            return


def blocks_of(ours: System, theirs: System, rank: int, world: int, effort: Effort, seed: int) -> list[Block]:
    """Blocks of four steps in either order of ABBA, drawn at random, the same on all ranks."""
    draw = random.Random(seed)
    found: list[Block] = []
    until = time.monotonic() + effort.seconds
    for _ in range(effort.blocks):
        first = draw.random() < 0.5
        spent = {True: 0.0, False: 0.0}
        over = torch.tensor(len(found) >= FEWEST and time.monotonic() > until)
        dist.broadcast(over, 0)
        if over:
            break
        if rank == 0:
            wait_for_quiet(effort.patience)
        dist.barrier()
        own, all_cores, begun = time.process_time(), busy_seconds(), time.perf_counter()
        for mine in (first, not first, not first, first):
            spent[mine] += timed((ours if mine else theirs).step, world)
        together = torch.tensor(time.process_time() - own)
        dist.all_reduce(together)
        others = busy_seconds() - all_cores - float(together)
        seconds = time.perf_counter() - begun
        found.append((spent[True] / 2, spent[False] / 2, max(0.0, others) / seconds))
    return found


def differences(ours: System, theirs: System) -> dict[str, float]:
    """Of the loss, and the largest of a gradient's elements over that gradient's largest."""
    mine, other = ours.gradients(), theirs.gradients()
    assert mine.keys() == other.keys(), sorted(mine.keys() ^ other.keys())
    worst = max(float((mine[name] - other[name]).abs().max() / other[name].abs().max()) for name in mine)
    a, b = ours.loss(), theirs.loss()
    assert (a is None) == (b is None)
    loss = 0.0 if a is None or b is None else abs(a - b)
    found = torch.tensor([worst, loss])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"gradient": float(found[0]), "loss": float(found[1])}


def peaks(ours: System, theirs: System) -> dict[str, float]:
    """The most bytes of tensors over what was there before the step, of the rank with most; gradients included."""
    found: dict[str, float] = {}
    for name, system in (("ours", ours), ("theirs", theirs)):
        system.step()
        gc.collect()
        count = allocations.Allocations([*system.gradients().values()])
        system.step()
        most = torch.tensor(float(count.most))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = float(most)
    return found


def worker(rank: int, world: int, case: Case, names: Sequence[str], effort: Effort) -> dict[str, Any]:
    """What is measured on one rank, by the schedule's name."""
    pairs = Pairs(case, rank, world)
    result: dict[str, Any] = {}
    for name in names:
        ours, theirs, schedule = pairs.of(name)
        for _ in range(3):  # warm-up
            ours.step()
            theirs.step()
        everyone = [False] * world
        dist.all_gather_object(everyone, theirs.order() == [str(action) for action in schedule.orders[rank]])
        result[name] = {
            "same_order": all(everyone),
            "difference": differences(ours, theirs),
            "captured_s": pairs.captured_s,
        }
        if effort.blocks:
            result[name]["blocks"] = blocks_of(ours, theirs, rank, world, effort, len(result))
        else:
            result[name]["peak_bytes"] = peaks(ours, theirs)
    return result


def ratio_of_medians(blocks: Sequence[Block]) -> float:
    ours, theirs, _ = zip(*blocks, strict=True)
    return statistics.median(ours) / statistics.median(theirs)


def measured(
    case: Case, names: Sequence[str], world: int, effort: Effort, library: Path | None
) -> dict[str, Any]:
    """A case's result, by the schedule's name. `library` is that of `allocations`, where they are counted."""
    before = load()
    result: dict[str, Any] = workers(worker, world, case, names, effort)[0]
    memory: dict[str, Any] = {}
    if library is not None:
        counting = effort._replace(blocks=0)
        memory = workers(worker, world, case, names, counting, LD_PRELOAD=str(library))[0]
    for name, found in result.items():
        blocks: list[Block] = found.pop("blocks")
        ours, theirs, others = zip(*blocks, strict=True)
        found |= {
            "ratio": ratio_of_medians(blocks),
            **interval(ratio_of_medians, blocks),
            "paired": paired_ratio(ours, theirs),
            "other_cores_busy": statistics.median(others),
            "load_before": before,
        }
        if name in memory:
            found["peak_bytes"] = memory[name]["peak_bytes"]
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:

    def in_order(kept: Mapping[str, Any]) -> tuple[int, ...]:
        case = kept["case"]
        return kept["workers"], *(case[key] for key in ("hidden", "layers", "sequence", "micro_batches"))

    def rows() -> Iterator[tuple[object, ...]]:
        for kept in sorted(result["cases"].values(), key=in_order):
            case = Case(**kept["case"])
            title = f"hidden {case.hidden} ({case.layers}, {case.sequence}, {case.micro_batches})"
            for name in (name for name in PEERS if name in kept["schedules"]):
                found = kept["schedules"][name]
                peaks, ratios = found.get("peak_bytes"), []
                for one in (found["paired"], found):
                    ratios += [f"{one['ratio']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}"]
                memory = f"{peaks['ours'] / peaks['theirs']:.2f}" if peaks else ""
                counts = f"{found['paired']['pairs']:.0f}", f"{found['other_cores_busy']:.1f}"
                yield title, kept["workers"], f"`{name}`", *ratios, memory, *counts

    yield from table(
        "Model (layers, tokens, micro-batches) | Workers | Schedule | Ours / theirs, by blocks | 95% | Of median steps "
        "| 95% | Peak memory, ours / theirs | Blocks | Other processes, cores",
        rows(),
    )


BENCHMARK = Benchmark("pipeline", {"pipeline-benchmark.md": page})


def main(
    case: Annotated[tuple[str, ...], tuple(CASES)] = tuple(CASES),
    schedule: Annotated[tuple[str, ...], tuple(PEERS)] = tuple(PEERS),
    workers: Annotated[int, "more than there are cores are oversubscribed"] = 2,
    blocks: Annotated[int, "of each case; as many as its size needs where left out"] = 0,
    seconds: Annotated[float, "for the blocks of each schedule"] = 600.0,
    patience: Annotated[float, "seconds to wait for idle cores before a block"] = 5.0,
    no_memory: Annotated[bool, "leave out the peaks, which need a C compiler"] = False,
) -> None:
    """Measure case after case; other cases, and schedules not measured now, stay as they were."""
    with scratch() as folder:
        library = None if no_memory else allocations.compiled(folder)
        for size in case:
            shape, title = CASES[size], f"{size}, {workers} workers"
            effort = Effort(blocks or BLOCKS[shape.hidden], seconds, patience)
            found = measured(shape, schedule, workers, effort, library)
            for name, one in found.items():
                print(title, name, one, flush=True)
            cases = BENCHMARK.kept().get("cases", {})
            cases[title] = {
                "case": vars(shape),
                "workers": workers,
                "threads": 1,
                "oversubscribed": workers > (os.cpu_count() or 1),
                "schedules": cases.get(title, {}).get("schedules", {}) | found,
            }
            BENCHMARK.keep({"cases": cases})


if __name__ == "__main__":
    run(main)
