"""A memory budget beside the alternatives: python benchmarks/offload.py [--only PART …] [--quick]

Three parts, each of which can run alone; what the others found before stays in the result file.

- real: steps of a small Llama on this machine, contestants taking turns (`offload_real`). Peaks are measured by an
  observer that knows no plan. The link to the memory that is not counted has an emulated bandwidth; flash is real.
- simulated: the step of a Llama of 8B's shape on one H100, and what others do as policies of the simulator that plans
  ours (`offload_peers`). For each policy's peak a plan of ours with that budget, and three more.
- ascend: a Llama-3-8B and a DeepSeek-V3 of few layers on eight Ascend 910C, simulated, beside what is published
  (`offload_ascend`).

A contestant's point is its peak and its seconds; that ours lies on or below another means that some plan of ours holds
no more and takes no longer. In the simulated part both are exact; in the real one a step counts as no longer where the
median of the paired ratios is at most 1.

With --quick, small shapes and few rounds; nothing is kept. Some minutes in all, and one core is used at a time but by
copies and by the two simulated workloads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import llama_8b
import offload_peers as peers
from measure import RESULTS, paired_ratio, write
from offload_ascend import RUNS, predicted
from offload_pages import ROWS, lines
from offload_real import Contestant, Process, Setting, bounds
from pages import DOCS, put

from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading import OffloadTier, Rate
from hyper_parallel.offloading.schedule.offload_pass import planned

PARTS = ("real", "simulated", "ascend")
EMULATED = 512 << 20
"""B/s each way of the link in the real part: what a copy takes of a step is then of the order that it is on a GPU."""
ROUNDS = 5
LAYERS = 4
"""Of the model in the real part."""
SHARES = (0.1, 0.25, 0.5)
"""Where further budgets lie between the working set and the peak."""
HOST_BYTES = 2**40
_COMPARED = 3
"""Steps whose losses are compared."""
OTHERS: dict[str, tuple[str, Contestant]] = {
    "none": ("eager", Contestant("eager")),
    "none, from the graph": ("our engine without a budget", Contestant("graph")),
    "layer recompute": ("torch.utils.checkpoint", Contestant("eager", recompute=True)),
    "layer recompute, from the graph": ("memory.recompute: layer", Contestant("graph", recompute=True)),
    "offload_wrapper, as it is": ("its copies lie in the memory that counts", Contestant("wrapper")),
    "CPUOffloadPolicy, as it is": ("on a processor it moves nothing", Contestant("fsdp")),
    "save_on_cpu, into an arena": ("copies in the thread that computes", Contestant("save_on_cpu")),
    "a layer ahead, into an arena": ("the same, by background threads", Contestant("ahead")),
}
"""Name to a note and how it runs."""
POLICIES: dict[str, Callable[[peers.Case], peers.Point]] = {
    "none": peers.none,
    "layer recompute": peers.layer_recompute,
    "save_on_cpu (and offload_wrapper)": peers.save_on_cpu,
    "activations a layer ahead": peers.layer_ahead,
    "CPUOffloadPolicy": peers.cpu_offload,
    "CPUOffloadPolicy, layer recompute": peers.cpu_offload_recomputed,
}


# Real.


def real(given: argparse.Namespace) -> dict[str, Any]:
    """Contestants taking turns."""
    layers, rounds = (2, 2) if given.quick else (LAYERS, given.rounds)
    with tempfile.TemporaryDirectory() as made:
        cluster = given.cluster or _calibrated(Path(made), given.quick)
        setting = Setting(layers, EMULATED, str(given.flash or Path(made) / "spill"), str(cluster))
        running = {name: _started(name, note, how, setting) for name, (note, how) in OTHERS.items()}
        known = bounds(setting)
        for name, how in _ours(running, known["working_set"]).items():
            running[name] = _started(name, "real direct I/O" if how.flash else "", how, setting)
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, process in running.items():
                seconds[name].append(process.step())
        for process in running.values():
            process.close()
    rows = [
        {
            "name": name,
            "note": process.note,
            "ours": process.how.budget is not None,
            "flash": process.how.flash,
            **process.about,
            "seconds": seconds[name],
            "median_s": statistics.median(seconds[name]),
        }
        for name, process in running.items()
    ]
    known_losses = [row["losses"][:_COMPARED] for row in rows]
    return {
        "layers": layers,
        "emulated_bandwidth": EMULATED,
        **known,
        "rows": rows,
        "same_bits": all(row["losses"][:_COMPARED] == known_losses[0] for row in rows if row["ours"]),
        "losses_apart": max(
            abs(a - b) for row in known_losses for a, b in zip(row, known_losses[0], strict=True)
        ),
        "below": _below_measured(rows),
        "load": os.getloadavg(),
    }


def _started(name: str, note: str, how: Contestant, setting: Setting) -> Process:
    process = Process(name, note, how, setting)
    print(f"  {name}: {process.about['peak'] / 2**20:.1f} MiB", flush=True)
    return process


def _calibrated(folder: Path, quick: bool) -> Path:
    """This machine's cluster file: by what plans are made."""
    print("  this machine is measured, for the planner's clock", flush=True)
    settings = Settings(workers=1, level="tiny" if quick else "quick", folder=folder)
    calibrate(settings, lambda said: None).dump(folder / "cluster.yaml")
    return folder / "cluster.yaml"


