"""Runs whose graphs are compiled: how far their numbers are from uncompiled ones, and what happens where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Ran, run_engine
from tiny_run import run_config

from harness import run_ranks
from hyper_parallel.compat import inductor
from hyper_parallel.errors import CompileError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.compiled import Compiled
from hyper_parallel.step import graph_cache
from hyper_parallel.step.build import artifacts_of
from hyper_parallel.workload import Flops

NEEDS_COMPILER = pytest.mark.skipif(inductor.missing() is not None, reason="no C++ compiler")

FLOPS = Flops(matmul_parameters=10**6, heads_times_size=32, windows=(None,))
FAR = {"float32": 1e-4, "bfloat16": 1e-3}
"""Largest relative difference of each loss in 20 steps, and of the first gradient norm: sums in another order, in fp32;
in bf16 also values that are not rounded (2^-8 each, both ways) between operators that became one. Later norms are of
other parameters, and differ more than the losses do."""


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
    losses, norms = plain.metrics["loss"], plain.metrics["grad_norm"]
    assert len(losses) == 20
    assert made.metrics["loss"] == pytest.approx(losses, rel=FAR[dtype])
    assert made.metrics["grad_norm"][1] == pytest.approx(norms[1], rel=FAR[dtype])


@pytest.mark.matrix
@NEEDS_COMPILER
def test_twenty_compiled_steps_in_bf16(tmp_path: Path) -> None:
    sections = {"strategy": {"precision": {"compute": "bfloat16"}}}
    _assert_near(*_compiled(0, 1, tmp_path, "bf16", sections), "bfloat16")


@pytest.mark.matrix
@NEEDS_COMPILER
def test_twenty_compiled_steps_of_two_workers(tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {"tensor": 2}, "sequence": True}}
    first, second = run_ranks(_compiled, 2, tmp_path, "tensor", sections, timeout=240.0)
    _assert_near(*first, "float32")
    assert any(note.startswith("compiled ") for note in second[1].notes)


@pytest.mark.matrix
@NEEDS_COMPILER
def test_twenty_compiled_steps_of_a_pipeline(tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {"pipeline": 2}}, "train": {"micro_batch": 2}}
    first, second = run_ranks(_compiled, 2, tmp_path, "pipeline", sections, timeout=240.0)
    _assert_near(*first, "float32")
    assert any(note.startswith("compiled ") for note in second[1].notes)


def _one_fails(rank: int, world: int, folder: Path) -> Ran:
    def stand_in(step: StepGraph, _: Path) -> Compiled:
        if rank == 1:
            raise CompileError("a C++ compiler is missing")
        return Compiled(step, subgraphs=1, artifacts=1, made=1, share=1.0, seconds=0.0)

    graph_cache.compiled = stand_in
    sections = {"strategy": {"axes": {"shard": 2}}, "train": {"compile": True, "steps": 2}}
    return run_engine(rank, folder, "fails", "graph", sections)


def test_where_one_rank_cannot_compile_none_does_and_each_says_why(tmp_path: Path) -> None:
    first, second = run_ranks(_one_fails, 2, tmp_path, timeout=120.0)
    assert any("another worker's step cannot be compiled" in note for note in first.notes)
    assert any("a C++ compiler is missing. It runs uncompiled" in note for note in second.notes)
    assert len(first.metrics["loss"]) == 2


def test_auto_compiles_long_runs(tmp_path: Path) -> None:
    def folder(**train: Any) -> Path | None:
        return artifacts_of(run_config(tmp_path, train=train), FLOPS, "cpu")

    assert folder() is None
    assert folder(steps=10**6) is None
    assert folder(compile=True) == tmp_path / "cache" / "compiled"
    assert folder(steps=10**6, compile="auto") == tmp_path / "cache" / "compiled"
    assert folder(compile="auto") is None
