"""Evaluation: the mean over valid tokens of the rows that there are, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import Bigram, run_config

from harness import run_ranks
from hyper_parallel.data import PackedText, TextData
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.strategy import Strategy
from hyper_parallel.train.evaluate import Evaluation

DEVICE = torch.device("cpu")


def _held_out(folder: Path) -> PackedText:
    """A few rows: fewer than a batch."""
    (folder / "held-out.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    config = run_config(folder, data={"eval": str(folder / "held-out.txt"), "pack": False})
    return TextData(config.data).eval


def _loss(rank: int, world: int, text: PackedText, batches: int, batch: int, micro: int | None) -> float:
    model = parallelize(Bigram(), Strategy(axes={"shard": world}))
    evaluation = Evaluation(text, batches, batch, micro, sharded(model), DEVICE)
    return evaluation.loss(model)


def test_rows_that_fill_up_a_batch_do_not_count(tmp_path: Path) -> None:
    text = _held_out(tmp_path)
    assert 4 < len(text) < 8
    batch = text.batch(range(len(text)))
    logits = Bigram()(batch["input_ids"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    for sizes in [(1, 8, None), (3, 4, 2), (9, 1, None), (2, 8, 4)]:
        assert _loss(0, 1, text, *sizes) == pytest.approx(expected, abs=1e-5)
    assert run_ranks(_loss, 2, text, 1, 16, 2) == pytest.approx([expected] * 2, abs=1e-5)


def test_only_as_many_batches_as_are_asked_for(tmp_path: Path) -> None:
    text = _held_out(tmp_path)
    first = text.batch([0, 1])
    logits = Bigram()(first["input_ids"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), first["labels"].flatten()).item()
    assert _loss(0, 1, text, 2, 1, None) == pytest.approx(expected, abs=1e-5)


def test_nothing_held_out_is_nothing_to_evaluate(tmp_path: Path) -> None:
    config = run_config(tmp_path, data={"eval": None, "holdout": 0.0})
    model = parallelize(Bigram(), Strategy())
    assert not Evaluation(TextData(config.data).eval, 2, 4, None, sharded(model), DEVICE)
