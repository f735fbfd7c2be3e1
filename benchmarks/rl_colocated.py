"""Colocated roles that sleep, that stay, and roles apart: python benchmarks/rl_colocated.py [--rounds N] [--steps N]

GRPO with a reference (KL) on examples/rl/grpo-sort.yaml, with its policy and with one of 25 million parameters, without
warm-up and evaluation, synchronous:

    stays           one worker with --threads generates, scores and trains in turn; everything stays in memory
    sleeps, host    the same with roles.sleep.host: the same memory on a CPU, so that only the moves cost
    sleeps, flash   the same with roles.sleep.flash
    apart           the rollout in a worker of its own, one thread each

interleaved, round after round. In each: seconds of a step after the first one; bytes of models, optimizer and KV cache
in each turn and bytes that moved in a step, as the run's metrics have them; and the resident memory of all workers
together, sampled from /proc every 20 ms.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from commandline import run
from pages import Benchmark
from rl_example import BARE, ran

from harness.rl_faults import WatchedEngine

BENCHMARK = Benchmark("rl_colocated")
FIRST, SAMPLE_S = 1, 0.02
TOGETHER = ("roles.rollout.devices=0", "launch.threads={threads}")
CASES: dict[str, tuple[str, ...]] = {
    "stays": TOGETHER,
    "sleeps, host": (*TOGETHER, "roles.sleep.host=8GiB"),
    "sleeps, flash": (*TOGETHER, "roles.sleep.flash={folder}/flash"),
    "apart": ("roles.rollout.devices=1", "launch.threads=1"),
}
MODELS: dict[str, tuple[str, ...]] = {
    "110 thousand": (),
    "25 million": (
        "model.config.hidden_size=512",
        "model.config.intermediate_size=2048",
        "model.config.num_hidden_layers=6",
        "model.config.num_attention_heads=8",
        "model.config.num_key_value_heads=8",
        "rl.prompts=8",
        "roles.rollout.batch=64",
    ),
}
COMMON = ("rl.kl=0.01", "rl.staleness=0", *BARE)


def measured(overrides: list[str]) -> dict[str, float]:
    """Medians over the steps of one run."""
    engines: list[WatchedEngine] = []

    def engine() -> WatchedEngine:
        engines.append(WatchedEngine())
        return engines[-1]

    with sampled(engines) as resident:
        _, steps = ran(overrides, FIRST, engine=engine)
    seconds = ("step_s", "offload_s", "train_s")
    names = [name for name in steps[-1] if name in seconds or name.endswith("_bytes") or "resident" in name]
    return {
        **medians(steps, names),
        "rss_peak_bytes": max(resident),
        "rss_median_bytes": statistics.median(resident),
    }


def medians(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in names}


@contextlib.contextmanager
def sampled(engines: list[WatchedEngine]) -> Iterator[list[float]]:
    """The resident memory of all workers together, from time to time."""
    found, ends = [0.0], threading.Event()

    def work() -> None:
        while not ends.wait(SAMPLE_S):
            pids = [pid for one in engines for group in one.groups for pid in group.pids]
            if pids and (total := sum(map(rss, pids))):
                found.append(total)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


def rss(pid: int) -> float:
    """Resident bytes of a process, 0 where it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024.0 * int(line.split()[1])
    return 0.0


def main(
    rounds: int = 3,
    steps: int = 8,
    threads: Annotated[int, "of the one worker of colocated roles"] = 2,
    models: Annotated[tuple[str, ...], tuple(MODELS)] = tuple(MODELS),
) -> None:
    found: dict[str, dict[str, Any]] = {model: {case: [] for case in CASES} for model in models}
    for number in range(rounds):
        for model in models:
            for case, overrides in CASES.items():
                own = [one.replace("{threads}", str(threads)) for one in overrides]
                given = [*COMMON, *MODELS[model], *own, f"rl.steps={steps}", f"seed={number}"]
                found[model][case].append(measured(given))
                print(number, model, case, found[model][case][-1], flush=True)
    median = {
        model: {case: medians(runs, runs[0]) for case, runs in cases.items()}
        for model, cases in found.items()
    }
    BENCHMARK.keep({"steps": steps, "rounds": rounds, "threads": threads, "median": median, "all": found})


if __name__ == "__main__":
    run(main)
