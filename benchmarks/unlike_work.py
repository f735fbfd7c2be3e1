"""Unlike work: an image encoder and a language model, simulated: python benchmarks/unlike_work.py [--replay]

Rows have 0 to 32 images, drawn from a log-normal law. For each model, number of devices and cluster, four rules of
placement (`unlike_strategies.py`), each with the best sizes of all; costs are of graphs captured from the models' code
(`unlike_costs.py`). Three instances of `hp.submodels` are then run on real gloo workers whose stages sleep as long as
the simulation takes them to, scaled to a few seconds a step (`unlike_replay.py`).

Everything but that replay is simulated; no device is used. Writes benchmarks/results/unlike_work.json and the tables of
docs/submodels.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from measure import RESULTS, machine, write
from pages import DOCS, put
from unlike_costs import SHAPES, model_costs
from unlike_replay import replayed
from unlike_strategies import (
    apart_in_order,
    apart_sizes,
    cornstarch_sizes,
    encoder_pipeline,
    homogeneous,
    homogeneous_sizes,
    megatron,
    submodels,
)

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.submodels.search import Found, best
from hyper_parallel.planner.submodels.sizes import Row, StateBytes, Task
from hyper_parallel.planner.submodels.steps import Step
from hyper_parallel.schedule import Costs, MicroBatchKind
from hyper_parallel.workload.part_costs import ModelCosts

MOST = 32
"""Images of a row."""
STEPS = 4
BF16 = StateBytes(whole=4, sharded=12)
"""Weights and gradients in bf16, and a part of Adam's state in fp32."""
RULES = ("homogeneous", "Megatron's rule", "Cornstarch's rule", "train", "submodels")
OURS = ("train", "submodels")


@dataclass(frozen=True)
class Setting:
    """What is trained on what."""

    model: str
    devices: int
    rows: int
    """Of a step."""
    mean: float
    """Images of a row, of the law before it is cut off."""
    skew: float
    """Standard deviation of the logarithm."""

    def drawn(self) -> list[list[Row]]:
        """Images of each row of each step."""
        draw = random.Random(0)
        middle = math.log(self.mean) - self.skew**2 / 2
        return [
            [(min(MOST, round(draw.lognormvariate(middle, self.skew))),) for _ in range(self.rows)]
            for _ in range(STEPS)
        ]


SETTINGS = (
    Setting("SigLIP 0.4B + Llama 8B", 16, 64, 10, 1.2),
    Setting("ViT 6B + Llama 8B", 16, 64, 6, 1.2),
    Setting("ViT 6B + Llama 8B", 32, 64, 10, 1.2),
    Setting("ViT 6B + Llama 70B", 64, 64, 16, 1.2),
)
CLUSTERS = ("h100", "cloudmatrix384")


@cache
def _costs(model: str, cluster: str) -> ModelCosts:
    return model_costs(SHAPES[model], Cluster.preset(cluster))


def simulated(setting: Setting, cluster: str) -> dict[str, Any]:
    """The best of each rule."""
    where = Cluster.preset(cluster)
    costs = _costs(setting.model, cluster)
    task = Task(costs, where, setting.devices, setting.drawn(), BF16)
    images = sum(row[0] for rows in task.steps for row in rows) / (STEPS * setting.rows)
    encoder, text = sum(costs.encoders[0].seconds(images)), sum(map(sum, costs.language.stages(1, 1, 1)))

    def trained(*given: Any) -> Step | None:
        return homogeneous(*given, trained=True)

    found: dict[str, Found] = {
        "homogeneous": best(task, homogeneous_sizes(task), homogeneous),
        "Megatron's rule": best(task, apart_sizes(task, megatron), apart_in_order),
        "Cornstarch's rule": best(task, cornstarch_sizes(task), encoder_pipeline),
        "train": best(task, homogeneous_sizes(task), trained),
        "submodels": best(task, apart_sizes(task), submodels),
    }
    kinds: list[Any] = []
    for step in found["submodels"].steps[:1]:
        kinds = [asdict(kind) for kind in step.kinds]
        for kind in kinds:
            for name in ("forward", "backward"):
                kind[name] = [[*edge, seconds] for edge, seconds in kind[name].items()]
    return {
        **asdict(setting),
        "cluster": cluster,
        "images": images,
        "encoder_share": encoder / (encoder + text),
        "rules": {
            name: {
                "sizes": str(one.sizes),
                "seconds": one.seconds,
                "bubbles": one.bubbles,
                "tried": one.tried,
            }
            for name, one in found.items()
        },
        "kinds": kinds,
    }


