"""A memory budget beside the alternatives: python benchmarks/offload.py [--only PART …]

Two parts, each of which can run alone; what the other found before stays in the result file.

- real: steps of a small Llama on this machine, contestants taking turns (`offload_real`). Peaks are measured by an
  observer that knows no plan. The link to the memory that is not counted has an emulated bandwidth; flash is real.
- simulated: the step of a Llama of 8B's shape on one H100, and what others do as policies of the simulator that plans
  ours (`offload_peers`). For each policy's peak a plan of ours with that budget, and three more.

A contestant's point is its peak and its seconds; that ours lies on or below another means that some plan of ours holds
no more and takes no longer. In the simulated part both are exact; in the real one a step counts as no longer where the
median of the paired ratios is at most 1.

A part that was not run yet is named on the page. Some minutes in all, and one core is used at a time but by copies and
by the two simulated workloads.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import offload_peers as peers
from campaigns import in_processes
from commandline import run
from measure import in_turns, paired_ratio
from offload_real import Contestant, Setting, bounds, serve
from pages import Benchmark, table
from processes import Stepping, scratch
from shapes import LLAMA_8B
from training import SEQUENCE, llama_8b_step

from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading import OffloadTier, Rate
from hyper_parallel.offloading.schedule.offload_pass import planned

EMULATED = 512 << 20
"""B/s each way of the link in the real part: what a copy takes of a step is then of the order that it is on a GPU."""
ROUNDS = 5
LAYERS = 4
"""Of the model in the real part."""
ROWS = (1, 4)
"""Rows of the simulated workloads."""
SHARES = (0.1, 0.25, 0.5)
"""Where further budgets lie between the working set and the peak."""
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
    "CPUOffloadPolicy, layer recompute": partial(peers.cpu_offload, recompute=True),
}


# Real.


def real() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    processes: dict[str, Stepping] = {}
    with scratch(on_disk=True) as folder:
        cluster = folder / "cluster.yaml"  # by which plans are made
        calibrate(Settings(workers=1, level="quick", folder=folder), lambda said: None).dump(cluster)
        setting = Setting(LAYERS, EMULATED, str(folder / "spill"), str(cluster))

        def begin(name: str, note: str, how: Contestant) -> None:
            process = processes[name] = Stepping(serve, how, setting)
            row = {"name": name, "note": note, "ours": how.budget is not None, "flash": how.flash}
            rows.append(row | process.next())
            print(f"  {name}: {rows[-1]['peak'] / 2**20:.1f} MiB", flush=True)

        for name, (note, how) in OTHERS.items():
            begin(name, note, how)
        known = bounds(setting)
        for name, how in _ours(rows, known["working_set"]).items():
            begin(name, "real direct I/O" if how.flash else "", how)
        seconds = in_turns({name: one.next for name, one in processes.items()}, ROUNDS, lambda step: step())
        for one in processes.values():
            one.close()
    for row in rows:
        row |= {"seconds": seconds[row["name"]], "median_s": statistics.median(seconds[row["name"]])}
    losses = [row["losses"][:_COMPARED] for row in rows]
    return {
        "layers": LAYERS,
        "emulated_bandwidth": EMULATED,
        **known,
        "rows": rows,
        "same_bits": all(row["losses"][:_COMPARED] == losses[0] for row in rows if row["ours"]),
        "losses_apart": max(abs(a - b) for one in losses for a, b in zip(one, losses[0], strict=True)),
        "below": _below_measured(rows),
        "load": os.getloadavg(),
    }


def _ours(rows: Sequence[Mapping[str, Any]], working_set: int) -> dict[str, Contestant]:
    """Budgets: the peaks of the two ways that hold least, and half of the way from the working set to the lower."""
    recompute = min(row["peak"] for row in rows if OTHERS[row["name"]][1].recompute)
    saved = min(row["peak"] for row in rows if row["name"].endswith("arena"))
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


def simulated() -> dict[str, Any]:
    """Each workload in a process of its own."""
    found = dict(in_processes(workload, ROWS, workers=2, per_process=1))
    return {
        "machine": "one H100 and its link to the host (simulated)",
        "workloads": [found[rows] for rows in ROWS],
    }


def workload(rows: int) -> dict[str, Any]:
    """Others' points and ours, of a step of so many rows."""
    cluster = Cluster.named("h100")
    link = cluster.link("host")
    case = peers.Case(llama_8b_step(rows=rows), cluster, Rate(link.latency, link.reached))
    others = {name: asdict(policy(case)) for name, policy in POLICIES.items()}
    free = case.problem()
    peak, least = max(free.profile()), free.working_set
    budgets = {point["peak"] for point in others.values()}
    budgets |= {int(least + share * (peak - least)) for share in SHARES}
    ours = [found for budget in sorted(budgets) if (found := our_point(case, budget))]
    return {
        "rows": rows,
        "layers": LLAMA_8B["num_hidden_layers"],
        "sequence": SEQUENCE,
        "link_B_s": case.link.bandwidth,
        "working_set": least,
        "peak": peak,
        "others": others,
        "ours": ours,
        "below": below_simulated(others, ours),
    }


