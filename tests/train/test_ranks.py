"""The loop on several real ranks: the same numbers as on one, and one decision on all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LLAMA, Bigram, metrics, run, run_config

from harness import run_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import NonFiniteError, StrategyError
from hyper_parallel.launch.stop import listening
from hyper_parallel.shard import sharded
from hyper_parallel.step.build import build
from hyper_parallel.step.optimizer import AdamW
from hyper_parallel.train import register_optimizer
from hyper_parallel.train.summary import Summary

STRATEGIES: dict[str, dict[str, Any]] = {
    "shard-tensor-sequence": {"axes": {"shard": 2, "tensor": 2}, "sequence": True},
    "replicate-shard": {"axes": {"replicate": 2, "shard": 2}},
    "tensor-outside": {"axes": {"tensor": 2, "shard": 2}},
    "context-tensor": {"axes": {"context": 2, "tensor": 2}, "context": {"method": "ring"}},
    "two-dims": {"axes": {"tensor_x": 2, "tensor_y": 2}},
}
TRAIN = {
    "steps": 6,
    "batch": 8,
    "micro_batch": 2,
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "sample": {"tokens": 3},
}
DROPPED = {**LLAMA, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """The run on one worker."""
    config = run_config(folder, "alone", train=TRAIN)
    return config, run(config)


def _config(folder: Path, name: str) -> RunConfig:
    return run_config(folder, name, train=TRAIN, strategy=STRATEGIES[name])


def _runs(rank: int, world: int, folder: Path) -> dict[str, Summary]:
    return {name: run(_config(folder, name)) for name in STRATEGIES}


@pytest.fixture(scope="module")
def on_four(folder: Path) -> list[dict[str, Summary]]:
    """Of each of four workers, the run under each strategy."""
    return run_ranks(_runs, 4, folder, timeout=240)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_on_four_workers_are_those_on_one(name: str, folder: Path, alone: Any, on_four: Any) -> None:
    one, expected = alone
    config, summaries = _config(folder, name), [runs[name] for runs in on_four]
    for metric in ("loss", "grad_norm", "eval_loss", "lr", "loss_tokens", "tokens"):
        assert metrics(config, metric) == pytest.approx(metrics(one, metric), abs=1e-5, rel=1e-5)
    for summary in summaries:
        assert (summary.final_loss, summary.eval_after) == (summaries[0].final_loss, summaries[0].eval_after)
        assert summary.sample == expected.sample
        assert summary.parameters == expected.parameters
        assert summary.eval_after == pytest.approx(expected.eval_after, abs=1e-5)


def test_four_workers_checkpoint_is_resumed_by_one(folder: Path, alone: Any) -> None:
    sections = {"train": TRAIN, "strategy": STRATEGIES["shard-tensor-sequence"]}
    run_ranks(_stopped, 4, folder, "handed-over", sections)
    config = run_config(folder, "handed-over", train=TRAIN)
    summary = run(config)
    assert summary.resumed_from == 4
    assert metrics(config) == pytest.approx(metrics(alone[0]), abs=1e-5)


def _stopped(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any]) -> Any:
    """Rank 1 alone is asked to stop, at the end of step 3."""

    class Asked(AdamW):
        def advance(self) -> None:
            super().advance()
            if rank == 1 and self.state()["step"] == 3:
                os.kill(os.getpid(), signal.SIGINT)

    register_optimizer("adamw", lambda model, parameters, config: Asked(parameters, config))
    with listening((signal.SIGINT,)):
        return run(run_config(folder, name, **sections))


def test_ranks_agree_to_stop(folder: Path) -> None:
    summaries = run_ranks(
        _stopped, 2, folder, "stopped", {"train": TRAIN, "strategy": {"axes": {"shard": 2}}}
    )
    assert [(s.stopped, s.steps) for s in summaries] == [(True, 4)] * 2
    assert all(s.checkpoint.endswith("step-00000004") for s in summaries[:1])


def _not_finite(rank: int, world: int, folder: Path) -> str:
    # One rank alone computes something infinite, in the second of its two micro-batches of step 2.
    # Both count their calls in a buffer, which every rank has to write alike.
    model = Bigram(broken_at=4 if rank == 1 else 1000)
    sections = {"strategy": {"axes": {"shard": 2}}, "train": {**TRAIN, "micro_batch": 2}}
    with pytest.raises(NonFiniteError) as caught:
        run(run_config(folder, "not-finite", **sections), model)
    finite = all(p.local.isfinite().all() for p in sharded(model).parameters())
    return f"{finite} {caught.value}"


def test_not_finite_on_one_rank_stops_all_with_the_same_words(folder: Path) -> None:
    first, second = run_ranks(_not_finite, 2, folder)
    assert first == second and first.startswith("True step 2: the loss is nan")


def _drops(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any]) -> dict[int, float]:
    config = run_config(folder, name, **sections)
    run(config)
    return metrics(config) if rank == 0 else {}


def test_dropout_does_not_depend_on_workers_or_micro_batches(folder: Path) -> None:
    sections = {"model": {"config": DROPPED}, "train": {**TRAIN, "steps": 3}}
    expected = _drops(
        0, 1, folder, "dropout-1", {**sections, "train": {**sections["train"], "micro_batch": 8}}
    )
    found = run_ranks(_drops, 2, folder, "dropout-2", {**sections, "strategy": {"axes": {"shard": 2}}})[0]
    assert found == pytest.approx(expected, abs=1e-5)
    undropped = _drops(0, 1, folder, "dropout-0", {"train": sections["train"]})
    assert abs(undropped[1] - expected[1]) > 1e-4


def _own_loop(rank: int, world: int) -> list[float]:
    import importlib.util

    path = Path(__file__).parents[2] / "examples" / "own_loop.py"
    spec = importlib.util.spec_from_file_location("own_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(8, world)


def test_a_loop_of_ones_own_on_one_and_two_ranks() -> None:
    one = _own_loop(0, 1)
    assert one[-1] < one[0] - 0.1
    for losses in run_ranks(_own_loop, 2):
        torch.testing.assert_close(losses, one, atol=1e-5, rtol=0)


def _refused(rank: int, world: int, folder: Path, axes: dict[str, int], method: str) -> tuple[str, bool]:
    sections = {"strategy": {"axes": axes, "context": {"method": method}}, "data": {"sequence": 18}}
    config = run_config(folder, "odd", **sections)
    with pytest.raises(StrategyError) as refusal:
        build(config)
    return str(refusal.value), Path(config.out).exists()


@pytest.mark.parametrize(
    ("axes", "method", "said"),
    [
        ({"context": 4}, "ring", "evenly over context 4; use a multiple of 8"),
        ({"tensor_x": 2, "tensor_y": 2}, "auto", "evenly over tensor 4 (the sequence); use a multiple of 4"),
    ],
)
def test_a_length_that_axes_cannot_split_leaves_nothing(
    axes: dict[str, int], method: str, said: str, folder: Path
) -> None:
    for told, left in run_ranks(_refused, 4, folder, axes, method):
        assert told == f"data.sequence: rows of 18 positions cannot be split {said}"
        assert not left
