"""A pipeline in a loop of the user's own, on real workers: gradients, values and losses of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hyper_parallel as hp
from harness import run_ranks
from harness.equivalence import build_model
from harness.pipeline_steps import settings_of
from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.integration.checkpoints import load, save
from hyper_parallel.integration.hf_folder import read_folder, write_folder
from hyper_parallel.integration.local_optimizer import on_local

TOLERANCE = 1e-5
SHAPES = ((8, 16), (8, 24), (8, 16), (12, 16))
"""Rows and positions of each step: lengths and numbers of micro-batches change."""


def _model(family: str = "llama-tied", layers: int = 4) -> Any:
    """The same values each time."""
    return build_model(settings_of(family, layers), "cpu").train()


def _rows(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a step, their shifted labels and their positions; each row bears loss at another number of positions,
    and in the last step rows hold two documents."""
    rows, length = SHAPES[step % len(SHAPES)]
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(64, (rows, length + 1), generator=generator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    for row in range(rows):
        labels[row, : row % 5 * 2] = -100
    positions = torch.arange(length).repeat(rows, 1)
    if step == 3:
        positions[:, 7:] -= 7
    return ids, labels, positions


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


Steps = list[dict[str, Any]]
"""Of each step: loss, norm, held-out loss, gradients and values by name."""


def _plain(steps: int, family: str = "llama-tied") -> Steps:
    """The steps of Transformers' model in one process, without anything of HyperParallel's."""
    model = _model(family)
    optimizer = _optimizer(list(model.parameters()))
    found = []
    for step in range(steps):
        ids, labels, positions = _rows(step)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            held = cross_entropy(logits.flatten(0, 1), labels.flatten())
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(
            {
                "loss": float(loss.detach()),
                "norm": float(norm),
                "held": float(held),
                "gradients": gradients,
                "values": values,
            }
        )
    return found


def _piped(axes: dict[str, int], family: str = "llama-tied") -> tuple[Any, Any]:
    model = _model(family)
    strategy = hp.Strategy(axes=axes, check=False)
    pipeline = hp.pipeline(model, strategy, rows=1, length=16, micro_batches=8 // strategy.axes.data)
    return model, pipeline


def _mine(handle: Any, whole: Tensor) -> Tensor:
    data = handle.strategy.axes.data
    return whole.chunk(data)[handle.data_index]


def _step(pipeline: Any, optimizer: Any, step: int, halves: bool = False) -> dict[str, Any]:
    """One step; gradients and values are those of the parameters that this rank holds."""
    handle = pipeline.handle
    mine = [_mine(handle, one) for one in _rows(step)]
    if halves:
        tokens = float((_rows(step)[1] != -100).sum())
        parts = zip(*(one.chunk(2) for one in mine), strict=True)
        loss = sum(pipeline.forward_backward(*part, step=step, tokens=tokens) for part in parts)
    else:
        loss = pipeline.forward_backward(*mine, step=step)
    owned = handle.owned()
    gradients = {p.name: handle.gather(p.grad, p.layout).clone() for p in owned}
    norm = handle.grad_norm()
    handle.clip(norm, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    held = pipeline.evaluate(*mine)
    values = {p.name: handle.gather(p.local, p.layout).clone() for p in owned}
    return {
        "loss": float(loss),
        "norm": float(norm),
        "held": float(held),
        "gradients": gradients,
        "values": values,
    }


def _train(rank: int, world: int, axes: dict[str, int], steps: Sequence[int], halves: bool = False) -> Steps:
    _, pipeline = _piped(axes)
    optimizer = _optimizer([one.parameter for one in pipeline.handle.owned()])
    return [_step(pipeline, optimizer, step, halves) for step in steps]


def _judge(plain: Steps, ranks: list[Steps]) -> None:
    for step, one in enumerate(plain):
        seen: set[str] = set()
        for found in (steps[step] for steps in ranks):
            for key in ("loss", "norm", "held"):
                assert found[key] == pytest.approx(one[key], rel=TOLERANCE), (step, key)
            for what in ("gradients", "values"):
                for name, value in found[what].items():
                    like = one[what][name]
                    error = float((value - like).abs().max() / like.abs().max())
                    assert error < TOLERANCE, (step, what, name, error)
            seen |= found["values"].keys()
        assert seen == one["values"].keys()
        assert len({found["loss"] for found in (steps[step] for steps in ranks)}) == 1


@pytest.fixture(scope="module")
def plain() -> Steps:
    return _plain(4)


# Steps of stages alone are compared where they are saved between two of them.
@pytest.mark.parametrize(
    ("axes", "steps"), [({"pipeline": 2, "shard": 2}, 2), ({"pipeline": 2, "tensor": 2}, 1)]
)
def test_steps_are_those_of_one_device(plain: Steps, axes: dict[str, int], steps: int) -> None:
    world = hp.Strategy(axes=axes).axes.world
    _judge(plain[:steps], run_ranks(_train, world, axes, range(steps), timeout=240))


class _Tempered(nn.Module):
    """The last norm, whose output is scaled in evaluation alone."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        return self.norm(x) if self.training else self.norm(x) * scale


def _tempered() -> Any:
    model = _model()
    model.model.norm = _Tempered(model.model.norm)
    return model


def _evaluated(rank: int, world: int) -> float:
    strategy = hp.Strategy(axes={"pipeline": 2}, check=False)
    pipeline = hp.pipeline(_tempered(), strategy, rows=1, length=16, micro_batches=8)
    pipeline.forward_backward(*_rows(0), step=0)
    return float(pipeline.evaluate(*_rows(0)))


def test_a_buffer_that_evaluation_alone_uses() -> None:
    model = _tempered().eval()
    ids, labels, positions = _rows(0)
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        held = float(cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert run_ranks(_evaluated, 2, timeout=240) == pytest.approx([held, held], rel=TOLERANCE)


def test_rows_that_fill_no_micro_batch_are_evaluated() -> None:
    """Copies that fill the last micro-batch up bear no loss."""
    model, (ids, labels, positions) = _model(), _rows(0)
    pipeline = hp.pipeline(_model(), hp.Strategy(check=False), rows=3, length=16, micro_batches=1)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
        held = float(cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert float(pipeline.evaluate(ids, labels, positions)) == pytest.approx(held, rel=TOLERANCE)
    with pytest.raises(HyperParallelError, match="give each rank a multiple of 3 rows"):
        pipeline.forward_backward(ids, labels)


def test_one_stage_takes_the_same_calls(plain: Steps) -> None:
    _judge(plain, [_train(0, 1, {}, range(4))])


def test_gradients_of_several_calls_are_added(plain: Steps) -> None:
    _judge(plain[:1], run_ranks(_train, 2, {"pipeline": 2}, [0], True))


# Checkpoints.


def _save(rank: int, world: int, axes: dict[str, int], folder: str) -> Steps:
    """Two steps, a checkpoint and a Hugging Face folder, two more steps."""
    model, pipeline = _piped(axes)
    optimizer = _optimizer(list(model.parameters()))
    on_local(optimizer, pipeline.handle)
    found = [_step(pipeline, optimizer, step) for step in range(2)]
    config = {"model_config": model.config.to_dict()}
    save(Path(folder) / "checkpoint", pipeline.handle, optimizer, 2, config)
    write_folder(pipeline.handle, Path(folder) / "whole")
    return found + [_step(pipeline, optimizer, step) for step in range(2, 4)]


def _resume(rank: int, world: int, axes: dict[str, int], folder: str) -> Steps:
    """Two more steps from the checkpoint, then the values of the folder."""
    model, pipeline = _piped(axes)
    with torch.no_grad():
        for one in pipeline.handle.owned():
            one.parameter.zero_()
    optimizer = _optimizer(list(model.parameters()))
    on_local(optimizer, pipeline.handle)
    load(Path(folder) / "checkpoint", pipeline.handle, optimizer)
    found = [_step(pipeline, optimizer, step) for step in (2, 3)]
    read_folder(pipeline.handle, Path(folder) / "whole")
    handle = pipeline.handle
    whole = {p.name: handle.gather(p.local, p.layout).clone() for p in handle.owned()}
    return [*found, {"values": whole}]


def test_checkpoints_are_taken_up_by_other_stages(plain: Steps, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _judge(plain, run_ranks(_save, 2, {"pipeline": 2}, str(tmp_path), timeout=240))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, value in whole.named_parameters():
        assert torch.allclose(value, plain[1]["values"][name], atol=1e-6), name
    for axes in ({"pipeline": 4}, {"shard": 2, "pipeline": 2}):
        ranks = run_ranks(_resume, 4, axes, str(tmp_path), timeout=240)
        _judge(plain[2:], [steps[:2] for steps in ranks])
        for steps in ranks:
            for name, value in steps[2]["values"].items():
                assert torch.allclose(value, plain[1]["values"][name], atol=1e-6), name
    alone = _resume(0, 1, {}, str(tmp_path))
    _judge(plain[2:], [alone[:2]])


# Bad input.


def _refused(rank: int, world: int) -> list[str]:
    model, pipeline = _piped({"pipeline": 2})
    ids, labels = (one[:4] for one in _rows(0)[:2])
    none = torch.full_like(labels, -100)
    uneven = ids[: 2 + rank], labels[: 2 + rank]
    two = hp.pipeline(
        _model(), hp.Strategy(axes={"pipeline": 2}, check=False), rows=2, length=16, micro_batches=4
    )
    calls: list[Callable[[], Any]] = [
        lambda: model(input_ids=ids),
        lambda: model.forward(input_ids=ids),
        lambda: pipeline.forward_backward(ids[:1], labels[:1]),
        lambda: two.forward_backward(ids[:3], labels[:3]),
        lambda: pipeline.forward_backward(ids, labels[:, :4]),
        lambda: pipeline.forward_backward(ids, none),
        lambda: pipeline.forward_backward(*uneven),
        lambda: pipeline.forward_backward(ids[: 4 - rank * 3], labels[: 4 - rank * 3]),
        lambda: hp.parallelize(_model(), hp.Strategy(axes={"pipeline": 2})),
        lambda: hp.pipeline(_model(), hp.Strategy(axes={"pipeline": 4}), rows=1, length=16, micro_batches=8),
        lambda: hp.pipeline(
            _model(),
            hp.Strategy(axes={"pipeline": 2}, memory={"device": "1GiB", "host": "1GiB"}),
            rows=1,
            length=16,
            micro_batches=8,
        ),
        lambda: hp.pipeline(_model(), hp.Strategy(axes={"pipeline": 2}), rows=1, length=16, micro_batches=1),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("nothing was refused")
        except HyperParallelError as error:
            found.append(str(error))
        dist.barrier()
    # What was refused has changed nothing.
    loss = pipeline.forward_backward(ids, labels)
    return [*found, f"{float(loss):.3f}"]


def test_wrong_input_is_refused_with_its_mend() -> None:
    first, second = run_ranks(_refused, 2, timeout=240)
    assert first[-1] == second[-1] and float(first[-1]) > 1
    expected = [
        "give the rows of a step to forward_backward",
        "give the rows of a step to forward_backward",
        "give each rank at least 2 rows",
        "give each rank a multiple of 2 rows",
        "rows are tensors [B, S] of one shape; got input_ids [4, 16], labels [4, 4]",
        "check that labels are not all -100",
        "give every rank as many rows, padded to one length",
        "",
        "call hp.pipeline(model, strategy, rows=…, length=…, micro_batches=…)",
        "torchrun --nproc-per-node 4",
        "call hp.step(model, strategy, ...)",
        "1 micro-batches keep at most 1 of 2 ranks busy",
    ]
    for found in (first, second):
        for text, one in zip(expected, found, strict=False):
            assert text in one and "\n" not in one, one
    assert first[7] == "the rows of another rank cannot be computed; its own error says why"
    assert "give each rank at least 2 rows" in second[7]


@pytest.mark.parametrize("name", ["rows", "length", "micro_batches"])
def test_a_shape_of_nothing_is_refused(name: str) -> None:
    shape = {"rows": 1, "length": 16, "micro_batches": 2, name: 0}
    with pytest.raises(StrategyError, match=f"{name} must be at least 1; got 0"):
        hp.pipeline(_model(), hp.Strategy(axes={"pipeline": 2}), **shape)
