"""What an image encoder and a language model cost on a cluster, from graphs of the unmodified model's own code.

A LLaVA with two layers of each part is captured as training captures it, for 1 and 4 images, 1 and 2 rows, and each
tensor degree, and its operators are priced on the cluster; layers count as often as the model has them. Between the
sizes, and beyond, seconds are a constant and a multiple. Everything is simulated.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from transformers import LlavaConfig, LlavaForConditionalGeneration

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_process_group import fake_ranks
from hyper_parallel.estimate.stage_price import node_seconds
from hyper_parallel.graph.part_order import part_order
from hyper_parallel.runtime.stage_costs import stage_costs
from hyper_parallel.schedule import Costs
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.submodel_modules import assigned_modules, submodel_of
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import capture_micro_batch_like
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.submodel_cut import Cut, Parts
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.submodels import read_submodels

LAYERS = 2
"""Of each part in a capture."""
DEGREES = (1, 2, 4, 8)
VISION = ("model.vision_tower", "model.multi_modal_projector")


@dataclass(frozen=True)
class Shape:
    """A model, and the rows that it learns from."""

    name: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    length: int
    """Tokens of a row, of which images have a part."""

    @property
    def patches(self) -> int:
        """Of an image, each a token of the language model."""
        return int((self.vision["image_size"] // self.vision["patch_size"]) ** 2)


SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
SO400M |= {"image_size": 384, "patch_size": 14}
VIT_6B = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25}
VIT_6B |= {"image_size": 448, "patch_size": 14}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256}
SHAPES = {
    one.name: one
    for one in (
        Shape("SigLIP 0.4B + Llama 8B", SO400M, LLAMA_8B | LLAMA, 8192),
        Shape("ViT 6B + Llama 8B", VIT_6B, LLAMA_8B | LLAMA, 8192),
        Shape("ViT 6B + Llama 70B", VIT_6B, LLAMA_70B | LLAMA, 8192),
    )
}


@dataclass(frozen=True)
class Line:
    """constant + slope · size, seconds."""

    constant: float
    slope: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.constant + self.slope * size) if size else 0.0

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> Line:
        """Through two points."""
        slope = (other[1] - one[1]) / (other[0] - one[0])
        return cls(one[1] - slope * one[0], slope)


Passes = tuple[Line, Line, Line]
"""Forward pass, gradients of inputs, gradients of weights."""


@dataclass(frozen=True)
class ModelCosts:
    """Seconds of the parts of a model on one device, or on the ranks of a tensor group."""

    shape: Shape
    vision: Passes
    """By images, on one device."""
    layers: Mapping[int, Passes]
    """All layers of the language model, by rows, by tensor degree."""
    head: Mapping[int, Passes]
    """What the last stage has besides: head and loss."""
    vision_parameters: int
    text_parameters: int

    def seconds_of_images(self, images: float) -> tuple[float, float, float]:
        """Of a rank's images."""
        forward, before, after = (one(images) for one in self.vision)
        return forward, before, after

    def seconds_of_rows(self, rows: float, tensor: int, pipeline: int) -> list[tuple[float, float, float]]:
        """By stage, whose layers are even."""
        layers = [one(rows) / pipeline for one in self.layers[tensor]]
        ends = [one(rows) for one in self.head[tensor]]
        return [
            tuple(a + (b if stage == pipeline - 1 else 0.0) for a, b in zip(layers, ends, strict=True))  # type: ignore[misc]
            for stage in range(pipeline)
        ]


