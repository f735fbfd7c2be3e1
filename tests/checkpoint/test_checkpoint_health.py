"""Checkpoints that are whole and not worth going on from: passed over, pruned apart, and taken by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import save_world

from hyper_parallel.checkpoint import Piece, Writer, newest, of_step, read
from hyper_parallel.checkpoint.verify import (
    LARGEST_FINITE,
    LARGEST_WEIGHT,
    pass_over,
    reason_to_pass_over,
    usable,
)
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh

LAYOUT = Layout.replicated(Mesh(), (4,))


def write(
    folder: Path, step: int, value: float = 0.0, keep: int = 9, largest: float | None = LARGEST_WEIGHT
) -> None:
    values = torch.tensor([0.0, 1.0, value, -1.0])
    bound = {} if largest is None else {"w": largest}
    with Writer(folder, 1, 0, keep=keep) as writer:
        writer.save(step, {"w": Piece(values, LAYOUT), "n": Piece(torch.zeros(4), LAYOUT)}, {}, largest=bound)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -2e19])
def test_values_that_no_step_can_compute_with_are_passed_over(value: float, tmp_path: Path) -> None:
    write(tmp_path, 1, 1e19)
    write(tmp_path, 2, value)
    found = newest(tmp_path)
    assert found is not None and found.step == 1
    ((path, reason),) = found.skipped
    assert (
        path.name == "step-00000002"
        and reason.startswith("ruined: not finite, or beyond")
        and reason.endswith(": w")
    )
    chosen = of_step(tmp_path, 2)
    got = torch.zeros(4)
    read(chosen.path, {"w": Piece(got, LAYOUT), "n": Piece(torch.ones(4), LAYOUT)})
    torch.testing.assert_close(got[2], torch.tensor(value), equal_nan=True)


def test_values_that_nobody_judges_may_be_anything(tmp_path: Path) -> None:
    write(tmp_path, 1, -math.inf, largest=None)
    write(tmp_path, 2, 1e38, largest=LARGEST_FINITE)
    found = newest(tmp_path)
    assert found is not None and found.step == 2 and reason_to_pass_over(tmp_path / "step-00000001") is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_usable(dtype: torch.dtype) -> None:
    assert usable(torch.tensor([1.0, -2.0], dtype=dtype), LARGEST_WEIGHT)
    assert not usable(torch.tensor([1.0, math.nan, 2.0], dtype=dtype), LARGEST_WEIGHT)
    assert usable(torch.empty(0, dtype=dtype), LARGEST_WEIGHT)


def test_pruning_keeps_a_healthy_one_and_few_ruined_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    for step in range(4, 9):
        write(tmp_path, step, math.nan, keep=2)
    assert steps(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 7, 8)]
    pass_over(tmp_path / "step-00000003", "as told")
    write(tmp_path, 9, keep=2)
    found = newest(tmp_path)
    assert found is not None and found.step == 9
    assert steps(tmp_path) == [f"step-0000000{step}" for step in (2, 7, 8, 9)]


def test_where_all_are_ruined_none_is_taken_but_by_name(tmp_path: Path) -> None:
    write(tmp_path, 1, math.nan)
    with pytest.raises(
        CheckpointError, match=r"can be loaded \(step-00000001: ruined: .*checkpoint\.resume_from"
    ):
        newest(tmp_path)
    assert of_step(tmp_path, 1).step == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 2; there are those of 1"):
        of_step(tmp_path, 2)
    data = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"step 1 .* cannot|of step 1 in .* can be loaded: rank-00000.safetensors"
    ):
        of_step(tmp_path, 1)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"why": "x"}\n', b"[" * 100_000])
def test_a_damaged_verdict_passes_the_checkpoint_over(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-00000001" / "verdict.json").write_bytes(content)
    assert str(reason_to_pass_over(tmp_path / "step-00000001")).startswith("verdict.json: ")


def test_one_ranks_part_is_enough(tmp_path: Path) -> None:
    mesh = Mesh(("shard", 2))
    layouts = {"w": Layout(mesh, (8, 4), (("shard",), ()))}
    save_world(tmp_path, {"w": torch.ones(8, 4)}, layouts, mesh, 1, {}, largest={"w": 2.0})
    whole = torch.ones(8, 4)
    whole[7, 3] = math.inf
    save_world(tmp_path, {"w": whole}, layouts, mesh, 2, {}, largest={"w": 2.0})
    found = newest(tmp_path)
    assert found is not None and found.step == 1
