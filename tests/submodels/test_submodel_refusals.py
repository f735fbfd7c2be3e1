"""Submodels that cannot be: one line with the mend, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from harness.submodel_models import MODELS
from harness.submodel_steps import SubmodelCase, against_one_device
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.model_structure import assigned_modules, submodel_of
from hyper_parallel.strategy.axes import read_submodels

VISION = ["model.vision_tower", "model.multi_modal_projector"]


def _model() -> nn.Module:
    with torch.device("meta"):
        return MODELS["llava"].build()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"vision": {}}, "1 of them; name at least two"),
        ({"vision": {"module": VISION}, "language": {}}, "submodels.vision.module: unknown key.*'modules'"),
        (
            {"vision": {"modules": VISION, "devices": 3, "axes": {"shard": 2}}, "language": {}},
            r"submodels.vision: devices is 3, and the axes multiply to 2 \(shard 2\)",
        ),
        ({"vision": {"modules": VISION, "axes": {"shard": "auto"}}, "language": {}}, "cannot be 'auto'"),
        ({"vision": {"modules": VISION, "devices": 0}, "language": {}}, "submodels.vision.devices"),
    ],
)
def test_what_is_declared_wrong(given: dict[str, Any], told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        read_submodels(given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"vision": {}, "language": {}}, "vision and language name no modules; one of them"),
        (
            {"vision": {"modules": ["model.vison_tower"]}, "language": {}},
            "no module 'model.vison_tower'; did you mean 'model.vision_tower'",
        ),
        (
            {"vision": {"modules": ["model"]}, "other": {"modules": ["model.vision_tower"]}, "language": {}},
            "submodels.other: 'model.vision_tower' overlaps 'model' of vision",
        ),
        (
            {"vision": {"modules": VISION}, "language": {"modules": ["model.language_model"]}},
            "no submodel has 'lm_head.weight'; name its module in one, or leave modules out",
        ),
        (
            {"all": {"modules": ["model", "lm_head"]}, "language": {}},
            "submodels.language: no weights are left for it",
        ),
    ],
)
def test_modules_that_do_not_fit(given: dict[str, Any], told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        assigned_modules(_model(), read_submodels(given))


def test_a_module_that_joins_submodels_is_of_none() -> None:
    of = submodel_of(
        assigned_modules(_model(), read_submodels({"vision": {"modules": VISION}, "language": {}}))
    )
    assert of("model.vision_tower.encoder.layers.0") == 0
    assert of("model.language_model.layers.1.mlp") == of("lm_head") == 1
    assert of("model") is of("") is None


def test_rows_that_do_not_fit() -> None:
    batch = MODELS["llava"].draw(2)
    declared: Any = {"vision": {"modules": VISION}, "language": {"axes": {"tensor": 2}}}
    with pytest.raises(
        StrategyError, match=r"have 3 devices \(vision 1, language 2\), and there is 1 process"
    ):
        hp.submodels(_model(), declared, batch, micro_batches=2)
    with pytest.raises(StrategyError, match="micro_batches must be at least 1"):
        hp.submodels(_model(), declared, batch, micro_batches=0)
    with pytest.raises(StrategyError, match=r"axes \(shard 2\) are those of each submodel"):
        hp.submodels(_model(), declared, batch, micro_batches=2, strategy=hp.Strategy(axes={"shard": 2}))
    with pytest.raises(StrategyError, match="expert_balance is not supported beside submodels"):
        hp.submodels(_model(), declared, batch, micro_batches=2, strategy=hp.Strategy(expert_balance={}))


def test_what_only_the_workers_see() -> None:
    vision: Any = {"modules": VISION}
    found = against_one_device(
        3,
        [
            # The projector is between the encoder and the language model, which both are of one submodel.
            SubmodelCase("llava", {"a": {"modules": VISION[1:]}, "b": {"axes": {"tensor": 2}}}),
            SubmodelCase("llava", {"vision": {**vision, "devices": 2}, "language": {}}, rows=3),
            # Only one of two encoders would have an image.
            SubmodelCase(
                "qwen2.5-vl",
                {"vision": {"modules": ["model.visual"], "devices": 2}, "language": {}},
                arrange=False,
            ),
            # A border inside of a module that the axes split: a pending sum.
            SubmodelCase(
                "llava",
                {
                    "vision": {"modules": [*VISION, "model.language_model.layers.0.mlp.down_proj"]},
                    "language": {"axes": {"tensor": 2}},
                },
            ),
        ],
    )
    both, uneven, alone, inside = [one.refused for one in found]
    assert "a and b need each other's values in the forward pass" in both
    assert "a micro-batch of 3 rows is not divided by replicate · shard = 2" in uneven
    assert "rank 0's rows need vision → language, and those of rank 1 need language" in alone
    assert inside.startswith("submodels: ")
