"""Predicted and measured steps of `roles: auto`: python benchmarks/rl_auto.py [--rounds N] [--staleness N ...] [--load]

Two parts, each for several bounds on staleness. In each round the roles are measured and chosen, and then every layout
that was predicted is run as `roles: auto` would run it.

    models   examples/rl/grpo-sort.yaml on two devices (cores), without warm-up and evaluation
    timers   four devices whose work is to wait, by a law that is set here, so that other work on the machine disturbs
             little: passes of 20 ms + 0.5 ms for each running answer, updates of 0.1 s + 0.8 s / devices

Written are predicted and measured seconds per step of each layout, how far they differ, and whether the quickest one
was chosen.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

from commandline import run
from pages import Benchmark
from processes import scratch
from rl_example import BARE, EXAMPLE, steps_of
from rl_timers import TimerHost

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig, load_rl
from hyper_parallel.rl.controller.workers import HOST
from hyper_parallel.rl.role_layouts import roles_of
from hyper_parallel.rl.role_split import plan_split
from hyper_parallel.rl.run import run as run_rl
from hyper_parallel.rl.sample import Prompted, Sample

BENCHMARK = Benchmark("rl_auto")
FIRST = 5
PASS_S, SEQUENCE_S, FIXED_S, WORK_S = 0.02, 0.0005, 0.1, 0.8
TIMERS: dict[str, Any] = {
    "version": 1,
    "model": {"config": {"model_type": "llama"}},
    "task": {"name": "sort"},
    "rl": {"prompts": 12, "group": 4, "max_tokens": 48},
    "roles": {"split": "auto", "devices": 4},
    "launch": {"threads": 1, "device": "cpu"},
}
PARTS = {"models": HOST, "timers": "rl_auto:PassHost"}
"""What the workers of each part run."""


class PassHost(TimerHost):
    """An engine on each device that waits for passes, and an actor that waits for updates."""

    def __init__(self, launch: RoleLaunch, worker: Any) -> None:
        super().__init__(launch, worker)
        self._rank, self._world = worker.rank, worker.world
        self._running: dict[tuple[int, int], tuple[Prompted, int, int]] = {}
        self._longest = RLConfig.model_validate(launch.settings["run"]).rl.max_tokens

    def train(self, samples: list[Sample], reference: object) -> dict[str, float]:
        time.sleep(FIXED_S + WORK_S / self._world)
        return {"loss": 0.0, "grad_norm": 0.0}

    def generate(self, new: list[Prompted], passes: int) -> list[Sample]:
        for one in new[self._rank :: self._world]:
            self._running[one.row, one.place] = (one, self._version, self._length(one))
        if not self._running:
            return []
        count = min(passes, min(left for *_, left in self._running.values()))
        time.sleep(count * (PASS_S + SEQUENCE_S * len(self._running)))
        ended = []
        for key, (one, version, left) in list(self._running.items()):
            self._running[key] = (one, version, left - count)
            if left == count:
                del self._running[key]
                ended.append(self._sample(one, version, self._length(one)))
        return ended

    def _length(self, one: Prompted) -> int:
        length = math.exp(random.Random(f"{one.row} {one.place}").gauss(2.3, 0.6))
        return min(self._longest, max(1, int(length)))

    def drop(self, tickets: list[int]) -> None:
        gone = set(tickets)
        self._running = {key: one for key, one in self._running.items() if one[0].ticket not in gone}

    def exchange(self, link: str, version: int) -> None:
        self._version = version


def round_of(part: str, staleness: int, seed: int, steps: int) -> dict[str, Any]:
    """One choice: predicted and measured seconds of a step of each layout."""
    layouts: dict[str, dict[str, float]] = {}
    with scratch() as folder:

        def config_of(name: str) -> RLConfig:
            own = (f"rl.staleness={staleness}", f"rl.steps={steps}", f"seed={seed}", f"out={folder}/{name}")
            given = [*own, "trackers=[]", *BARE]
            if part == "models":
                return load_rl(EXAMPLE, ["roles=auto", "roles.devices=2", *given])
            return build(RLConfig, [("timers", TIMERS)], given)

        choice = plan_split(config_of("plan"), host=PARTS[part])
        for number, one in enumerate(choice.predictions):
            config = config_of(str(number))
            config = config.model_copy(update={"roles": roles_of(config, one.layout)})
            run_rl(config, host=PARTS[part])
            # Not the median: in a loop that is not synchronous, answers that are generated ahead for one step are
            # missing in another, and the median is of neither.
            seconds = statistics.fmean(step["step_s"] for step in steps_of(config, FIRST))
            off = one.seconds / seconds - 1
            layouts[one.layout.words] = {"predicted_s": one.seconds, "measured_s": seconds, "off": off}
    found = {"chosen": choice.layout.words, "layouts": layouts}
    print(part, staleness, found, flush=True)
    return found


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rounds, how far predictions were off, and what choosing by them costs beside the quickest of the layouts."""
    off = [one["off"] for found in rounds for one in found["layouts"].values()]
    lost = []
    for found in rounds:
        seconds = {name: one["measured_s"] for name, one in found["layouts"].items()}
        lost.append(seconds[found["chosen"]] / min(seconds.values()) - 1)
    return {
        "largest_off": max(off, key=abs),
        "median_absolute_off": statistics.median(map(abs, off)),
        "quickest_chosen": f"{sum(one == 0 for one in lost)} of {len(lost)}",
        "slower_than_quickest": lost,
        "rounds": rounds,
    }


def main(
    rounds: int = 3,
    steps: int = 30,
    staleness: tuple[int, ...] = (0, 1, 2),
    only: Annotated[str, ("", *PARTS)] = "",
    load: Annotated[bool, "other work runs on this machine: to be run again"] = False,
) -> None:
    """The rounds; the figures are written after each."""
    result: dict[str, Any] = {"steps": steps, "other_work_on_the_machine": load}
    for part in [only] if only else PARTS:
        for bound in staleness:
            found: list[dict[str, Any]] = []
            for number in range(rounds):
                found.append(round_of(part, bound, number, steps))
                result.setdefault(part, {})[str(bound)] = summary(found)
                BENCHMARK.keep(result)


if __name__ == "__main__":
    run(main)
