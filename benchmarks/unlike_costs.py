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
from transformers import LlavaConfig, LlavaForConditionalGeneration

from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.submodel_capture import LANGUAGE, captured_parts
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.workload.part_costs import EncoderCosts, LanguageCosts, Line, ModelCosts, Times

LAYERS = 2
"""Of each part in a capture."""
DEGREES = (1, 2, 4, 8)
WORKSPACE = 6 * 2**30
"""Bytes of a layer's activations, logits of a chunk, and buffers: an estimate."""
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


def model_costs(shape: Shape, cluster: Cluster) -> ModelCosts:
    """Those of a model on a cluster."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def line(points: Mapping[float, list[Times]], part: int, place: int, times: float) -> Line:
        (one, here), (other, there) = points.items()
        return Line.through((one, times * here[part][place]), (other, times * there[part][place]))

    images = {n: _captured(shape, cluster, 1, 1, n) for n in (1, 4)}
    deep = shape.vision["num_hidden_layers"] / LAYERS
    both = [
        (
            line({n: one[0] for n, one in images.items()}, 0, place, deep),
            line({n: one[1] for n, one in images.items()}, 0, place, 1),
        )
        for place in range(3)
    ]
    vision = [Line(a.constant + b.constant, a.slope + b.slope) for a, b in both]
    layers, head = {}, {}
    deep = shape.text["num_hidden_layers"] / LAYERS
    for tensor in DEGREES:
        rows = {n: _captured(shape, cluster, tensor, n, n) for n in (1, 2)}
        layers[tensor] = tuple(line({n: one[0] for n, one in rows.items()}, 1, at, deep) for at in range(3))
        head[tensor] = tuple(line({n: one[1] for n, one in rows.items()}, 1, at, 1) for at in range(3))
    of_encoder, of_text = _parameters(shape)
    inputs = 2.0 * shape.patches * shape.vision["hidden_size"] * shape.vision["num_hidden_layers"]
    encoder = EncoderCosts(
        name="vision",
        modules=VISION,
        passes=(vision[0], vision[1], vision[2]),
        saved=Line(0.0, inputs),
        workspace=Line(WORKSPACE, 0.0),
        features=2.0 * shape.patches * shape.text["hidden_size"],
        parameters=of_encoder,
    )
    depth = shape.text["num_hidden_layers"]
    saved = Line(0.0, 2.0 * shape.length * shape.text["hidden_size"] * depth)
    language = LanguageCosts(
        layers=layers,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        saved=dict.fromkeys(DEGREES, saved),
        workspace=dict.fromkeys(DEGREES, Line(WORKSPACE, 0.0)),
        recomputed=dict.fromkeys(DEGREES, Line(0.0, 0.0)),
        depth=depth,
        parameters=of_text,
    )
    return ModelCosts((encoder,), language)


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
) -> tuple[list[Times], list[Times]]:
    """(of layers, of the rest), by part: encoder, language model."""
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
    found = captured_parts(model, micro, cluster, {"vision": VISION}, tensor=tensor, few_layers=False)

    def priced(*, layers: bool) -> list[Times]:
        def counts(module: str) -> float:
            return float((".layers." in module) is layers)

        return [found.seconds(part, counts) for part in ("vision", LANGUAGE)]

    return priced(layers=True), priced(layers=False)
