"""Unlike work: an image encoder and a language model, simulated: python benchmarks/unlike_work.py [--replay]

Rows have 0 to 32 images, drawn from a log-normal law. For each model, number of devices and cluster, four rules of
placement (`unlike_strategies.py`), each with the best sizes of all. Costs are of graphs of the unmodified model's own
code: a LLaVA with two layers of each part is captured as training captures it, for 1 and 4 images, 1 and 2 rows, and
each tensor degree, and its operators are priced on the cluster; layers count as often as the model has them. Between
the sizes, and beyond, seconds are a constant and a multiple.

Three instances of `hp.submodels` are then run on real gloo workers whose stages sleep as long as the simulation takes
them to, scaled to a few seconds a step. Everything but that replay is simulated; no device is used. Writes
benchmarks/results/unlike_work.json and the tables of docs/submodels.md.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from commandline import Only, run
from measure import quiet
from pages import Benchmark, spaced, table
from shapes import LLAMA_8B, LLAMA_70B, Fields
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration
from unlike_strategies import (
    DEGREES,
    apart_in_order,
    apart_sizes,
    cornstarch,
    encoder_pipeline,
    homogeneous,
    homogeneous_sizes,
    megatron,
    submodels,
)

from harness.ranks import run_ranks
from harness.step_programs import chain_kind
from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.submodel_capture import LANGUAGE, captured_parts
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.layout import DeviceGroup, Mesh
from hyper_parallel.planner.submodels.search import BestSizes, best
from hyper_parallel.planner.submodels.sizes import Row, StateBytes, Task
from hyper_parallel.program.instruction_loop import Turns
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.runtime.rank_transfers import ProcessTransfers
from hyper_parallel.schedule import Costs, MicroBatchKind, step_schedule
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.workload.submodels import EncoderCosts, LanguageCosts, Line, ModelCosts, Times

MOST = 32
"""Images of a row."""
STEPS = 4
BF16 = StateBytes(whole=4, sharded=12)
"""Weights and gradients in bf16, and a part of Adam's state in fp32."""
LAYERS = 2
"""Of each part in a capture."""
WORKSPACE = 6 * 2**30
"""Bytes of a layer's activations, logits of a chunk, and buffers: an estimate."""
VISION = ("model.vision_tower", "model.multi_modal_projector")
REPLAYED_S, REPLAYED_STEPS = 3.0, 5
"""Seconds of a replayed step, to which costs are scaled, and steps."""
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


