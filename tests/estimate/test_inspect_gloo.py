"""What inspect says without workers is what workers hold and send.

Sizes do not depend on what other ranks send, but for experts. So most cases are ranks whose collectives return at once
(`fake_ranks`); real workers serve one case of plain axes, and those with experts.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from inspect_worlds import DEEPSEEK, LLAMA, MIXTRAL, real_rank, run_of

from harness import run_ranks
from hyper_parallel.compat.fake_process_group import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import Inspection, inspect_run

MUON = {"optimizer": {"name": "muon"}}
CASES = {
    "tensor, uneven vocabulary": (LLAMA, {"axes": {"tensor": 2}}, {}),
    "shard and tensor": (LLAMA, {"axes": {"shard": 2, "tensor": 2}, "sequence": True}, {}),
    "copies, four micro-batches": (LLAMA, {"axes": {"replicate": 2}}, {"micro_batch": 1}),
    "ZeRO-2": (LLAMA, {"axes": {"shard": 2}, "memory": {"shard": "gradients"}}, {"micro_batch": 1}),
    "ZeRO-1": (LLAMA, {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}}, {"micro_batch": 1}),
    "Muon": (LLAMA, {"axes": {"shard": 2, "tensor": 2}}, MUON),
    "bfloat16": (LLAMA, {"axes": {"shard": 2}, "precision": {"compute": "bfloat16"}}, {}),
    "two kinds of layers": (DEEPSEEK, {"axes": {"shard": 2, "tensor": 2}, "sequence": True}, {}),
    "experts": (MIXTRAL, {"axes": {"shard": 2, "tensor": 2, "expert": 2}, "sequence": True}, {}),
}


Found = tuple[list[dict[str, Any]], list[Inspection]]
REAL = ("shard and tensor", "two kinds of layers", "experts")


@functools.cache
def _both(name: str) -> Found:
    """Of the first and the last rank: what they hold and send, and what is told."""
    model, strategy, train = CASES[name]
    run = run_of(model, strategy, **train)
    world = run.strategy.axes.world
    if name in REAL:
        reals = run_ranks(real_rank, world, run)
        found = [reals[0], reals[-1]]
    else:
        found = [_faked(rank, world, run) for rank in (0, world - 1)]
    return found, [inspect_run(run, rank) for rank in (0, world - 1)]


def _faked(rank: int, world: int, run: RunConfig) -> dict[str, Any]:
    with fake_ranks(world, rank):
        return real_rank(rank, world, run)


@pytest.mark.parametrize("name", [name for name in CASES if name != "experts"])
def test_workers_hold_and_send_what_is_told(name: str) -> None:
    reals, told = _both(name)
    exact = name != "two kinds of layers"
    for real, inspection in zip(reals, told, strict=True):
        totals = inspection.totals
        assert totals["parameters"] == sum(real["parameters"].values())
        assert totals["optimizer"] == sum(real["optimizer"].values())
        assert totals["gradients"] == sum(real["gradients"].values())
        if exact:
            assert totals["activations"] == real["activations"]
            assert _sent(inspection) == _received(real)
        else:
            # Real tokens do not spread over experts evenly.
            assert totals["activations"] == pytest.approx(real["activations"], rel=0.05)
            assert _sent(inspection).keys() == _received(real).keys()


def test_uneven_shards_are_told_by_rank() -> None:
    reals, told = _both("tensor, uneven vocabulary")
    for real, inspection in zip(reals, told, strict=True):
        rows = {f"{row.module}.{row.parameter}": row.parameters for row in inspection.rows}
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            if name in real["parameters"]:
                assert rows[name] == real["parameters"][name]
    assert told[0].totals["parameters"] > told[1].totals["parameters"]


def test_tokens_sent_to_experts_are_told_as_if_balanced() -> None:
    reals, told = _both("experts")
    assert any("evenly over experts" in line for line in told[0].explanations())
    for real, inspection in zip(reals, told, strict=True):
        sent, received = _sent(inspection), _received(real)
        assert sent.keys() == received.keys()
        for key, much in received.items():
            assert sent[key] == (pytest.approx(much, rel=0.15) if key == ("all_to_all", "bytes") else much)
        assert inspection.totals["activations"] == pytest.approx(real["activations"], rel=0.1)


def _sent(inspection: Inspection) -> Counter[Any]:
    """By kind, over all axes."""
    found: Counter[Any] = Counter()
    for row in inspection.collectives:
        found[row.kind, "count"] += row.count
        found[row.kind, "bytes"] += row.bytes
    return found


def _received(real: dict[str, Any]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for (_, kind, what), much in real["calls"].items():
        found[kind, what] += much
    return found


def test_collectives_stand_under_the_axis_whose_ranks_they_join() -> None:
    run = run_of(LLAMA, {"axes": {"replicate": 2, "shard": 2, "tensor": 2}, "sequence": True})
    real, told = _faked(0, 8, run), inspect_run(run)
    axis_of = {(0, 1): "tensor_x", (0, 2): "shard", (0, 4): "replicate", tuple(range(8)): "all ranks"}
    expected = {
        (axis_of[ranks], kind, much) for (ranks, kind, what), much in real["calls"].items() if what == "bytes"
    }
    assert {(row.axis, row.kind, row.bytes) for row in told.collectives} == expected