def model_costs(shape: Shape, cluster: Cluster) -> ModelCosts:
    """Those of a model on a cluster."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def line(points: Mapping[float, list[list[float]]], stage: int, place: int, times: float) -> Line:
        (one, here), (other, there) = points.items()
        return Line.through((one, times * here[stage][place]), (other, times * there[stage][place]))

    images = {n: _captured(shape, cluster, 1, 1, n) for n in (1, 4)}
    deep = shape.vision["num_hidden_layers"] / LAYERS
    vision = tuple(
        Line(
            line({n: one[0] for n, one in images.items()}, 0, place, deep).constant
            + line({n: one[1] for n, one in images.items()}, 0, place, 1).constant,
            line({n: one[0] for n, one in images.items()}, 0, place, deep).slope
            + line({n: one[1] for n, one in images.items()}, 0, place, 1).slope,
        )
        for place in range(3)
    )
    layers, head = {}, {}
    deep = shape.text["num_hidden_layers"] / LAYERS
    for tensor in DEGREES:
        rows = {n: _captured(shape, cluster, tensor, n, n) for n in (1, 2)}
        layers[tensor] = tuple(line({n: one[0] for n, one in rows.items()}, 1, at, deep) for at in range(3))
        head[tensor] = tuple(line({n: one[1] for n, one in rows.items()}, 1, at, 1) for at in range(3))
    return ModelCosts(shape, vision, layers, head, *_parameters(shape))  # type: ignore[arg-type]


@cache
def _model(name: str) -> LlavaConfig:
    shape = SHAPES[name]
    return LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", **shape.vision, "num_hidden_layers": LAYERS},
        text_config={"model_type": "llama", **shape.text, "num_hidden_layers": LAYERS},
        image_token_id=shape.text["vocab_size"] - 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _parameters(shape: Shape) -> tuple[int, int]:
    """Of the encoder and of the language model, with all layers."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(_model(shape.name))
    counts = [0, 0]
    for name, one in model.named_parameters():
        text = not name.startswith(VISION)
        deep = (shape.text if text else shape.vision)["num_hidden_layers"] / LAYERS
        counts[text] += int(one.numel() * (deep if ".layers." in name else 1))
    return counts[0], counts[1]


def _captured(
    shape: Shape, cluster: Cluster, tensor: int, rows: int, images: int
) -> tuple[list[list[float]], list[list[float]]]:
    """(of layers, of the rest), each [stage][forward, input, weight] in seconds."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(_model(shape.name)).to(torch.bfloat16)
    ids = torch.zeros(rows, shape.length, dtype=torch.int64)
    ids.flatten()[: images * shape.patches] = shape.text["vocab_size"] - 1
    size = shape.vision["image_size"]
    micro = MicroBatch(
        ids,
        ids.clone(),
        torch.arange(shape.length).repeat(rows, 1),
        torch.arange(rows),
        extra={"pixel_values": torch.zeros(images, 3, size, size)},
    )
    named = read_submodels({"vision": {"modules": VISION}, "language": {}})
    with fake_ranks(tensor, 0):
        strategy = Strategy.model_validate(
            {
                "version": 1,
                "axes": {"tensor": tensor},
                "precision": {"param": "bfloat16", "compute": "bfloat16"},
                "memory": {"recompute": "layer"},
                "check": False,
            }
        )
        parallelize(model, strategy, lowering="traceable")
        recipe = GradientRecipe(model, sharded(model))
        whole, _ = capture_micro_batch_like(recipe, micro, 1)
        parts = Parts(tuple(named), (1, 1), submodel_of(assigned_modules(model, named)))
        order = part_order(whole, parts.part_of, parts.names)
        stages = Cut(parts, order, [(), ()], "", 1, whole).stages(whole, recipe)
    prices = {
        id(stage.step.graph): node_seconds(stage.step, cluster, range(tensor), None)
        for stage in stages.partition.stages
    }

    def priced(*, layers: bool) -> list[list[float]]:
        def cost(node: fx.Node) -> float:
            inside = ".layers." in str(node.meta.get("module", ""))
            return prices[id(node.graph)](node) if inside is layers else 0.0

        found: Costs = stage_costs(stages.partition, cost)
        return [list(one) for one in zip(found.forward, found.input, found.weight, strict=True)]

    return priced(layers=True), priced(layers=False)