@dataclass(frozen=True)
class Shape:
    """A model, whose rows have `LENGTH` tokens, of which images have a part."""

    vision: Fields
    text: Fields

    @property
    def patches(self) -> int:
        """Of an image, each a token of the language model."""
        return int((self.vision["image_size"] // self.vision["patch_size"]) ** 2)


LENGTH = 8192
SO400M = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14,
}  # fmt: skip
VIT_6B = {
    "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
    "image_size": 448, "patch_size": 14,
}  # fmt: skip
SHAPES = {
    "SigLIP 0.4B + Llama 8B": Shape(SO400M, LLAMA_8B),
    "ViT 6B + Llama 8B": Shape(VIT_6B, LLAMA_8B),
    "ViT 6B + Llama 70B": Shape(VIT_6B, LLAMA_70B),
}


@cache
def model_costs(name: str, preset: str) -> ModelCosts:
    """Those of a model on a cluster."""
    shape, cluster = SHAPES[name], Cluster.preset(preset)
    width, depth = shape.text["hidden_size"], shape.text["num_hidden_layers"]
    deep = (shape.vision["num_hidden_layers"] / LAYERS, depth / LAYERS)

    def lines(points: Mapping[int, Sequence[Sequence[Times]]], part: int) -> tuple[tuple[Line, ...], ...]:
        """Seconds of a part's passes by the size of what is captured: of all its layers, and of the rest."""
        (one, here), (other, there) = points.items()
        return tuple(
            tuple(
                Line.through((one, times * a), (other, times * b))
                for a, b in zip(here[of][part], there[of][part], strict=True)
            )
            for of, times in enumerate((deep[part], 1))
        )

    vision = zip(*lines({n: _captured(shape, cluster, 1, 1, n) for n in (1, 4)}, 0), strict=True)
    text = {t: lines({n: _captured(shape, cluster, t, n, n) for n in (1, 2)}, 1) for t in DEGREES}
    of_encoder, of_text = _parameters(shape)
    inputs = 2.0 * shape.patches * shape.vision["hidden_size"] * shape.vision["num_hidden_layers"]
    encoder = EncoderCosts(
        name="vision",
        modules=VISION,
        passes=tuple(Line(a.constant + b.constant, a.slope + b.slope) for a, b in vision),  # type: ignore[arg-type]
        saved=Line(0.0, inputs),
        workspace=Line(WORKSPACE, 0.0),
        features=2.0 * shape.patches * width,
        parameters=of_encoder,
    )
    language = LanguageCosts(
        layers={tensor: layers for tensor, (layers, _) in text.items()},  # type: ignore[misc]
        head={tensor: head for tensor, (_, head) in text.items()},  # type: ignore[misc]
        saved=dict.fromkeys(DEGREES, Line(0.0, 2.0 * LENGTH * width * depth)),
        workspace=dict.fromkeys(DEGREES, Line(WORKSPACE, 0.0)),
        recomputed=dict.fromkeys(DEGREES, Line(0.0, 0.0)),
        depth=depth,
        parameters=of_text,
    )
    return ModelCosts((encoder,), language)


def _model(shape: Shape) -> LlavaForConditionalGeneration:
    config = LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", **shape.vision, "num_hidden_layers": LAYERS},
        text_config={**shape.text, "num_hidden_layers": LAYERS},
        image_token_id=shape.text["vocab_size"] - 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    with torch.device("meta"):
        return LlavaForConditionalGeneration(config)


def _parameters(shape: Shape) -> tuple[int, int]:
    """Of the encoder and of the language model, with all layers."""
    counts = [0, 0]
    for name, one in _model(shape).named_parameters():
        text = not name.startswith(VISION)
        deep = (shape.text if text else shape.vision)["num_hidden_layers"] / LAYERS
        counts[text] += int(one.numel() * (deep if ".layers." in name else 1))
    return counts[0], counts[1]


def _captured(shape: Shape, cluster: Cluster, tensor: int, rows: int, images: int) -> list[list[Times]]:
    """Of layers and of the rest, by part: encoder, language model."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    ids.flatten()[: images * shape.patches] = shape.text["vocab_size"] - 1
    size = shape.vision["image_size"]
    positions = torch.arange(LENGTH).repeat(rows, 1)
    extra = {"pixel_values": torch.zeros(images, 3, size, size)}
    micro = MicroBatch(ids, ids.clone(), positions, torch.arange(rows), extra=extra)
    model = _model(shape).to(torch.bfloat16)
    found = captured_parts(model, micro, cluster, {"vision": VISION}, tensor=tensor, few_layers=False)

    def priced(*, layers: bool) -> list[Times]:
        def counts(module: str) -> float:
            return float((".layers." in module) is layers)

        return [found.seconds(part, counts) for part in ("vision", LANGUAGE)]

    return [priced(layers=True), priced(layers=False)]


def simulated(setting: Setting, cluster: str) -> dict[str, Any]:
    """The best of each rule."""
    costs = model_costs(setting.model, cluster)
    task = Task(costs, Cluster.preset(cluster), setting.devices, setting.drawn(), BF16)
    images = sum(row[0] for rows in task.steps for row in rows) / (STEPS * setting.rows)
    encoder, text = sum(costs.encoders[0].seconds(images)), sum(map(sum, costs.language.stages(1, 1, 1)))

    # Rows dealt, as `hyper-parallel train` runs a homogeneous mesh.
    trained = partial(homogeneous, trained=True)
    found: dict[str, BestSizes] = {
        "homogeneous": best(task, homogeneous_sizes(task), homogeneous),
        "Megatron's rule": best(task, apart_sizes(task, megatron), apart_in_order),
        "Cornstarch's rule": best(task, apart_sizes(task, cornstarch), encoder_pipeline),
        "train": best(task, homogeneous_sizes(task), trained),
        "submodels": best(task, apart_sizes(task), submodels),
    }
    kinds = [
        {**asdict(kind), "forward": _edges(kind.forward), "backward": _edges(kind.backward)}
        for step in found["submodels"].steps[:1]
        for kind in step.kinds
    ]
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


def _edges(seconds: Mapping[tuple[int, int], float]) -> list[list[float]]:
    return [[*edge, one] for edge, one in seconds.items()]


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables of docs/submodels.md."""

    def cell(rule: Mapping[str, Any]) -> str:
        if rule["seconds"] == math.inf:
            return "does not fit"
        return f"{rule['seconds']:.2f} s, {rule['bubbles']:.0%} idle ({rule['sizes']})"

    def cells(row: Mapping[str, Any]) -> Iterator[str]:
        rules = row["rules"]
        yield from (row["model"], f"{row['devices']} × {row['cluster']}", f"{row['encoder_share']:.0%}")
        yield from (cell(rules[name]) for name in RULES)
        chosen = min(OURS, key=lambda name: rules[name]["seconds"])  # what the estimate prefers
        seconds, idle = (rules[chosen][key] / rules["homogeneous"][key] for key in ("seconds", "bubbles"))
        yield f"{chosen}: step {seconds - 1:+.0%}, utilization {1 / seconds - 1:+.0%}, idle {idle - 1:+.0%}"

    rules = "Homogeneous | Megatron's rule | Cornstarch's rule | train, rows dealt | Submodels"
    return spaced(
        table(
            f"Model | Devices | Encoder | {rules} | Ours",
            (tuple(cells(row)) for row in result["simulated"]),
            "llr",
        ),
        table(
            "Sleeping stages on gloo workers | Groups | Micro-batches | Simulated | Measured, median | ",
            (
                f"| {row['name']} | {row['groups']} | {row['micro_batches']} | {row['simulated']:.3f} s | "
                f"{row['measured']:.3f} s | {row['measured'] / row['simulated'] - 1:+.1%} |"
                for row in result["replayed"]
            ),
        ),
    )


BENCHMARK = Benchmark("unlike_work", {"submodels.md": page})


def kinds_of(row: Mapping[str, Any]) -> list[MicroBatchKind]:
    """As `simulated` kept them."""

    def tuples(kept: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}

    def by_edge(kept: Any) -> dict[tuple[int, int], float]:
        return {(source, target): seconds for source, target, seconds in kept}

    return [
        MicroBatchKind(
            Costs(**tuples(kind["costs"])),
            tuple(kind["placement"]),
            by_edge(kind["forward"]),
            by_edge(kind["backward"]),
            kind["count"],
        )
        for kind in row["kinds"]
    ]


class SleepingStage:
    """A stage that takes its time, and sends a value of its port's size."""

    def __init__(self, stage: Stage, costs: Costs) -> None:
        self.stage, self.gradients, self.totals = stage, dict[str, Tensor](), dict[str, Tensor]()
        own = stage.number
        self._forward, self._input, self._weight = costs.forward[own], costs.input[own], costs.weight[own]

    in_flight = 0

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing to begin."""

    def forward_in_turns(self, micro_batch: int, batch: Any, received: Any) -> Turns[Tensor]:
        """Sleep through the forward pass."""
        time.sleep(self._forward)
        return {one.name: torch.zeros(one.value.shape) for one in self.stage.sends}
        yield

    def input_in_turns(self, micro_batch: int, received: Any) -> Turns[Tensor]:
        """Sleep through the gradients of inputs."""
        time.sleep(self._input)
        return {one.name: torch.zeros(one.value.shape) for one in self.stage.gradients_out}
        yield

    def backward_in_turns(self, micro_batch: int, received: Any) -> Turns[Tensor]:
        """Both."""
        found = yield from self.input_in_turns(micro_batch, received)
        self.weight(micro_batch)
        return found

    def weight(self, micro_batch: int) -> None:
        """Sleep through the gradients of weights."""
        time.sleep(self._weight)


def _worker(rank: int, world: int, kinds: list[MicroBatchKind]) -> list[float]:
    groups = [DeviceGroup(Mesh(("tensor_x", 1)), (place,), f"group {place}") for place in range(world)]
    schedule = step_schedule(kinds, world).schedule
    parts = [chain_kind(number, groups, kind.placement, kind.count) for number, kind in enumerate(kinds, 1)]
    program, stages = step_program(parts, schedule, groups)
    runners: dict[int, Any] = {}
    first = 0
    for part, kind in zip(parts, kinds, strict=True):
        for stage in part.partition.stages:
            if kind.placement[stage.number] == rank:
                runners[first + stage.number] = SleepingStage(stage, kind.costs)
        first += len(part.placement)
    one = Interpreter(program, stages, rank, ProcessTransfers(rank), torch.device("cpu"), runners)
    found = []
    for _ in range(REPLAYED_STEPS + 1):
        dist.barrier()
        began = time.perf_counter()
        one.run([{}] * program.micro_batches)
        dist.barrier()
        found.append(time.perf_counter() - began)
    return found[1:]


def replayed(name: str, kinds: list[MicroBatchKind]) -> dict[str, Any]:
    """Seconds of a step as simulated and as measured, with transfers that take nothing."""
    groups = 1 + max(rank for kind in kinds for rank in kind.placement)

    def scaled(kind: MicroBatchKind, scale: float) -> MicroBatchKind:
        times: dict[str, Any] = {
            key: tuple(scale * one for one in getattr(kind.costs, key))
            for key in ("forward", "backward", "input", "weight")
        }
        costs = replace(kind.costs, transfers=(), **times)
        return MicroBatchKind.chain(costs, kind.placement, kind.count)

    scale = REPLAYED_S / step_schedule([scaled(kind, 1.0) for kind in kinds], groups).makespan
    scaled_kinds = [scaled(kind, scale) for kind in kinds]
    ranks: list[list[float]] = run_ranks(_worker, groups, scaled_kinds, timeout=300.0)
    return {
        "name": name,
        "groups": groups,
        "micro_batches": sum(kind.count for kind in kinds),
        "simulated": step_schedule(scaled_kinds, groups).makespan,
        "measured": statistics.median(map(max, zip(*ranks, strict=True))),
    }


def main(only: Only = "", replay: Annotated[bool, "of what was simulated before"] = False) -> None:
    """Simulate, replay, keep."""
    rows = BENCHMARK.kept()["simulated"] if replay else []
    for setting in SETTINGS:
        for cluster in CLUSTERS:
            if not replay and only in f"{setting.model} {setting.devices} {cluster}":
                rows.append(simulated(setting, cluster))
                print({key: value for key, value in rows[-1].items() if key != "kinds"}, flush=True)
    # Few processes, so that they sleep on a small machine at the same time.
    small = sorted(
        (row for row in rows if row["kinds"]),
        key=lambda row: max(max(kind["placement"]) for kind in row["kinds"]),
    )
    replays = [
        replayed(f"{row['model']}, {row['devices']} × {row['cluster']}", kinds_of(row)) for row in small[:3]
    ]
    if not only:
        BENCHMARK.keep({"simulated": rows, "replayed": replays})


if __name__ == "__main__":
    quiet()
    run(main)
