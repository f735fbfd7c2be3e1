"""A shape as a Transformers config is a model of the same dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.workload.published import names, shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.transformers_config import to_config


@pytest.mark.parametrize("name", names())
def test_it_reads_back_as_the_same_dimensions(name: str) -> None:
    whole = shape(name)
    found = Shape.of_config(to_config(whole), name)
    same = {"positions": whole.positions, "source": whole.source}
    assert found.parameters == whole.parameters
    assert found.active_parameters == whole.active_parameters
    if whole.experts and not whole.dense_layers:
        # Features of layers without experts, of which there are none.
        same["ffn"] = whole.ffn
    assert replace(found, **same) == whole


def test_there_are_positions_for_the_sequence() -> None:
    config = to_config(shape("llama-3-8b"), 1 << 20)
    assert config["max_position_embeddings"] == 1 << 20
