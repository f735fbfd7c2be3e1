"""A capture is held against the model's own passes before it is used; what they depend on beside tensors is noticed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Observer, at_the_floor, batch_of, model_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.errors import CaptureError


class Block(nn.Module):
    """A residual block with dropout, computed again in the backward pass by PyTorch's own checkpoint."""

    def __init__(self, p: float = 0.5, again: bool = True) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(p), nn.Linear(64, 16)
        self.again = again

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(x).relu()))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


class Stack(nn.Module):
    """Blocks, and what a test does between them."""

    def __init__(
        self, also: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, p: float = 0.5, again: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(p, again) for _ in range(3))
        self.also = also

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = self.also(block(x))
        return x.square().mean()


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))


def _run(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses, gradients and the random state after some steps."""
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        loss = model(_x(step))
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters()), torch.get_rng_state()]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_recomputation_draws_the_mask_of_the_first_time() -> None:
    moved, _ = at_the_floor(Stack, _run, host="1MiB")
    assert _same(moved, _run(Stack()))
    unchecked = hp.offload(Stack(), budget="1MiB", host="1MiB", check=False)
    assert _same(_run(unchecked), moved)


def test_code_of_ones_own_may_read_and_set_the_random_state() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        first = nn.functional.dropout(x, 0.3)
        torch.set_rng_state(before)
        with torch.random.fork_rng():
            first = first + nn.functional.dropout(x, 0.3)
        return first + nn.functional.dropout(x, 0.3)

    moved = hp.offload(Stack(twice), budget="1MiB", host="1MiB")
    assert _same(_run(moved), _run(Stack(twice)))


def _counting(most: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Times 1 the first time, 2 the second, …; `most` at most. There are three blocks."""
    count = itertools.count(3)
    return lambda x: x * min(next(count) // 3, most)


_STATE = torch.get_rng_state()


@pytest.mark.parametrize(
    ("also", "match"),
    [
        (lambda x: (torch.manual_seed(3), nn.functional.dropout(x, 0.3))[1], "calls torch.manual_seed"),
        (
            lambda x: (torch.default_generator.manual_seed(3), nn.functional.dropout(x, 0.3))[1],
            "sets the state of PyTorch's random generator",
        ),
        (lambda x: (torch.set_rng_state(_STATE), x)[1], "read outside of it"),
        (lambda x: x * random.random(), "draws random numbers of Python's"),
        (_counting(2), "uses .*count, a count of Python's"),
        (lambda x: x * (1 + time.perf_counter()), "differ from one run to the next"),
    ],
    ids=["seeds", "generator", "state", "python", "counter", "clock"],
)
def test_what_a_graph_would_not_do_again_is_refused(also: Callable[..., torch.Tensor], match: str) -> None:
    model = hp.offload(Stack(also), budget="1MiB", host="1MiB")
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=match):
        model(_x())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.forward.notes or not any(model.forward._plans._known.values())


def test_a_generator_that_is_seeded_again_is_refused() -> None:
    own = torch.Generator()

    def drawn(x: torch.Tensor) -> torch.Tensor:
        own.manual_seed(5)
        return x + torch.rand(x.shape, generator=own)

    with pytest.raises(CaptureError, match="do not give as a graph"):
        hp.offload(Stack(drawn), budget="1MiB", host="1MiB")(_x())

    own.manual_seed(5)
    model = hp.offload(Stack(lambda x: x + torch.rand(x.shape, generator=own)), budget="1MiB", host="1MiB")
    moved = _run(model)
    own.manual_seed(5)
    assert _same(moved, _run(Stack(lambda x: x + torch.rand(x.shape, generator=own))))


def test_no_check_goes_on_with_what_was_captured() -> None:
    model = hp.offload(Stack(lambda x: x * (1 + time.time())), budget="1MiB", host="1MiB", check=False)
    model(_x()).backward()


def test_the_check_keeps_within_the_budget_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.offloading.autograd import check_capture

    peaks = []

    def observed(self: Any, *args: Any) -> Any:
        state = [*self._model.parameters(), *self._model.buffers()]
        with Observer([*state, *self._call.tensors]) as observer:
            found = own(self, *args)
        peaks.append((observer.peak, self._ready.budget))
        return found

    own = check_capture.Check.run
    monkeypatch.setattr(check_capture.Check, "run", observed)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = torch.relu_(self.norm(layer(x)))
            return x.square().mean()

    def run(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(torch.ones(512, 64)).backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    moved, budget = at_the_floor(Normed, run, host="16MiB")
    assert _same(moved, run(Normed()))
    assert peaks
    assert all(peak <= most for peak, most in peaks), peaks
    free = sum(p.numel() * 4 for p in Normed().parameters()) + 17 * 512 * 64 * 4
    assert budget < 0.6 * free  # paging had something to do


def test_too_little_memory_beside_the_device_for_the_check_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = hp.offload(model_of("llama"), budget=1_780_000, host="16KiB")
    model(**batch_of(16)).loss.backward()
    assert "was not checked against the model's own passes" in caplog.text


def test_settings_and_hooks_that_change_have_plans_of_their_own() -> None:
    def steps(model: nn.Module) -> list[torch.Tensor]:
        found = _run(model)
        model.blocks[1].drop.p = 0.0
        found += _run(model)
        hook = model.blocks[0].down.register_forward_hook(lambda *given: 2 * given[-1])
        found += _run(model)
        hook.remove()
        return found + _run(model)

    moved = hp.offload(Stack(again=False), budget="1MiB", host="1MiB")
    assert _same(steps(moved), steps(Stack(again=False)))
    assert len(moved.forward.notes) == 4  # the first one without gradients of before, too


def test_a_counter_of_the_models_own_does_not_make_each_call_another() -> None:
    class Counts(Stack):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    model = hp.offload(Counts(), budget="1MiB", host="1MiB")
    assert _same(_run(model, 4), _run(Counts(), 4))
    assert len(model.forward.notes) == 2


@pytest.mark.parametrize("how", ["loaded", "stepped", "loaded later"])
def test_state_that_an_optimizer_has_already_counts(how: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            model(_x(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = Stack()
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps(model, before)
    optimizer = before
    if how != "stepped":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = before.state_dict()
        del before
        if how == "loaded":
            optimizer.load_state_dict(state)
    moved: Any = hp.offload(model, budget="1MiB", host="1MiB")
    if how == "loaded later":
        moved(_x()).backward()
        moved.zero_grad()
        optimizer.load_state_dict(state)
        del state
    moved(_x()).backward()
    [*_, ready] = (ready for known in moved.forward._plans._known.values() for ready in known)
    held = sum(x.untyped_storage().nbytes() for s in optimizer.state.values() for x in s.values())
    assert ready.held["the optimizer's state"] == held


def test_torch_compile_leaves_the_passes_to_their_graph() -> None:
    model = hp.offload(Stack(), budget="1MiB", host="1MiB")
    compiled: Any = torch.compile(model, backend="eager")
    assert _same(_run(compiled), _run(Stack()))
