"""Saved under one strategy and loaded under another: the same values, moments, settings and losses; damage is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spread_steps import backward, groups, spread, tiny, whole
from transformers import AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel.checkpoint import export
from hyper_parallel.checkpoint.file_format import seal
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration.checkpoints import (
    committed,
    load,
    newest,
    refuse_damaged,
    save,
    write_manifest,
)
from hyper_parallel.integration.local_optimizer import find_twins, on_local
from hyper_parallel.shard import ShardedModel

STEPS, SAVED = 6, 3
SHARD = {"axes": {"shard": 2}}
TENSOR = {"axes": {"tensor": 2}, "sequence": True}


def made(handle: ShardedModel, **settings: Any) -> Any:
    optimizer = torch.optim.AdamW(groups(handle.model), lr=0.01, betas=(0.8, 0.9), **settings)
    on_local(optimizer, handle)
    return optimizer


def train(handle: ShardedModel, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(handle, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def moments(handle: ShardedModel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every moment, gathered, and the counts of updates. A collective."""
    inner, twins = find_twins(optimizer)
    assert twins is not None
    found = {}
    for twin in twins:
        state = inner.state[twin.tensor]
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {twin.name}"] = handle.gather(state[key], twin.layout).clone()
        found[f"step {twin.name}"] = state["step"].clone()
    return found


def write_checkpoint(folder: Path, handle: ShardedModel, optimizer: Any, step: int) -> None:
    """As a Trainer does: its own state last."""
    model: Any = handle.model
    save(
        folder,
        handle,
        optimizer,
        step,
        {"model_config": json.loads(model.config.to_json_string(use_diff=False))},
    )
    if handle.rank == 0:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if handle.mesh.world > 1:
        torch.distributed.barrier()


def saving(rank: int, world: int, folder: Path) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    handle = spread(SHARD)
    optimizer = made(handle, fused=True)
    optimizer.param_groups[0]["lr"] = 0.02
    losses = train(handle, optimizer, range(SAVED))
    with torch.no_grad():  # an evaluation, which leaves gathered parameters behind
        handle.model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    write_checkpoint(folder, handle, optimizer, SAVED)
    values, state = whole(handle), moments(handle, optimizer)
    return losses + train(handle, optimizer, range(SAVED, STEPS)), values, state


def resuming(rank: int, world: int, folder: Path, declared: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(99)
    handle = spread(declared)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.local.fill_(0.5)
    optimizer = made(handle)
    load(folder, handle, optimizer)
    values, state = whole(handle), moments(handle, optimizer)
    rates = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
    return train(handle, optimizer, range(SAVED, STEPS)), values, state, rates


def test_training_goes_on_under_another_strategy_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    folder = tmp_path / f"checkpoint-{SAVED}"
    uninterrupted, values, state = run_ranks(saving, 2, folder)[0]
    for got in (run_ranks(resuming, 2, folder, TENSOR)[1], resuming(0, 1, folder, {})):
        losses, its_values, its_state, settings = got
        assert losses == pytest.approx(uninterrupted[SAVED:], abs=1e-5)
        for expected, found in ((values, its_values), (state, its_state)):
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
        assert settings == [(0.02, (0.8, 0.9), 0.1), (0.01, (0.8, 0.9), 0.0)]
    plain = AutoModelForCausalLM.from_pretrained(export(committed(folder), tmp_path / "plain"))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, values[name]), name


def alone(folder: Path, step: int) -> tuple[ShardedModel, Any]:
    handle = spread({})
    optimizer = made(handle)
    train(handle, optimizer, range(1))
    write_checkpoint(folder / f"checkpoint-{step}", handle, optimizer, step)
    return handle, optimizer


