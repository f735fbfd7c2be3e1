"""Predicted and measured steps of `roles: auto`: python benchmarks/rl_auto.py [--rounds N] [--staleness N ...] [--load]

Two parts, each for several bounds on staleness. In each round the roles are measured and chosen, and then every layout
that was predicted is run as `roles: auto` would run it.

    models   examples/rl/grpo-sort.yaml on two devices (cores), without warm-up and evaluation
    timers   four devices whose work is to wait, by a law that is set here, so that other work on the machine disturbs
             little: passes of 20 ms + 0.5 ms for each running answer, updates of 0.1 s + 0.8 s / devices

Writes benchmarks/results/rl_auto.json: predicted and measured seconds per step of each layout, how far they differ, and
whether the quickest one was chosen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import write
from rl_timers import TimerHost

from hyper_parallel.config.load import build
from hyper_parallel.config.rl_run import RLConfig, load_rl
from hyper_parallel.config.role_launch import RoleLaunch
from hyper_parallel.rl.controller.placement import HOST
from hyper_parallel.rl.role_split.candidates import roles_of
from hyper_parallel.rl.role_split.resolve import plan_split
from hyper_parallel.rl.run import run
from hyper_parallel.rl.sample import Prompted, Sample

NAME, FIRST = "rl_auto", 5
EXAMPLE = Path(__file__).parents[1] / "examples" / "rl" / "grpo-sort.yaml"
PASS_S, SEQUENCE_S, FIXED_S, WORK_S = 0.02, 0.0005, 0.1, 0.8
TIMERS: dict[str, Any] = {
    "version": 1,
    "model": {"config": {"model_type": "llama"}},
    "task": {"name": "sort"},
    "rl": {"prompts": 12, "group": 4, "max_tokens": 48},
    "roles": {"split": "auto", "devices": 4},
    "launch": {"threads": 1, "device": "cpu"},
}
COMMON = ("trackers=[]", "warmup=null", "eval.prompts=1", "checkpoint.every=0")


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
            length = math.exp(random.Random(f"{one.row} {one.place}").gauss(2.3, 0.6))
            self._running[one.row, one.place] = (one, self._version, min(self._longest, max(1, int(length))))
        if not self._running:
            return []
        count = min(passes, min(left for *_, left in self._running.values()))
        time.sleep(count * (PASS_S + SEQUENCE_S * len(self._running)))
        ended = []
        for key, (one, version, left) in list(self._running.items()):
            self._running[key] = (one, version, left - count)
            if left == count:
                del self._running[key]
                length = math.exp(random.Random(f"{one.row} {one.place}").gauss(2.3, 0.6))
                ended.append(self._sample(one, version, min(self._longest, max(1, int(length)))))
        return ended

    def drop(self, tickets: list[int]) -> None:
        gone = set(tickets)
        self._running = {key: one for key, one in self._running.items() if one[0].ticket not in gone}

    def exchange(self, link: str, version: int) -> None:
        self._version = version


def main() -> int:
    """The rounds, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["models", "timers"])
    parser.add_argument(
        "--load", action="store_true", help="other work runs on this machine: to be run again"
    )
    given = parser.parse_args()
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for part in [given.only] if given.only else ["models", "timers"]:
        for staleness in given.staleness:
            for number in range(given.rounds):
                one = round_of(part, staleness, number, given.steps)
                rounds.setdefault(part, {}).setdefault(str(staleness), []).append(one)
                keep(rounds, given.steps, given.load)
    return 0


def keep(rounds: dict[str, dict[str, list[dict[str, Any]]]], steps: int, load: bool) -> None:
    """Write what there is."""
    found = {
        part: {staleness: summary(one) for staleness, one in own.items()} for part, own in rounds.items()
    }
    write(NAME, {"steps": steps, "other_work_on_the_machine": load, **found})


def round_of(part: str, staleness: int, seed: int, steps: int) -> dict[str, Any]:
    """One choice: predicted and measured seconds of a step of each layout."""
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
        overrides = [f"rl.staleness={staleness}", f"rl.steps={steps}", f"seed={seed}", *COMMON]

        def config_of(name: str) -> RLConfig:
            more = [*overrides, f"out={folder}/{name}"]
            if part == "models":
                return load_rl(EXAMPLE, ["roles=auto", "roles.devices=2", *more])
            return build(RLConfig, [("timers", TIMERS)], more)

        host = HOST if part == "models" else f"{Path(__file__).stem}:PassHost"
        choice = plan_split(config_of("plan"), host=host)
        layouts: dict[str, dict[str, float]] = {}
        for number, one in enumerate(choice.predictions):
            config = config_of(str(number))
            seconds = measured(config.model_copy(update={"roles": roles_of(config, one.layout)}), host)
            layouts[one.layout.words] = {
                "predicted_s": one.seconds,
                "measured_s": seconds,
                "off": one.seconds / seconds - 1,
            }
    found = {"chosen": choice.layout.words, "layouts": layouts}
    print(part, staleness, json.dumps(found), flush=True)
    return found


def measured(config: RLConfig, host: str) -> float:
    """Mean seconds of a step after the first ones: in a loop that is not synchronous, answers that are generated ahead
    for one step are missing in another, and the median is of neither."""
    run(config, host=host)
    records = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").open()]
    return statistics.fmean([one["step_s"] for one in records if "step_s" in one][FIRST:])


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rounds, how far predictions were off, and what choosing by them costs beside the quickest of the layouts."""
    off = [one["off"] for found in rounds for one in found["layouts"].values()]
    lost = [
        found["layouts"][found["chosen"]]["measured_s"]
        / min(one["measured_s"] for one in found["layouts"].values())
        - 1
        for found in rounds
    ]
    return {
        "largest_off": max(off, key=abs),
        "median_absolute_off": statistics.median(map(abs, off)),
        "quickest_chosen": f"{sum(one == 0 for one in lost)} of {len(lost)}",
        "slower_than_quickest": lost,
        "rounds": rounds,
    }


if __name__ == "__main__":
    sys.exit(main())