def _ours(others: Mapping[str, Process], working_set: int) -> dict[str, Contestant]:
    """Budgets: the peaks of the two ways that hold least, and half of the way from the working set to the lower."""
    recompute = min(process.about["peak"] for process in others.values() if process.how.recompute)
    saved = min(others[name].about["peak"] for name in OTHERS if name.endswith("arena"))
    low = (working_set + min(recompute, saved)) // 2
    return {
        f"ours, {budget / 2**20:.0f} MiB, {'flash' if flash else 'host'}": Contestant(
            "graph", budget=budget, flash=flash
        )
        for flash in (False, True)
        for budget in (recompute, saved, low)
    }


def _below_measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each other: the best of ours behind the emulated link that holds no more, and what their steps' ratio is."""
    found = {}
    for other in rows:
        fits = [row for row in rows if row["ours"] and not row["flash"] and row["peak"] <= other["peak"]]
        if other["ours"] or not fits:
            continue
        best = min(fits, key=lambda row: row["median_s"])
        ratio = paired_ratio(best["seconds"], other["seconds"])
        found[other["name"]] = {"by": best["name"], **ratio, "on_or_below": ratio["ratio"] <= 1.0}
    return found


# Simulated.


def simulated(given: argparse.Namespace) -> dict[str, Any]:
    """Each workload in a process of its own."""
    rows = (given.rows or ROWS)[: 1 if given.quick else None]
    layers = 2 if given.quick else given.layers
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(workload, rows, [layers] * len(rows)))
    return {"machine": "one H100 and its link to the host (simulated)", "workloads": found}


def workload(rows: int, layers: int) -> dict[str, Any]:
    """Others' points and ours, of a step of so many rows."""
    step = llama_8b.captured(layers, rows)
    cluster = Cluster.named("h100")
    link = cluster.link("host")
    case = peers.Case(step, cluster, Rate(link.latency, link.reached))
    points = {name: policy(case) for name, policy in POLICIES.items()}
    free = case.problem()
    peak, least = max(free.profile()), free.working_set
    budgets = [point.peak for point in points.values()]
    budgets += [int(least + share * (peak - least)) for share in SHARES]
    ours = [found for budget in sorted(set(budgets)) if (found := our_point(case, budget))]
    return {
        "rows": rows,
        "layers": layers,
        "sequence": llama_8b.SEQUENCE,
        "link_B_s": case.link.bandwidth,
        "working_set": least,
        "peak": peak,
        "others": {name: asdict(point) for name, point in points.items()},
        "ours": ours,
        "below": below_simulated({name: asdict(point) for name, point in points.items()}, ours),
    }


def our_point(case: peers.Case, budget: int) -> dict[str, Any] | None:
    """Our plan for a budget; None where it is refused."""
    begun = time.perf_counter()
    try:
        found = planned(
            case.step, case.cluster, budget, (OffloadTier("host", HOST_BYTES, case.link, case.link),)
        )
    except BudgetError:
        return None
    return {
        "budget": budget,
        "peak": found.plan.peak,
        "seconds": found.plan.seconds,
        "stall": found.plan.stall,
        "moves": len(found.plan.moves),
        "planning_s": time.perf_counter() - begun,
        "said": str(found),
    }


