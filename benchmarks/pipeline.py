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

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import allocations
import torch.multiprocessing as mp
from measure import RESULTS, answer_of, free_port, paired_ratio, write
from pipeline_timing import Block, Effort
from pipeline_workers import PEERS, Case, worker

CASES = {
    "hidden 64": Case(64, 4, sequence=32, micro_batches=8),
    "hidden 128": Case(128, 4, sequence=128, micro_batches=8),
    "hidden 256": Case(256, 8, sequence=128, micro_batches=8),
    "hidden 256, 4 micro-batches": Case(256, 8, sequence=128, micro_batches=4),
    "hidden 512": Case(512, 4, sequence=128, micro_batches=4),
}
BLOCKS = {64: 100, 128: 60, 256: 30, 512: 30}
"""By hidden size."""
RESULT = RESULTS / "pipeline.json"
PAGE = Path(__file__).parents[1] / "docs/pipeline-benchmark.md"
TABLE = """\
| Model (layers, tokens, micro-batches) | Workers | Schedule | Ours / theirs, by blocks | 95% | Of median steps | 95% \
| Peak memory, ours / theirs | Blocks | Other processes, cores |
|---|---|---|---|---|---|---|---|---|---|"""


def ratio_of_medians(blocks: Sequence[tuple[float, float]], seed: int = 0) -> dict[str, float]:
    """The ratio of the median steps, ours / theirs, with a 95% interval: a bootstrap over blocks."""

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        ours, theirs = zip(*drawn, strict=True)
        return statistics.median(ours) / statistics.median(theirs)

    draw = random.Random(seed)
    found = sorted(ratio(draw.choices(blocks, k=len(blocks))) for _ in range(4000))
    return {
        "ratio": ratio(blocks),
        "low": found[int(0.025 * len(found))],
        "high": found[int(0.975 * len(found))],
    }


def started(case: Case, names: Sequence[str], world: int, effort: Effort, library: Path | None) -> Any:
    """What rank 0 of `world` new processes answers. `library` is that of `allocations`, where they are counted."""
    port = free_port()
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, world, port, case, names, effort, answers))
        for rank in range(world)
    ]
    usual = dict(os.environ)
    if library is not None:
        os.environ.update(allocations.environment(library))
    try:
        for process in processes:
            process.start()
    finally:
        os.environ.clear()
        os.environ.update(usual)
    return answer_of(processes, answers)


def run(case: Case, names: Sequence[str], world: int, effort: Effort, library: Path | None) -> dict[str, Any]:
    """A case's result, by the schedule's name."""
    before = os.getloadavg()[0]
    result: dict[str, Any] = started(case, names, world, effort, None)
    memory = started(case, names, world, replace(effort, blocks=0), library) if library is not None else {}
    for name, found in result.items():
        measured: list[Block] = found.pop("blocks")
        times = [(one.ours, one.theirs) for one in measured]
        ours, theirs = zip(*times, strict=True)
        found.update(
            ratio_of_medians(times),
            paired=paired_ratio(ours, theirs),
            other_cores_busy=statistics.median(one.others for one in measured),
            load_before=before,
        )
        if name in memory:
            found["peak_bytes"] = memory[name]["peak_bytes"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=[*CASES], action="append")
    parser.add_argument("--schedule", choices=[*PEERS], action="append")
    parser.add_argument("--workers", type=int, default=2, help="more than there are cores are oversubscribed")
    parser.add_argument("--blocks", type=int, help="of each case; as many as its size needs where left out")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the blocks of each schedule")
    parser.add_argument(
        "--patience", type=float, default=5.0, help="seconds to wait for idle cores before a block"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the peaks, which need a C compiler"
    )
    parser.add_argument("--table", action="store_true", help="only write the kept results into the page")
    given = parser.parse_args()
    if given.table:
        write_table()
        return
    names = given.schedule or [*PEERS]
    with tempfile.TemporaryDirectory() as folder:
        library = None if given.no_memory else allocations.compiled(folder)
        for title in given.case or CASES:
            case = CASES[title]
            effort = Effort(given.blocks or BLOCKS[case.hidden], given.seconds, given.patience)
            found = run(case, names, given.workers, effort, library)
            for name, one in found.items():
                print(f"{title}, {given.workers} workers, {name}: {described(one)}", flush=True)
            keep(f"{title}, {given.workers} workers", case, given.workers, found)
    write_table()


def described(found: dict[str, Any]) -> str:
    """One schedule's result in a line."""
    paired = found["paired"]
    memory = ""
    if "peak_bytes" in found:
        memory = f"memory {found['peak_bytes']['ours'] / found['peak_bytes']['theirs']:.2f}, "
    return (
        f"ours {paired['ours_s'] * 1e3:.1f} ms, theirs {paired['theirs_s'] * 1e3:.1f} ms, ratio {found['ratio']:.3f} "
        f"(95%: {found['low']:.3f} to {found['high']:.3f}), paired {paired['ratio']:.3f} ({paired['low']:.3f} to "
        f"{paired['high']:.3f}), {memory}gradients differ by {found['difference']['gradient']:.0e}, same order "
        f"{found['same_order']}, other processes {found['other_cores_busy']:.2f} cores"
    )


def keep(title: str, case: Case, workers: int, found: dict[str, Any]) -> None:
    """Write a case's result into the file; other cases, and schedules not measured now, stay as they were."""
    cases: dict[str, Any] = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    before = cases.get(title, {}).get("schedules", {})
    cases[title] = {
        "case": vars(case),
        "workers": workers,
        "threads": 1,
        "oversubscribed": workers > (os.cpu_count() or 1),
        "schedules": before | found,
    }
    write("pipeline", {"cases": cases})


def write_table() -> None:
    """Write all kept results into the page's table."""
    rows = []
    for kept in sorted(json.loads(RESULT.read_text())["cases"].values(), key=in_order):
        case = Case(**kept["case"])
        title = f"hidden {case.hidden} ({case.layers}, {case.sequence}, {case.micro_batches})"
        for name in (name for name in PEERS if name in kept["schedules"]):
            found = kept["schedules"][name]
            blocks, peaks = found["paired"], found.get("peak_bytes")
            memory = f"{peaks['ours'] / peaks['theirs']:.2f}" if peaks else ""
            rows.append(
                f"| {title} | {kept['workers']} | `{name}` | {blocks['ratio']:.2f} | {blocks['low']:.2f} to "
                f"{blocks['high']:.2f} | {found['ratio']:.2f} | {found['low']:.2f} to {found['high']:.2f} | {memory} | "
                f"{blocks['pairs']:.0f} | {found['other_cores_busy']:.1f} |"
            )
    text = PAGE.read_text()
    before, rest = text.split(TABLE, 1)
    after = rest.split("\n\n", 1)[1]
    PAGE.write_text(f"{before}{TABLE}\n" + "\n".join(rows) + f"\n\n{after}")


def in_order(kept: dict[str, Any]) -> tuple[int, ...]:
    """Where a case stands in the table."""
    case = kept["case"]
    return kept["workers"], case["hidden"], case["layers"], case["sequence"], case["micro_batches"]


if __name__ == "__main__":
    main()
