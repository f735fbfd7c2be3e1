"""Runs whose compiled code fails: uncompiled from the same step on, or ended with advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ran, differences, run_engine
from tiny_run import Bigram
from torch import fx, nn

from harness import RanksError, run_ranks
from hyper_parallel.errors import CompileError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.compiled import Compiled, Subgraph, partition, replace
from hyper_parallel.step import graph_cache, program_runner


def _stand_in(fails: Callable[[int, int, int], bool]) -> Callable[[StepGraph, Path], Compiled]:
    """A compiler whose code runs the operators as they are, except that a call fails. `fails`: the number of the
    subgraph, how many there are, and how often it was called before."""

    def compiled(step: StepGraph, _: Path) -> Compiled:
        result = step.copy()
        found = partition(result)
        functions = [_function(subgraph, at, len(found), fails) for at, subgraph in enumerate(found)]
        replace(result, found, [(f"compiled_{at}", one) for at, one in enumerate(functions)])
        return Compiled(result, len(found), len(found), len(found), 1.0, 0.0)

    return compiled


def _function(
    subgraph: Subgraph, at: int, count: int, fails: Callable[[int, int, int], bool]
) -> Callable[..., Sequence[torch.Tensor]]:
    module, calls = fx.GraphModule({}, subgraph.graph()), [0]

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        calls[0] += 1
        if fails(at, count, calls[0] - 1):
            raise AssertionError("wrong number of dimensions\nand more")
        return module(*inputs)

    return run


class _CountsFirst(Bigram):
    """Counts its forward passes in a buffer before anything else, which scales the logits."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input_ids) * (1 + self.calls)


def _both(folder: Path, sections: dict[str, Any], model: Callable[[], nn.Module] | None) -> tuple[Ran, Ran]:
    train = {"steps": 4, **sections.get("train", {})}
    return (
        run_engine(
            0, folder, "plain", "graph", {**sections, "train": {**train, "compile": False}}, model=model
        ),
        run_engine(
            0, folder, "made", "graph", {**sections, "train": {**train, "compile": True}}, model=model
        ),
    )


@pytest.mark.parametrize(
    ("fails", "micro_batch", "step"),
    [
        (lambda at, count, calls: at == 0, 8, 1),
        (lambda at, count, calls: at == count - 1, 8, 1),
        (lambda at, count, calls: at == count - 1, 2, 1),
        (lambda at, count, calls: at == 1 and calls == 3, 8, 4),
        (lambda at, count, calls: at == count // 2 and calls == 5, 2, 2),
    ],
    ids=["forward", "backward", "backward-micro", "later-step", "later-micro"],
)
def test_a_failing_call_begins_its_step_again_uncompiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[int, int, int], bool],
    micro_batch: int,
    step: int,
) -> None:
    monkeypatch.setattr(graph_cache, "compiled", _stand_in(fails))
    plain, made = _both(tmp_path, {"train": {"micro_batch": micro_batch}}, None)
    (warning,) = [note for note in made.notes if "uncompiled" in note]
    assert f"failed in step {step}: AssertionError: wrong number of dimensions. It runs" in warning
    assert "train.compile=false" in warning and "\n" not in warning
    assert differences(made, plain) == {}
    assert len(made.metrics["loss"]) == 4


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_a_step_that_has_changed_a_buffer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch: int
) -> None:
    monkeypatch.setattr(graph_cache, "compiled", _stand_in(lambda at, count, calls: at == count - 1))
    # Its counter makes each micro-batch depend on those before.
    sections = {"train": {"micro_batch": micro_batch}, "strategy": {"check": False}}
    with pytest.raises(CompileError, match=r"changed .*calls by then .* train\.compile=false") as raised:
        _both(tmp_path, sections, _CountsFirst)
    assert "\n" not in str(raised.value)


def test_other_errors_of_a_compiled_step_are_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(at: int, count: int, calls: int) -> bool:
        raise MemoryError("out of memory")

    monkeypatch.setattr(graph_cache, "compiled", _stand_in(full))
    with pytest.raises(Exception, match="out of memory") as raised:
        _both(tmp_path, {}, None)
    assert not isinstance(raised.value, CompileError)


STAGES: dict[str, Any] = {
    "strategy": {"axes": {"pipeline": 2}},
    "train": {"micro_batch": 2, "steps": 3, "compile": True},
}


def _stages(rank: int, world: int, folder: Path) -> tuple[Ran, Ran]:
    plain = {**STAGES, "train": {**STAGES["train"], "compile": False}}
    program_runner.compiled = _stand_in(lambda at, count, calls: False)
    return (
        run_engine(rank, folder, "plain", "graph", plain),
        run_engine(rank, folder, "made", "graph", STAGES),
    )


def test_the_stages_of_a_pipeline_are_compiled(tmp_path: Path) -> None:
    for plain, made in run_ranks(_stages, 2, tmp_path):
        assert any(note.startswith("compiled 100% of the step's operators") for note in made.notes), (
            made.notes
        )
        assert differences(made, plain) == {}


def _stage_fails(rank: int, world: int, folder: Path) -> None:
    program_runner.compiled = _stand_in(lambda at, count, calls: rank == 1 and at == count - 1)
    run_engine(rank, folder, "fails", "graph", STAGES)


def test_a_stage_whose_code_fails_ends_the_run_with_advice(tmp_path: Path) -> None:
    where = r"failed in step 1, stage 1, micro-batch 0, Run\([^)]*\): .*train\.compile=false"
    with pytest.raises(RanksError, match=rf"CompileError: compiled code of .*{where}"):
        run_ranks(_stage_fails, 2, tmp_path)


def _one_fails(rank: int, world: int, folder: Path) -> None:
    graph_cache.compiled = _stand_in(lambda at, count, calls: rank == 1 and at == count - 1)
    sections = {"strategy": {"axes": {"shard": 2}}, "train": {"compile": True, "steps": 2}}
    run_engine(rank, folder, "fails", "graph", sections)


def test_several_workers_end_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"CompileError: compiled code of .*train\.compile=false"):
        run_ranks(_one_fails, 2, tmp_path, timeout=120.0)