def below_simulated(
    others: Mapping[str, Mapping[str, float]], ours: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Of each other policy: the quickest plan of ours that holds no more, and whether it takes no longer."""
    found: dict[str, Any] = {}
    for name, other in others.items():
        fits = [one for one in ours if one["peak"] <= other["peak"]]
        if not fits:
            found[name] = {"on_or_below": False}
            continue
        best = min(fits, key=lambda one: float(one["seconds"]))
        ratio = best["seconds"] / other["seconds"]
        found[name] = {"budget": best["budget"], "ratio": ratio, "on_or_below": ratio <= 1 + 1e-9}
    return found


# On eight 910C.


def ascend(given: argparse.Namespace) -> dict[str, Any]:
    """Published beside simulated."""
    return {name: predicted(name, quick=given.quick) for name in RUNS}


# What is shown.


def show(part: str, found: Mapping[str, Any]) -> None:
    """Tables, each with its label."""
    if part == "real":
        print(
            f"\nreal steps, {found['layers']} layers; link emulated at {found['emulated_bandwidth'] / 2**20:.0f} MiB/s"
        )
        for row in found["rows"]:
            print(
                f"  {row['name']:34} {row['peak'] / 2**20:8.1f} MiB {row['median_s']:8.3f} s  {row['note']}"
            )
        _show_below(found["below"])
        print(f"  ours has the losses of eager steps, bit by bit: {found['same_bits']}")
    elif part == "simulated":
        for one in found["workloads"]:
            print(
                f"\nsimulated, Llama 8B, {one['rows']} × {one['sequence']}, one H100, "
                f"{one['link_B_s'] / 1e9:.1f} GB/s each way"
            )
            for name, point in one["others"].items():
                print(f"  {name:34} {point['peak'] / 2**30:8.2f} GiB {point['seconds']:8.3f} s")
            for point in one["ours"]:
                print(
                    f"  {'ours':34} {point['peak'] / 2**30:8.2f} GiB {point['seconds']:8.3f} s  "
                    f"planned in {point['planning_s']:.0f} s"
                )
            _show_below(one["below"])
    else:
        for name, run in found.items():
            print(f"\n{name} on 8 × 910C: {run['assumed']}")
            for row in run["rows"]:
                published = f"{row['published_s']:.2f} s published" if row["published_s"] else ""
                print(
                    f"  {row['name']:34} {row['peak'] / 2**30:8.2f} GiB {row['simulated_s']:8.3f} s simulated  "
                    f"{published}"
                )
            print(
                f"  {run['published_ratio']:.3f} of the time published, {run['simulated_ratio']:.3f} simulated"
            )


def _show_below(below: Mapping[str, Mapping[str, Any]]) -> None:
    above = [
        f"{name} ({one.get('ratio', float('inf')):.2f} ×)"
        for name, one in below.items()
        if not one["on_or_below"]
    ]
    print(f"  ours on or below every other: {not above}" + (f"; above: {', '.join(above)}" if above else ""))


def main() -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="small shapes; nothing is kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the real part")
    parser.add_argument("--layers", type=int, default=32, help="of the simulated part")
    parser.add_argument("--rows", type=int, nargs="+", help="of the simulated part")
    parser.add_argument("--cluster", type=Path, help="this machine's cluster file; left out, it is measured")
    parser.add_argument("--flash", type=Path, help="a folder on the disk to use; left out, a temporary one")
    given = parser.parse_args()
    path = RESULTS / "offload.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {part: kept[part] for part in PARTS if part in kept}
    for part in given.only:
        begun = time.perf_counter()
        print(f"{part} …", flush=True)
        found = {"real": real, "simulated": simulated, "ascend": ascend}[part](given)
        show(part, found)
        kept[part] = {**found, "took_s": time.perf_counter() - begun}
        if not given.quick:
            kept = {one: kept[one] for one in PARTS if one in kept}
            print(write("offload", kept), flush=True)
            put(DOCS / "offload.md", "offload.py", lines(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