def chosen(row: Mapping[str, Any]) -> str:
    """What the estimate prefers of ours."""
    return min(OURS, key=lambda name: row["rules"][name]["seconds"])


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the page."""
    rules = "Homogeneous | Megatron's rule | Cornstarch's rule | train, rows dealt | Submodels"
    yield f"| Model | Devices | Encoder | {rules} | Ours |"
    yield "|---|---|--:|---|---|---|---|---|---|"
    for row in found["simulated"]:
        cells = []
        for name in RULES:
            one = row["rules"][name]
            cells.append(
                f"{one['seconds']:.2f} s, {one['bubbles']:.0%} idle ({one['sizes']})"
                if one["seconds"] < math.inf
                else "does not fit"
            )
        base, mine = row["rules"]["homogeneous"], row["rules"][chosen(row)]
        yield (
            f"| {row['model']} | {row['devices']} × {row['cluster']} | {row['encoder_share']:.0%} | "
            + " | ".join(cells)
            + f" | {chosen(row)}: step {mine['seconds'] / base['seconds'] - 1:+.0%}, utilization "
            f"{base['seconds'] / mine['seconds'] - 1:+.0%}, idle {mine['bubbles'] / base['bubbles'] - 1:+.0%} |"
        )
    yield ""
    yield "| Sleeping stages on gloo workers | Groups | Micro-batches | Simulated | Measured, median | |"
    yield "|---|---|---|---|---|---|"
    for row in found["replayed"]:
        yield (
            f"| {row['name']} | {row['groups']} | {row['micro_batches']} | {row['simulated']:.3f} s | "
            f"{row['measured']:.3f} s | {row['measured'] / row['simulated'] - 1:+.1%} |"
        )


def kinds_of(row: Mapping[str, Any]) -> list[MicroBatchKind]:
    """As `simulated` kept them."""
    return [
        MicroBatchKind(
            Costs(
                **{
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in kind["costs"].items()
                }
            ),
            tuple(kind["placement"]),
            {(source, target): seconds for source, target, seconds in kind["forward"]},
            {(source, target): seconds for source, target, seconds in kind["backward"]},
            kind["count"],
        )
        for kind in row["kinds"]
    ]


def main() -> None:
    """Simulate, replay, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--replay", action="store_true", help="of what was simulated before")
    given = parser.parse_args()
    rows = json.loads((RESULTS / "unlike_work.json").read_text())["simulated"] if given.replay else []
    for setting in SETTINGS:
        for cluster in CLUSTERS:
            if not given.replay and given.only in f"{setting.model} {setting.devices} {cluster}":
                rows.append(simulated(setting, cluster))
                print({key: value for key, value in rows[-1].items() if key != "kinds"}, flush=True)
    # Few processes, so that they sleep on a small machine at the same time.
    small = [row for row in rows if row["kinds"]]
    small = sorted(small, key=lambda row: max(max(kind["placement"]) for kind in row["kinds"]))[:3]
    names = [f"{row['model']}, {row['devices']} × {row['cluster']}" for row in small]
    found = {
        "machine": machine(),
        "simulated": rows,
        "replayed": [replayed(name, kinds_of(row)) for name, row in zip(names, small, strict=True)],
    }
    print("\n".join(page(found)))
    if not given.only:
        print(write("unlike_work", found))
        put(DOCS / "submodels.md", "unlike_work.py", page(found))


if __name__ == "__main__":
    main()