def test_the_newest_whole_checkpoint_is_found_and_the_others_are_named(tmp_path: Path) -> None:
    assert newest(tmp_path / "none", spread({})).path is None
    handle, optimizer = alone(tmp_path, 2)
    for step in (4, 6, 8, 10):
        alone(tmp_path, step)
    data = committed(tmp_path / "checkpoint-10") / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_')
    committed(tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-4" / "elsewhere")
    found = newest(tmp_path, handle)
    assert found.path == tmp_path / "checkpoint-2"
    assert [path.name for path, _ in found.skipped] == [f"checkpoint-{step}" for step in (10, 8, 6, 4)]
    assert [reason.partition(":")[0] for _, reason in found.skipped] == [
        "rank-00000.safetensors",
        "trainer_state.json, which is written last, is missing",
        "trainer_state.json cannot be read",
        "the step-… folder with weights and optimizer is missing",
    ]
    for step in (8, 6, 4):
        with pytest.raises(CheckpointError, match=rf"checkpoint-{step} cannot be resumed: .*; give another"):
            refuse_damaged(tmp_path / f"checkpoint-{step}", handle)
    with pytest.raises(CheckpointError, match="sha256 of bytes"):
        load(tmp_path / "checkpoint-10", handle, optimizer)
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded"):
        newest(tmp_path, handle)


def test_a_schedule_that_is_not_what_was_written_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "scheduler.pt").write_bytes(b"as it was")
    handle, _ = alone(tmp_path, 2)
    assert newest(tmp_path, handle).path == folder
    (folder / "scheduler.pt").write_bytes(b"as it is")
    with pytest.raises(CheckpointError, match=r"scheduler\.pt: sha256 differs"):
        refuse_damaged(folder, handle)


def test_every_file_beside_ours_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    handle, _ = alone(tmp_path, 2)
    kept = {
        "rng_state.pth": b"random",
        "scheduler.pt": b"schedule",
        "training_args.bin": b"",
        "more/vocab.txt": b"a",
    }
    for name, content in kept.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder)
    assert newest(tmp_path, handle).path == folder
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for damaged in (
            content[:-1] if content else b"x",
            content + b"x",
            bytes([*content[:-1], content[-1] ^ 1]) if content else b"y",
            None,
        ):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            gone = damaged is None and path.name in ("verified.json", ".writer.lock")
            if path.name == ".writer.lock" or gone:
                assert newest(tmp_path, handle).path == folder
            else:
                with pytest.raises(CheckpointError, match="can be loaded"):
                    newest(tmp_path, handle)
        path.write_bytes(content)
    assert newest(tmp_path, handle).path == folder


@pytest.mark.parametrize("name", ["/etc/hostname", "../checkpoint-2/trainer_state.json"])
def test_a_manifest_names_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    handle, _ = alone(tmp_path, 2)
    forged = {"format": "hyper-parallel manifest", "files": {name: {"bytes": 0, "sha256": ""}}}
    (tmp_path / "checkpoint-2" / "verified.json").write_bytes(seal(forged))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        newest(tmp_path, handle)


def test_another_optimizer_or_other_parameters_are_refused(tmp_path: Path) -> None:
    handle, optimizer = alone(tmp_path, 2)
    folder = tmp_path / "checkpoint-2"
    other = torch.optim.SGD(handle.model.parameters(), lr=0.1)
    on_local(other, handle)
    with pytest.raises(CheckpointError, match="the state of AdamW, and this run has SGD"):
        load(folder, handle, other)
    frozen = tiny()
    frozen.model.norm.weight.requires_grad_(False)
    fewer = spread({}, frozen)
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg\.model\.norm\.weight.*no place"):
        load(folder, fewer, made(fewer))
    save(folder, handle, None, 3, {})
    with pytest.raises(CheckpointError, match="holds no optimizer's state"):
        load(folder, handle, optimizer)


def few_rows(rank: int, world: int, folder: Path) -> tuple[int, dict[str, Any]]:
    """Three rows over four ranks: the last holds none, and the second got no gradient. They have no state of it."""
    handle = spread({"axes": {"shard": world}}, torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(handle.model.parameters(), lr=0.1)
    on_local(optimizer, handle)
    handle.model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        handle.parameters()[0].parameter.grad = None
    optimizer.step()
    count = len(optimizer.state)
    save(folder, handle, optimizer, 1, {})
    again = torch.optim.AdamW(handle.model.parameters(), lr=0.1)
    on_local(again, handle)
    load(folder, handle, again)
    _, twins = find_twins(again)
    assert twins is not None
    return count, {t.name: handle.gather(again.state[t.tensor]["exp_avg"], t.layout) for t in twins}


def test_a_rank_without_state_of_a_parameter_saves_and_loads_with_the_others(tmp_path: Path) -> None:
    by_rank = run_ranks(few_rows, 4, tmp_path)
    assert [count for count, _ in by_rank] == [2, 1, 2, 0]
    for _, averages in by_rank:
        torch.testing.assert_close(averages["weight"], torch.tensor([[0.8], [0.0], [0.8]]).expand(3, 4))