def our_point(case: peers.Case, budget: int) -> dict[str, Any] | None:
    """Our plan for a budget; None where it is refused."""
    begun = time.perf_counter()
    host = OffloadTier("host", 2**40, case.link, case.link)
    try:
        found = planned(case.step, case.cluster, budget, (host,))
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
        found[name] = {"on_or_below": False}
        if fits := [one for one in ours if one["peak"] <= other["peak"]]:
            best = min(fits, key=lambda one: float(one["seconds"]))
            ratio = best["seconds"] / other["seconds"]
            found[name] = {"budget": best["budget"], "ratio": ratio, "on_or_below": ratio <= 1 + 1e-9}
    return found


# What is shown.


def lines(kept: Mapping[str, Any]) -> Iterator[str]:
    """The lines of both parts; for a part that was not run, a line that says so."""
    for part, (what, _, shown) in _PARTS.items():
        yield from shown(kept[part]) if part in kept else (f"Not run yet: {what}.", "")


def _simulated(found: Mapping[str, Any]) -> Iterator[str]:
    for one in found["workloads"]:
        yield (
            f"Simulated: one H100, a link of {one['link_B_s'] / 1e9:.1f} GB/s each way, {one['rows']} × "
            f"{one['sequence']:,} tokens, {one['layers']} layers, no limit on the device's memory."
        )
        yield ""
        seconds = {point["budget"]: point["seconds"] for point in one["ours"]}
        rows = []
        for name, point in one["others"].items():
            below = one["below"][name]
            ours = f"{seconds[below['budget']]:.3f} s" if "budget" in below else "none"
            rows.append(f"| {name} | {_gib(point['peak'])} | {point['seconds']:.3f} s | {ours} |")
        known = {point["peak"] for point in one["others"].values()}
        rows += [
            f"| a budget of {_gib(point['budget'])} | {_gib(point['peak'])} | | {point['seconds']:.3f} s |"
            for point in one["ours"]
            if point["budget"] not in known
        ]
        yield from table(" | Peak | Step | Ours, holding no more", rows)
        yield from ("", _verdict(one["below"]), "")


def _real(found: Mapping[str, Any]) -> Iterator[str]:
    rows, below = found["rows"], found["below"]
    others = [row["name"] for row in rows if not row["ours"]]
    yield (
        f"Measured: a Llama of {found['layers']} layers on a CPU, one thread; the link to the memory that is not "
        f"counted is emulated at {found['emulated_bandwidth'] / 2**20:.0f} MiB/s each way, flash is a real disk. "
        f"{len(others)} alternatives and {len(rows) - len(others)} of our plans alternate, {len(rows[0]['seconds'])} "
        "steps each; times are medians. The last column compares each with our best plan that holds no more: the "
        "median of the paired ratios and its 95% interval."
    )
    yield ""

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        one = below.get(row["name"])
        ours = f"{one['ratio']:.2f} × ({one['low']:.2f} to {one['high']:.2f}): {one['by']}" if one else ""
        peak, seconds = f"{row['peak'] / 2**20:.1f} MiB", f"{row['median_s']:.3f} s"
        return row["name"], peak, seconds, row["note"], ours

    yield from table(" | Peak | Step | | Ours, holding no more, takes", map(cells, rows))
    yield from ("", _verdict(below))
    if alone := [name for name in others if name not in below]:
        yield f"None of our plans that were run holds as little as: {'; '.join(alone)}."
    equal = "equal" if found["same_bits"] else "do **not** equal"
    yield from (f"The losses of our steps {equal} those of eager ones bit for bit.", "")


def _verdict(below: Mapping[str, Mapping[str, Any]]) -> str:
    if not below:
        return "Ours is compared with no alternative."
    above = [name for name, one in below.items() if not one["on_or_below"]]
    if above:
        return f"Ours lies above the point of: {', '.join(above)}."
    return "Ours lies on or below the point of every alternative."


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


_PARTS = {
    "real": ("the real steps", real, _real),
    "simulated": ("the simulated steps on an H100", simulated, _simulated),
}
BENCHMARK = Benchmark("offload", {"offload.md": lines})


def main(only: Annotated[tuple[str, ...], tuple(_PARTS)] = tuple(_PARTS)) -> None:
    result = BENCHMARK.kept()
    for part in only:
        begun = time.perf_counter()
        print(f"{part} …", flush=True)
        _, measured, shown = _PARTS[part]
        result[part] = {**measured(), "took_s": time.perf_counter() - begun}
        print("\n".join(shown(result[part])))
        BENCHMARK.keep({one: result[one] for one in _PARTS if one in result})


if __name__ == "__main__":
    run(main)
