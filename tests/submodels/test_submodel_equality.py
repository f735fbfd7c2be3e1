"""Submodels on unlike device groups, on real gloo workers: loss, norm, gradients and updated values of one device."""

from __future__ import annotations

import functools

import pytest

import hyper_parallel as hp
from harness.ranks import run_ranks
from harness.submodel_models import MODELS
from harness.submodel_steps import Compared, Outcome, SubmodelCase, against_one_device, run_case
from hyper_parallel.shard import sharded
from hyper_parallel.shard.experts.loads import take_loads

VISION = {"modules": ["model.vision_tower", "model.multi_modal_projector"]}
CASES: dict[int, list[SubmodelCase]] = {
    2: [
        SubmodelCase("t5", {"encoder": {"modules": ["encoder"]}, "decoder": {}}, micro_batches=2),
        # The encoder's layers have adapters, and the projector between is frozen.
        SubmodelCase(
            "llava",
            {"vision": VISION, "language": {}},
            adapted=("q_proj", "v_proj", "fc1", "down_proj"),
            steps=2,
        ),
        # No adapter is in the encoder, so that nothing goes back to it.
        SubmodelCase(
            "qwen2.5-vl",
            {"vision": {"modules": ["model.visual"]}, "language": {}},
            adapted=("q_proj", "o_proj"),
            evaluates=True,
        ),
    ],
    3: [
        SubmodelCase("llava", {"vision": VISION, "language": {"axes": {"tensor": 2}}}, steps=2),
        SubmodelCase(
            "llava",
            {"vision": VISION, "language": {"axes": {"tensor": 2}}},
            {"memory": {"recompute": "layer"}},
            adapted=("q_proj", "linear_1", "o_proj", "up_proj"),
        ),
        SubmodelCase("llava packed", {"vision": VISION, "language": {"axes": {"tensor": 2}}}),
        # Declared against the data flow.
        SubmodelCase(
            "llava",
            {"language": {"axes": {"shard": 2}}, "vision": VISION},
            {"memory": {"shard": "optimizer", "recompute": "layer"}},
        ),
        # Images of two sizes, and none in some micro-batches.
        SubmodelCase(
            "qwen2.5-vl",
            {"vision": {"modules": ["model.visual"]}, "language": {"axes": {"tensor": 2}}},
            micro_batches=5,
            steps=2,
            evaluates=True,
        ),
        SubmodelCase(
            "llava mixture", {"vision": VISION, "language": {"axes": {"shard": 2, "expert": 2}}}, steps=2
        ),
        # They train the embedding together.
        SubmodelCase("t5", {"encoder": {"modules": ["encoder"]}, "decoder": {"axes": {"shard": 2}}}),
    ],
    4: [
        SubmodelCase(
            "llava",
            {"vision": {**VISION, "axes": {"shard": 2}}, "language": {"axes": {"pipeline": 2}}},
            evaluates=True,
        ),
        # Embedding and head are one weight of two places of the pipeline.
        SubmodelCase("llava tied", {"vision": VISION, "language": {"axes": {"pipeline": 3}}}, rows=1),
        SubmodelCase("llava", {"vision": {**VISION, "devices": 2}, "language": {"devices": 2}}),
        # Dealt so that both encoders have as many images.
        SubmodelCase(
            "qwen2.5-vl",
            {"vision": {"modules": ["model.visual"], "devices": 2}, "language": {"devices": 2}},
            micro_batches=5,
        ),
        # One row with a small image and three with none: copies without loss make them two and four.
        SubmodelCase(
            "qwen2.5-vl",
            {"vision": {"modules": ["model.visual"], "devices": 2}, "language": {"axes": {"shard": 2}}},
            evaluates=True,
        ),
        # Micro-batches of three kinds, whose weights are gathered and whose gradients are reduced once a step.
        SubmodelCase(
            "qwen2.5-vl",
            {
                "vision": {"modules": ["model.visual"], "axes": {"shard": 2}},
                "language": {"axes": {"shard": 2}},
            },
            {"memory": {"shard": "optimizer"}},
            micro_batches=5,
            steps=2,
            evaluates=True,
        ),
        # Nothing goes back to a frozen encoder.
        SubmodelCase(
            "llava",
            {"vision": {**VISION, "devices": 2}, "language": {"axes": {"tensor": 2}}},
            frozen=VISION["modules"],
        ),
    ],
    5: [
        SubmodelCase("llava", {"vision": VISION, "language": {"axes": {"shard": 2, "tensor": 2}}}),
        SubmodelCase(
            "omni",
            {
                "audio": {"modules": ["model.audio_tower"], "devices": 2},
                "vision": {"modules": ["model.visual"]},
                "language": {"axes": {"tensor": 2}},
            },
        ),
    ],
}


@functools.cache
def _found(world: int, number: int) -> Compared:
    (found,) = against_one_device(world, [CASES[world][number]])
    return found


@pytest.mark.parametrize(
    ("world", "number"), [(world, number) for world in CASES for number in range(len(CASES[world]))]
)
def test_steps_are_those_of_one_device(world: int, number: int) -> None:
    case, found = CASES[world][number], _found(world, number)
    assert not found.refused, found.refused
    assert not found.missing, found.missing
    assert found.error < 1e-5, found
    assert case.evaluates == (found.evaluated is not None), found
    goes_back = not case.frozen and case.adapted != ("q_proj", "o_proj")
    assert ("gradient" in found.plan) == goes_back


def test_what_crosses_is_told() -> None:
    assert _found(4, 0).plan.splitlines() == [
        "vision: ranks 0, 1",
        "language 0: ranks 2",
        "language 1: ranks 3",
        "value [32/replicate*shard, 32] of vision to [32, 32] of language 0",
        "value [2, 24, 32] of language 0 to [2, 24, 32] of language 1",
        "gradient [2, 16, 32] of language 0 to [2/replicate*shard, 16, 32] of vision",
        "gradient [2, 24, 32] of language 1 to [2, 24, 32] of language 0",
    ]


def _loads(rank: int, world: int, case: SubmodelCase) -> Outcome:
    return run_case(case)


def test_loads_of_experts_are_those_of_one_device() -> None:
    case = SubmodelCase("llava mixture", {"vision": VISION, "language": {"axes": {"shard": 2, "expert": 2}}})
    model, made = case.build(), MODELS[case.model]
    hp.parallelize(model, hp.Strategy(check=False))
    given = dict(made.inputs(made.draw(case.rows * case.micro_batches)))
    del given["labels"]
    with sharded(model).micro_batch():
        model(**given, use_cache=False)
    one = take_loads(sharded(model))
    assert one.sum() == 2 * 2 * given["input_ids"].numel(), "two layers, two experts for each token"
    for found in run_ranks(_loads, 3, case):
        assert found.loads is not None and found.loads.tolist() == one.tolist()
