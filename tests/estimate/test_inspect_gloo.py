"""What inspect says without workers is what real workers hold and send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from inspect_worlds import DEEPSEEK, LLAMA, MIXTRAL, real_rank, run_of

from harness import run_ranks
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
}


def _both(case: tuple[Any, ...]) -> tuple[list[dict[str, Any]], list[Inspection]]:
    model, strategy, train = case
    run = run_of(model, strategy, **train)
    world = run.strategy.axes.world
    return (
        run_ranks(real_rank, world, run),
        [inspect_run(run, rank) for rank in (0, world - 1)],
    )


@pytest.mark.parametrize("name", CASES)
def test_real_workers_hold_and_send_what_is_told(name: str) -> None:
    reals, told = _both(CASES[name])
    exact = name != "two kinds of layers"
    for real, inspection in ((reals[0], told[0]), (reals[-1], told[-1])):
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
    reals, told = _both(CASES["tensor, uneven vocabulary"])
    for real, inspection in ((reals[0], told[0]), (reals[-1], told[-1])):
        rows = {f"{row.module}.{row.parameter}": row.parameters for row in inspection.rows}
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            if name in real["parameters"]:
                assert rows[name] == real["parameters"][name]
    assert told[0].totals["parameters"] > told[1].totals["parameters"]


def test_tokens_sent_to_experts_are_told_as_if_balanced() -> None:
    strategy = {"axes": {"shard": 2, "tensor": 2, "expert": 2}, "sequence": True}
    reals, told = _both((MIXTRAL, strategy, {}))
    assert any("evenly over experts" in line for line in told[0].explanations())
    for real, inspection in ((reals[0], told[0]), (reals[-1], told[-1])):
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
    strategy = {"axes": {"replicate": 2, "shard": 2, "tensor": 2}, "sequence": True}
    reals, told = _both((LLAMA, strategy, {}))
    axis_of = {(0, 1): "tensor_x", (0, 2): "shard", (0, 4): "replicate", tuple(range(8)): "all ranks"}
    expected = {
        (axis_of[ranks], kind, much)
        for (ranks, kind, what), much in reals[0]["calls"].items()
        if what == "bytes"
    }
    assert {(row.axis, row.kind, row.bytes) for row in told[0].collectives} == expected
