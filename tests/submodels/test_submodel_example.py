"""The example's script has the losses of one device on several, and writes a model that Transformers reads."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_submodels.py"
DECLARED = {"vision": {"devices": 1}, "language": {"axes": {"tensor": 2}}}


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("own_submodels", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(rank: int, world: int, declared: dict[str, Any]) -> tuple[float, float, float]:
    found: tuple[float, float, float] = _script().train(4, declared)
    return found


def test_the_example_is_the_same_on_several_devices() -> None:
    (one,) = run_ranks(_run, 1, {})
    first, *others = run_ranks(_run, 3, DECLARED)
    assert others == [first, first]
    assert first[:2] == pytest.approx(one[:2], rel=1e-5)
    assert first[1] < one[0]
    assert not math.isnan(first[2])


def test_images_show_what_the_words_say() -> None:
    made = _script().draw(64, seed=3)
    for ids, image in zip(made["input_ids"], made["pixel_values"], strict=True):
        colour = list(_script().COLOURS.values())[int(ids[-2])]
        seen = image.amax((1, 2)) > 0.7
        assert seen.tolist() == [bool(part) for part in colour]
