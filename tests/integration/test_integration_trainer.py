"""HyperParallelTrainer on 2 and 4 ranks against Transformers' own Trainer in one process, at the same global batch."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import EVALUATED, STEPS, Case, Told, told

from harness import run_ranks

NEAR = 1e-4
"""Sums in other orders in fp32, over eight updates by AdamW."""

SEQUENCE: dict[str, Any] = {"axes": {"tensor": 2}, "sequence": True}
BOTH: dict[str, Any] = {"axes": {"shard": 2, "tensor": 2}, "sequence": True}
SMOOTH = {"max_steps": 4, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1}
"""Early releases of Transformers 5 add up the means of smoothed micro-batches, and do not divide by their number."""
PLAIN = {
    "few": Case(None, arguments={"max_steps": 4}),
    "llama": Case(None, metrics=True),
    "llama left": Case(None, arguments={"max_steps": 4}, side="left"),
    "llama smooth": Case(None, arguments=SMOOTH),
    "mixtral": Case(None, "mixtral"),
    "lora": Case(None, "lora"),
    "own loss": Case(None, arguments={"max_steps": 4}, own_loss=True),
    "classes": Case(None, "classes", arguments={"max_steps": 4, "gradient_accumulation_steps": 1}),
    "stream": Case(None, arguments={"max_steps": 4}, stream=True),
}
ON_TWO = {
    "shard": Case({"axes": {"shard": 2}}),
    "tensor": Case({"axes": {"tensor": 2}}, metrics=True),
    "context": Case({"axes": {"context": 2}}, metrics=True),
    "left": Case(SEQUENCE, arguments={"max_steps": 4}, side="left"),
    "smooth": Case({"axes": {"context": 2}}, arguments=SMOOTH),
    "expert": Case({"axes": {"shard": 2, "expert": 2}}, "mixtral"),
    "lora": Case({"axes": {"tensor": 2}}, "lora"),
    "own loss": Case({"axes": {"shard": 2}}, arguments={"max_steps": 4}, own_loss=True),
    "classes": Case(
        {"axes": {"shard": 2}}, "classes", arguments={"max_steps": 4, "gradient_accumulation_steps": 1}
    ),
    "stream": Case({"axes": {"tensor": 2}}, arguments={"max_steps": 4}, stream=True),
    "kept": Case({"axes": {"shard": 2}, "memory": {"shard": "gradients"}}, arguments={"max_steps": 4}),
}
ON_FOUR = {
    "shard, tensor": Case(BOTH, metrics=True),
    "replicate, shard": Case({"axes": {"replicate": 2, "shard": 2}}, metrics=True),
    "recomputed": Case(BOTH, arguments={"gradient_checkpointing": True, "max_steps": 4}),
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Told]:
    """What Transformers' own Trainer tells."""
    return run_ranks(told, 1, PLAIN)[0]


@pytest.fixture(scope="module")
def spread() -> dict[str, Told]:
    """What ours tells, by number of ranks and name of the case."""
    found = {f"2 {name}": one for name, one in run_ranks(told, 2, ON_TWO)[0].items()}
    return found | {f"4 {name}": one for name, one in run_ranks(told, 4, ON_FOUR)[0].items()}


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("2 shard", "llama"),
        ("2 tensor", "llama"),
        ("2 context", "llama"),
        ("2 left", "llama left"),
        ("2 smooth", "llama smooth"),
        ("2 expert", "mixtral"),
        ("2 lora", "lora"),
        ("2 own loss", "own loss"),
        ("2 classes", "classes"),
        ("2 stream", "stream"),
        ("2 kept", "few"),
        ("4 shard, tensor", "llama"),
        ("4 replicate, shard", "llama"),
        ("4 recomputed", "few"),
    ],
)
def test_losses_norms_and_events_are_those_of_one_process(
    plain: dict[str, Told], spread: dict[str, Told], name: str, like: str
) -> None:
    ours, theirs = spread[name], plain[like]
    assert len(theirs.losses) in (STEPS, 4) and len(theirs.evaluated) >= 1
    assert ours.losses == pytest.approx(theirs.losses, abs=NEAR)
    assert ours.norms == pytest.approx(theirs.norms, rel=NEAR)
    assert ours.evaluated == pytest.approx(theirs.evaluated, abs=NEAR)
    assert ours.events == theirs.events


@pytest.mark.parametrize("name", ["2 tensor", "2 context", "4 shard, tensor", "4 replicate, shard"])
def test_metrics_see_whole_logits_of_every_row_once(
    plain: dict[str, Told], spread: dict[str, Told], name: str
) -> None:
    for ours, theirs in zip(spread[name].metrics, plain["llama"].metrics, strict=True):
        assert ours == pytest.approx(theirs, abs=NEAR)
        assert ours["eval_rows"] == EVALUATED
