"""The controller with workers that only wait: python benchmarks/rl_timers.py [--steps N]

The real controller, queue, groups of workers and rewards; generation and training are timers. 512 answers a step (64
prompts × 8) of log-normal lengths (σ = 1) that all run at once, generation 85% of the synchronous step on 16 devices.
Synchronous and colocated, all 16 generate and then train; apart, 5 generate and 11 train, which takes 16/11 of the
time. Steps per second after the first five, of η = 1, 2 and 4 in each order, relative to the colocated loop. Labelled:
the times of generation and training are set, not measured.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any

from commandline import run
from pages import Benchmark
from processes import scratch
from rl_example import steps_of

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.run import run as run_rl
from hyper_parallel.rl.sample import Prompted, Sample

BENCHMARK = Benchmark("rl_timers")
FIRST, SIGMA = 5, 1.0
GENERATION_S = 1.7
"""Mean seconds until the longest of 512 answers has ended."""
TRAINING_S = 0.3
"""On 16 devices."""


class TimerHost:
    """The operations of a group whose work is to wait."""

    def __init__(self, launch: RoleLaunch, worker: Any) -> None:
        config = RLConfig.model_validate(launch.settings["run"])
        apart = "rollout" not in launch.settings["roles"]
        self._train_s = TRAINING_S * (16 / 11 if apart else 1)
        self._unit = GENERATION_S / longest(config.rl.answers)
        self._ends: dict[tuple[int, int], tuple[float, Prompted, int, int]] = {}
        self._version = 0

    def train(self, samples: list[Sample], reference: object) -> dict[str, float]:
        time.sleep(self._train_s)
        return {"loss": 0.0, "grad_norm": 0.0}

    def generate(self, new: list[Prompted], passes: int) -> list[Sample]:
        now = time.monotonic()
        for one in new:
            length = math.exp(random.Random(f"{one.row} {one.place}").gauss(0, SIGMA))
            end = now + length * self._unit
            self._ends[one.row, one.place] = end, one, self._version, max(1, int(100 * length))
        if not self._ends:
            return []
        until = min(now + 0.05, *(end for end, *_ in self._ends.values()))
        time.sleep(max(0.0, until + 0.01 - now))
        ended = [key for key, (end, *_) in self._ends.items() if end <= time.monotonic()]
        return [self._sample(*self._ends.pop(key)[1:]) for key in ended]

    def _sample(self, one: Prompted, version: int, length: int) -> Sample:
        return Sample(
            ticket=one.ticket,
            place=one.place,
            row=one.row,
            prompt=(1,),
            tokens=(1,) * length,
            logprobs=(0.0,) * length,
            versions=(version,) * length,
            drawn=(True,) * length,
            ended=True,
        )

    def renewed(self, version: int) -> None:
        self._version = version

    def install(self, link: str, version: int) -> None:
        self._version = version

    def drop(self, tickets: list[int]) -> None:
        gone = set(tickets)
        self._ends = {key: found for key, found in self._ends.items() if found[1].ticket not in gone}

    def answer(self, asked: list[Prompted], temperature: float, seed: int) -> list[Sample]:
        return [self._sample(one, self._version, 1) for one in asked]

    def resume(self) -> None: ...
    def save(self, step: int, state: object) -> None: ...
    def saved(self) -> None: ...
    def describe(self, role: str) -> None: ...
    def address(self) -> str:
        return ""

    def serve(self, host: str) -> tuple[str, int]:
        return "", 0

    def connect(self, **given: object) -> None: ...
    def begin_send(self, link: str, version: int) -> None: ...
    def finish_send(self, link: str) -> None: ...
    def begin_receive(self, link: str, version: int) -> None: ...
    def arrived(self, link: str) -> bool:
        return True


def longest(answers: int) -> float:
    """The mean of the largest of so many log-normal lengths."""
    draw = random.Random(0)
    return statistics.fmean(max(math.exp(draw.gauss(0, SIGMA)) for _ in range(answers)) for _ in range(2000))


def measured(roles: dict[str, Any], **loop: Any) -> dict[str, float]:
    """Mean seconds of a step, and what was wasted."""
    with scratch() as folder:
        given = {
            "version": 1,
            "out": f"{folder}/run",
            "model": {"config": {"model_type": "llama"}},
            "task": {"name": "sort"},
            "rl": {"prompts": 64, "group": 8, "max_tokens": 8, **loop},
            "roles": {**roles, "rollout": {"batch": 4096, **roles["rollout"]}},
            "eval": {"prompts": 1},
            "launch": {"threads": 1, "device": "cpu"},
            "trackers": [],
        }
        config = build(RLConfig, [("timers", given)], ())
        run_rl(config, host="rl_timers:TimerHost")
        kept = steps_of(config, FIRST)
    return {
        "step_s": statistics.fmean(one["step_s"] for one in kept),
        "wasted_share": kept[-1]["wasted_share"],
        "staleness_max": max(one["staleness_max"] for one in kept),
        "busy_actor": statistics.fmean(one["busy_actor"] for one in kept),
    }


def main(steps: int = 30) -> None:
    base = measured({"rollout": {"devices": 0}}, steps=steps, staleness=0, order="fifo")
    rows = {"colocated, η = 0": base}
    apart = {"actor": {"devices": 0}, "rollout": {"devices": 1}}
    for staleness in (1, 2, 4):
        for order in ("fifo", "window", "discard"):
            row = measured(apart, steps=steps, staleness=staleness, order=order)
            rows[f"apart, η = {staleness}, {order}"] = {**row, "speed": base["step_s"] / row["step_s"]}
            print(staleness, order, row, flush=True)
    BENCHMARK.keep({"timers": "set, not measured", "rows": rows})


if __name__ == "__main__":
    run(main)
