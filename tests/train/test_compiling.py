"""Runs whose graphs are compiled: how far their numbers are from uncompiled ones, and what happens where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Ran, run_engine
from tiny_run import run_config

from harness import run_ranks
from hyper_parallel.compat import inductor
from hyper_parallel.train.compiling import artifacts_of
from hyper_parallel.workload import Flops

NEEDS_COMPILER = pytest.mark.skipif(inductor.missing() is not None, reason="no C++ compiler")

FLOPS = Flops(matmul_parameters=10**6, heads_times_size=32, windows=(None,))
FAR = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of a loss or norm in 20 steps: sums in another order, in fp32; in bf16 also values
that are not rounded between operators that became one, 2^-8 each."""


def _compiled(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any]) -> tuple[Ran, Ran]:
    train = sections.get("train", {})
    return (
        run_engine(
            rank, folder, f"{name}-plain", "graph", {**sections, "train": {**train, "compile": False}}
        ),
        run_engine(
            rank, folder, f"{name}-compiled", "graph", {**sections, "train": {**train, "compile": True}}
        ),
    )


def _assert_near(plain: Ran, made: Ran, dtype: str) -> None:
    assert any(note.startswith("compiled ") for note in made.notes), made.notes
    for metric in ("loss", "grad_norm"):
        for step, value in plain.metrics[metric].items():
            assert made.metrics[metric][step] == pytest.approx(value, rel=FAR[dtype]), (metric, step)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", FAR)
def test_twenty_compiled_steps(dtype: str, tmp_path: Path) -> None:
    sections = {"strategy": {"precision": {"compute": dtype}}, "train": {"steps": 20}}
    _assert_near(*_compiled(0, 1, tmp_path, dtype, sections), dtype)


@NEEDS_COMPILER
def test_two_compiled_workers(tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {"tensor": 2}, "sequence": True}}
    first, second = run_ranks(_compiled, 2, tmp_path, "tensor", sections, timeout=240.0)
    _assert_near(*first, "float32")
    assert any(note.startswith("compiled ") for note in second[1].notes)


def _one_fails(rank: int, world: int, folder: Path) -> Ran:
    if rank == 1:
        inductor.missing = lambda: "a C++ compiler"
    sections = {"strategy": {"axes": {"shard": 2}}, "train": {"compile": True, "steps": 2}}
    return run_engine(rank, folder, "fails", "graph", sections)


@NEEDS_COMPILER
def test_where_one_rank_cannot_compile_none_does_and_each_says_why(tmp_path: Path) -> None:
    first, second = run_ranks(_one_fails, 2, tmp_path, timeout=240.0)
    assert any("another worker's step cannot be compiled" in note for note in first.notes)
    assert any("a C++ compiler is missing. It runs uncompiled" in note for note in second.notes)
    assert len(first.metrics["loss"]) == 2


def test_a_long_run_is_compiled_unasked(tmp_path: Path) -> None:
    def folder(**train: Any) -> Path | None:
        return artifacts_of(run_config(tmp_path, train=train), FLOPS, "cpu")

    assert folder() is None
    assert folder(compile=True) == tmp_path / "cache" / "compiled"
    assert folder(steps=10**6) == tmp_path / "cache" / "compiled"
    assert folder(steps=10**6, compile=False) is None
