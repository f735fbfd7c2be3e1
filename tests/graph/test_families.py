"""Every family's captured step is right under every kind of strategy: graphs of all ranks against one device, at the
level of gradients and updated values. A sample here, all of it under the marker `matrix`."""

from __future__ import annotations

from typing import Any

import pytest

from harness.captured import replayed_cell
from harness.families import FAMILIES, WITH_EXPERTS

Strategy = dict[str, Any]
Train = dict[str, Any]

CELLS: dict[str, tuple[Strategy, Train]] = {
    "one device": ({}, {}),
    "shard": ({"axes": {"shard": 2}}, {}),
    "tensor, sequence": ({"axes": {"tensor": 2}, "sequence": True}, {}),
    "2D": ({"axes": {"tensor_x": 2, "tensor_y": 2}}, {}),
    "context ring": ({"axes": {"context": 2}, "context": {"method": "ring"}}, {}),
    "context ulysses": ({"axes": {"context": 2}, "context": {"method": "ulysses"}}, {}),
    "replicate, shard": ({"axes": {"replicate": 2, "shard": 2}}, {}),
    "expert": ({"axes": {"shard": 2, "expert": 2}}, {}),
    "four axes": ({"axes": {"replicate": 2, "shard": 2, "context": 2, "tensor": 2}, "sequence": True}, {}),
    "bfloat16": ({"axes": {"shard": 2}, "precision": {"compute": "bfloat16"}}, {}),
    "recompute": ({"axes": {"shard": 2}, "memory": {"recompute": "layer"}}, {}),
    "loss in chunks": ({"axes": {"tensor": 2}}, {"loss": {"chunk": 16}}),
    "micro-batches": ({"axes": {"shard": 2}}, {"micro_batch": 2}),
}

SAMPLE = [
    ("llama-tied", "tensor, sequence"),
    ("gemma2", "shard"),
    ("gpt-oss", "one device"),
    ("mixtral", "expert"),
    ("gpt2", "micro-batches"),
    ("qwen2.5-vl", "recompute"),
    ("llama", "context ring"),
    ("llama", "bfloat16"),
]


def _applies(family: str, cell: str) -> bool:
    if cell == "bfloat16":  # rounded otherwise, tokens choose other experts, and both sides are right
        return family not in WITH_EXPERTS
    return cell != "expert" or family in WITH_EXPERTS


def _check(family: str, cell: str) -> None:
    strategy, train = CELLS[cell]
    report = replayed_cell(FAMILIES[family], {"axes": {}, **strategy}, train)
    assert report.ok, report.failures[:5]


@pytest.mark.parametrize(("family", "cell"), SAMPLE)
def test_the_graphs_of_a_sample_are_right(family: str, cell: str) -> None:
    _check(family, cell)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_of_every_family_are_right(family: str, cell: str) -> None:
    if not _applies(family, cell):
        pytest.skip("no such cell")
    _check(family, cell)
