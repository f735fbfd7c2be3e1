"""Predicted and measured steps of `roles: auto`: python benchmarks/rl_auto.py [--rounds N] [--staleness N ...]

examples/rl/grpo-sort.yaml with `roles=auto` on two devices (cores), without warm-up and evaluation: for each bound on
staleness and each round, the roles are measured and chosen, and then both layouts, taking turns and apart, are run as
`roles: auto` would. Writes benchmarks/results/rl_auto.json: predicted and measured seconds per step of each layout, how
far they differ, and whether the quicker one was chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import write

from hyper_parallel.config.rl_run import RLConfig, load_rl
from hyper_parallel.rl.controller.run import run
from hyper_parallel.rl.role_split.candidates import RoleLayout, roles_of
from hyper_parallel.rl.role_split.resolve import plan_split

NAME, FIRST = "rl_auto", 5
EXAMPLE = Path(__file__).parents[1] / "examples" / "rl" / "grpo-sort.yaml"


def main() -> int:
    """The rounds, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--set", nargs="*", default=[], help="further overrides of the file, such as model sizes"
    )
    parser.add_argument(
        "--load", action="store_true", help="other work runs on this machine: to be run again"
    )
    given = parser.parse_args()
    rounds = [
        round_of(staleness, number, given.steps, given.set)
        for number in range(given.rounds)
        for staleness in given.staleness
    ]
    found = {
        str(staleness): summary([one for one in rounds if one["staleness"] == staleness])
        for staleness in given.staleness
    }
    write(
        NAME,
        {
            "steps": given.steps,
            "overrides": given.set,
            "other_work_on_the_machine": given.load,
            "summary": found,
            "rounds": rounds,
        },
    )
    return 0


def round_of(staleness: int, seed: int, steps: int, further: list[str]) -> dict[str, Any]:
    """Predicted and measured, of one choice."""
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:

        def config_of(name: str) -> RLConfig:
            return load_rl(
                EXAMPLE,
                [
                    "roles=auto",
                    "roles.devices=2",
                    f"rl.staleness={staleness}",
                    f"rl.steps={steps}",
                    f"seed={seed}",
                    f"out={folder}/{name}",
                    "trackers=[]",
                    "warmup=null",
                    "eval.prompts=1",
                    "checkpoint.every=0",
                    *further,
                ],
            )

        choice = plan_split(config_of("plan"))
        found: dict[str, Any] = {"staleness": staleness, "chosen": _name(choice.layout)}
        for one in choice.predictions:
            config = config_of(_name(one.layout))
            seconds = measured(config.model_copy(update={"roles": roles_of(config, one.layout)}))
            found[_name(one.layout)] = {
                "predicted_s": one.seconds,
                "measured_s": seconds,
                "off": one.seconds / seconds - 1,
            }
        found["right"] = found["chosen"] == min(
            ("together", "apart"), key=lambda name: found[name]["measured_s"]
        )
    print(json.dumps(found), flush=True)
    return found


def measured(config: RLConfig) -> float:
    """Mean seconds of a step after the first ones: in a loop that is not synchronous, answers that are generated ahead
    for one step are missing in another, and the median is of neither."""
    run(config)
    records = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").open()]
    return statistics.fmean(one["step_s"] for one in records[FIRST:] if "step_s" in one)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds."""
    return {
        "chosen_right": f"{sum(one['right'] for one in rounds)} of {len(rounds)}",
        **{
            name: {
                key: statistics.median(one[name][key] for one in rounds)
                for key in ("predicted_s", "measured_s", "off")
            }
            for name in ("together", "apart")
        },
    }


def _name(layout: RoleLayout) -> str:
    return "together" if layout.together else "apart"


if __name__ == "__main__":
    sys.exit(main())
