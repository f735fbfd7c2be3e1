"""What cannot be done under `hp.offload` is said, and the model is whole afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import batch_of, model_of
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import BudgetError, CaptureError, HyperParallelError, TierError

BATCH = batch_of()


class Small(nn.Module):
    """Two products, and what a test wants beside them."""

    def __init__(self, also: Callable[[Small, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)
        self.also = also

    def forward(self, x: torch.Tensor) -> Any:
        middle = self.up(x).relu()
        found = self.also(self, middle) if self.also is not None else None
        return {"loss": self.down(middle).square().mean(), "middle": middle.sum(1), "more": found}


def _offloaded(
    also: Callable[[Small, torch.Tensor], Any] | None = None, budget: int | str = "1MiB", **more: Any
) -> Any:
    return hp.offload(Small(also), budget=budget, host="4MiB", **more)


def _x() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def test_what_depends_on_computed_values_is_refused_with_its_line() -> None:
    model = _offloaded(lambda self, middle: middle[: int(middle.sum() > 0)])
    with pytest.raises(CaptureError, match=r"test_eager_refusals\.py:\d+ .*middle.sum\(\) > 0"):
        model(_x())
    hp.release(model)
    model(_x())["loss"].backward()  # the model is what it was


def test_experts_that_loop_over_the_router_are_refused() -> None:
    model: Any = model_of("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match=r"modeling_mixtral\.py"):
        hp.offload(model, budget="1GiB", host="1MiB")(**BATCH)


def _writes_a_buffer_anew(self: Any, middle: torch.Tensor) -> None:
    self.seen = middle.detach().sum()


def test_a_buffer_that_the_forward_pass_replaces_is_refused() -> None:
    model = Small(_writes_a_buffer_anew)
    model.register_buffer("seen", before := torch.zeros(()))
    hp.offload(model, budget="1MiB", host="4MiB")
    with pytest.raises(CaptureError, match="sets its buffer 'seen' to another tensor"):
        model(_x())
    assert model.seen is before


def test_a_result_without_a_way_to_its_tensors_is_refused() -> None:
    with pytest.raises(CaptureError, match="'more' a object"):
        _offloaded(lambda *_: object())(_x())
    model: Any = hp.offload(model_of("llama"), budget="1GiB", host="1MiB")
    with pytest.raises(CaptureError, match="pass use_cache=False"):
        model(**BATCH, use_cache=True)


def test_one_backward_pass_for_each_call() -> None:
    model = _offloaded()
    loss = model(_x())["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(HyperParallelError, match="runs once"):
        loss.backward()
    with pytest.raises(HyperParallelError, match="create_graph=True"):
        model(_x())["loss"].backward(create_graph=True)


def test_a_call_ends_the_one_before() -> None:
    model = _offloaded(budget=220_000)  # 1% above the floor
    first = model(_x())["loss"]
    with torch.no_grad():
        assert torch.equal(model(_x())["loss"], first)
    first.backward()
    kept = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(3):
        loss = model(_x())["loss"]  # with gradients that nobody wants
    other = model(_x())["loss"]
    with pytest.raises(HyperParallelError, match="called again before the backward pass"):
        loss.backward()
    other.backward()
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), kept, strict=True))


def test_gradients_come_back_where_the_plan_expects_them() -> None:
    def run(model: Any) -> list[torch.Tensor | None]:
        out = model(_x())
        (out["loss"] + out["middle"].sum()).backward()
        return [p.grad for p in model.parameters()]

    with pytest.raises(HyperParallelError, match=r"through=\('loss', 'middle',\)"):
        run(_offloaded())
    moved = run(_offloaded(through=("loss", "middle")))
    assert all(torch.equal(a, b) for a, b in zip(moved, run(Small()), strict=True))
    with pytest.raises(CaptureError, match="have a gradient are: loss, middle"):
        run(_offloaded(through=("logits",)))


def test_results_that_are_not_to_be_kept_are_looked_for() -> None:
    model = _offloaded(keep_results=False)
    out = model(_x())
    with pytest.raises(HyperParallelError, match="'middle' is still held"):
        out["loss"].backward()
    loss = out.pop("loss")
    del out
    loss.backward()


@pytest.mark.parametrize("what", ["x", "middle", "weight"])
def test_what_the_backward_pass_needs_may_not_be_changed_meanwhile(what: str) -> None:
    model = _offloaded(through=("loss", "middle"))
    x = _x()
    out = model(x)
    changed = {"x": x, "middle": out["middle"], "weight": model.down.weight}[what]
    with torch.no_grad():
        changed.add_(1)
    total = out["loss"] + out["middle"].sum()
    if what == "middle":  # which its backward pass does not need
        total.backward()
        return
    with pytest.raises(HyperParallelError, match="changed in place"):
        total.backward()


@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("budget", [1_000_000, 220_000])
def test_what_moves_in_the_backward_pass_does_not_lose_a_change(budget: int, how: str) -> None:
    model = _offloaded(budget=budget)
    loss = model(_x())["loss"]
    before = model.up.weight.detach().clone()  # no gradient needs it
    if how == "data":
        model.up.weight.data.add_(1)
    else:
        with torch.no_grad():
            model.up.weight.add_(1)
    if budget == 1_000_000:  # it stays where it is
        loss.backward()
    else:
        what = (
            r"values of parameter\.up\.weight were changed"
            if how == "data"
            else r"parameter\.up\.weight was changed"
        )
        with pytest.raises(HyperParallelError, match=what):
            loss.backward()
    assert torch.equal(model.up.weight, before + 1)


def test_memory_that_is_shared_between_the_passes_is_refused_where_it_moves() -> None:
    for budget in (1_000_000, 220_000):
        model = _offloaded(budget=budget)
        loss = model(_x())["loss"]
        model.share_memory()
        if budget == 1_000_000:
            loss.backward()
        else:
            with pytest.raises(HyperParallelError, match=r"memory of parameter\.\S+ was shared"):
                loss.backward()


def test_a_memory_that_fails_leaves_the_parameters_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _offloaded(budget=220_000)  # 1% above the floor
    x = _x()
    model(x)["loss"].backward()
    model.zero_grad()
    tier = model.forward._plans._tiers["host"]
    loss = model(x)["loss"]
    reads = tier.begin_read

    def fails(slot: int, given: torch.Tensor) -> Any:
        if not all(p.untyped_storage().nbytes() for p in model.parameters()):
            monkeypatch.setattr(tier, "begin_read", reads)
            raise TierError("the memory is gone")
        return reads(slot, given)

    monkeypatch.setattr(tier, "begin_read", fails)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TierError, match="the memory is gone"):
        loss.backward()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    model(x)["loss"].backward()


def test_a_budget_that_cannot_be_met_names_what_dominates() -> None:
    with pytest.raises(BudgetError, match=r"at least [\d,]+ bytes .*down.weight \(gradient, .*larger budget"):
        _offloaded(budget=100)(_x())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"budget": "10GiB"}, "needs a place to go"),
        ({"budget": "ten", "host": "1GiB"}, "'ten' is no number of bytes"),
        ({"budget": 0, "host": "1GiB"}, "is no memory"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], match: str) -> None:
    with pytest.raises(BudgetError, match=match):
        hp.offload(Small(), **given)
    with torch.device("meta"):
        empty = Small()
    with pytest.raises(BudgetError, match="are on meta"):
        hp.offload(empty, budget="1GiB", host="1GiB")


def test_copies_and_release(tmp_path: Path) -> None:
    model: Any = hp.offload(Small(), budget="1MiB", flash=tmp_path)
    model(_x())["loss"].backward()
    other = copy.deepcopy(model)
    assert "HyperOffload" not in type(other.forward).__name__ and other.forward.__self__ is other
    other(_x())["loss"].backward(retain_graph=True)
    with pytest.raises(HyperParallelError, match="state_dict"):
        torch.save(model, tmp_path / "model")
    hp.release(model)
    assert "forward" not in vars(model)
    again: Any = hp.offload(hp.offload(model, budget="1MiB", flash=tmp_path), budget="1MiB", host="1MiB")
    again(_x())["loss"].backward()
    del model, again, other
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
