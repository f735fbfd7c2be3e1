"""Guards see each change of the Python state that a forward pass may read, and not what it does not read."""

from __future__ import annotations

import array
import gc
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyper_parallel as hp
from hyper_parallel.errors import CaptureError, HyperParallelError
from hyper_parallel.offloading.autograd.python_state import PythonState

FACTORS = {"by": 1.0}
LOCAL = threading.local()
ARRAY = array.array("d", [1.0])
_READ_ONLY = {"by": 1.0}
VIEW = types.MappingProxyType(_READ_ONLY)


class Inner(nn.Module):
    """A module whose class has a setting."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * getattr(self, "late", 1.0)


class Reads(nn.Module):
    """Reads settings from many places."""

    def __init__(self, closure: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.layers = Inner(), nn.ModuleList([nn.Linear(4, 4)])
        self.rates, self.by, self.flags = [0.0, 1.0], {"a": {"b": 1.0}}, {"on"}
        self.config: Any = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))
        self.closure, self.unread = closure, 1.0
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.closure(x)) * self.rates[1] * self.by["a"]["b"] * self.config.inner.factor
        x = x * FACTORS["by"] * LOCAL.by * ARRAY[0] * VIEW["by"] * float(os.environ.get("HP_TEST_SCALE", "1"))
        for layer in self.layers:
            x = layer(x)
        return x * self.table if "on" in self.flags else x


def reads() -> tuple[Reads, Callable[[float], None]]:
    """The module, and what changes the number in its closure."""
    by = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * by

    def change(value: float) -> None:
        nonlocal by
        by = value

    FACTORS["by"] = LOCAL.by = ARRAY[0] = _READ_ONLY["by"] = Inner.scale = 1.0
    return Reads(scaled), change


CHANGES: dict[str, Callable[[Reads], Any]] = {
    "list": lambda m: m.rates.__setitem__(1, 2.0),
    "dict in a dict": lambda m: m.by["a"].update(b=2.0),
    "config in a config": lambda m: setattr(m.config.inner, "factor", 2.0),
    "config": lambda m: setattr(m, "config", types.SimpleNamespace(inner=types.SimpleNamespace(factor=2.0))),
    "set": lambda m: m.flags.clear(),
    "type": lambda m: m.rates.__setitem__(1, 1),
    "sign of zero": lambda m: m.rates.__setitem__(0, -0.0),
    "global": lambda m: FACTORS.update(by=2.0),
    "thread": lambda m: setattr(LOCAL, "by", 2.0),
    "array": lambda m: ARRAY.__setitem__(0, 2.0),
    "mapping": lambda m: _READ_ONLY.update(by=2.0),
    "class": lambda m: setattr(Inner, "scale", 2.0),
    "attribute before the class": lambda m: setattr(m.inner, "scale", 2.0),
    "absent before": lambda m: setattr(m.inner, "late", 2.0),
    "one layer more": lambda m: m.layers.append(nn.Linear(4, 4)),
    "training": lambda m: m.inner.eval(),
    "hook": lambda m: m.inner.register_forward_hook(lambda *given: None),
    "function": lambda m: setattr(m, "closure", torch.relu),
    "tensor of another dtype": lambda m: setattr(m, "table", m.table.double()),
    "tied": lambda m: setattr(m.layers[0], "weight", m.layers[0].bias),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_forward_pass_reads_is_seen(what: str) -> None:
    model, _ = reads()
    state = PythonState(model)
    before = state.now()
    assert state.now() is before
    CHANGES[what](model)
    assert state.now().difference(before.entries) is not None


def test_closures_and_environments_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, change = reads()
    state = PythonState(model)
    before = state.now()
    change(2.0)
    assert "by (1.0, now 2.0)" in str(state.now().difference(before.entries))
    change(1.0)
    assert state.now().difference(before.entries) is None
    monkeypatch.setenv("HP_TEST_SCALE", "2")
    assert state.now().difference(before.entries) == "os.environ"


def test_what_is_equal_or_unread_is_no_change() -> None:
    model, _ = reads()
    state = PythonState(model)
    before = state.now()
    model.unread, model.rates, model.table = 5.0, [0.0, 1.0], torch.zeros(4)
    model.also_unread = object()
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    model.layers[0].weight.data = torch.zeros(4, 4)
    assert state.now().difference(before.entries) is None
    known = state.now()
    model.rates[1] = float("1.0")  # another object of the same value
    assert state.now() is known


def test_too_much_to_compare_is_refused() -> None:
    model, _ = reads()
    model.rates = list(range(200_000))
    with pytest.raises(CaptureError, match="too many to compare at each call"):
        PythonState(model).now()


def test_the_state_keeps_no_model_alive() -> None:
    model: Any = hp.offload(nn.Sequential(nn.Linear(4, 4)), budget="1MiB", host="1MiB")
    model(torch.ones(2, 4)).sum().backward()
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


class Keeps(nn.Module):
    """Does something with what it computes."""

    def __init__(self, keep: Callable[[Keeps, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.keep = nn.Linear(4, 4), keep
        self.calls, self.kept, self.nested = 0, [], {"last": [None]}
        self.queue: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        self.keep(self, x)
        return x.square().mean()


def _counts(model: Keeps, x: Tensor) -> None:
    model.calls += 1


EFFECTS: dict[str, Callable[[Keeps, Tensor], Any]] = {
    "counter": _counts,
    "list": lambda model, x: model.kept.append(x.detach()),
    "slice": lambda model, x: model.kept.__setitem__(slice(None), [x.detach(), "text"]),
    "nested": lambda model, x: model.nested["last"].__setitem__(0, x.detach()),
    "new attribute": lambda model, x: model.__dict__.update(shape=x.shape, more={"x": (x.detach(), 1)}),
    "with a gradient": lambda model, x: model.kept.append(x),
}


@pytest.mark.parametrize("what", EFFECTS)
def test_what_the_forward_pass_leaves_is_left_at_each_call(what: str) -> None:
    def left(model: Any) -> list[Any]:
        for step in range(4):
            model(torch.full((2, 4), float(step))).backward()
            if step == 1:
                model.kept.clear()
        more = getattr(model, "more", None)
        found = [model.calls, [x if isinstance(x, str) else x.tolist() for x in model.kept]]
        last = model.nested["last"][0]
        found.append(None if last is None else last.tolist())
        return [*found, None if more is None else more["x"][0].tolist(), getattr(model, "shape", None)]

    moved = left(hp.offload(Keeps(EFFECTS[what]), budget="1MiB", host="1MiB"))
    assert moved == left(Keeps(EFFECTS[what]))


def test_tensors_that_are_kept_out_of_sight_are_refused() -> None:
    model: Any = hp.offload(Keeps(lambda model, x: model.queue.put(x)), budget="1MiB", host="1MiB")
    with pytest.raises(CaptureError, match=r"keeps a tensor of \(2, 4\) where hp.offload does not see it"):
        model(torch.ones(2, 4))


def test_a_weight_that_the_forward_pass_puts_elsewhere_is_refused() -> None:
    model: Any = Keeps(lambda model, x: model.kept.append(model.layer.weight))
    with pytest.raises(CaptureError, match=r"sets model.kept to the model's parameter\.layer\.weight"):
        hp.offload(model, budget="1MiB", host="1MiB")(torch.ones(2, 4))
    assert model.kept == []


def test_a_gradient_that_comes_back_for_what_was_kept_is_named() -> None:
    def loss(model: Any) -> Tensor:
        model.kept.clear()
        out: Tensor = model(torch.ones(2, 4))
        return out + model.kept[0].sum()

    def grads(model: Any) -> list[Tensor]:
        loss(model).backward()
        return [p.grad for p in model.parameters()]

    keep = EFFECTS["with a gradient"]
    moved = grads(hp.offload(Keeps(keep), budget="1MiB", host="1MiB", through=("", "model.kept")))
    assert all(torch.equal(a, b) for a, b in zip(moved, grads(Keeps(keep)), strict=True))
    with pytest.raises(HyperParallelError, match=r"through=\('', 'model.kept',\)"):
        grads(hp.offload(Keeps(keep), budget="1MiB", host="1MiB"))


@pytest.mark.parametrize("when", ["in the forward pass", "afterwards"])
def test_gradients_of_what_was_kept_are_refused(when: str) -> None:
    def keep(model: Keeps, x: Tensor) -> None:
        if when == "in the forward pass":
            x.retain_grad()
        model.kept[:] = [x]

    def probe(model: Any) -> None:
        loss = model(torch.ones(2, 4))
        model.kept[0].retain_grad()
        loss.backward()

    with pytest.raises(HyperParallelError, match=r"retain_grad.*parameters and inputs alone"):
        probe(hp.offload(Keeps(keep), budget="1MiB", host="1MiB"))


class Penalized(nn.Module):
    """A penalty on weights that a list and a closure hold, and a memory that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.weights, bias = list(self.layer.parameters()), self.layer.bias
        self.penalty = lambda: bias.abs().sum()
        self.bank, self.at = torch.zeros(2, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.bank[self.at] = x.detach().mean(0)
        self.at = (self.at + 1) % 2
        return (
            x.square().mean() + self.bank.sum() + sum(p.square().sum() for p in self.weights) + self.penalty()
        )


def test_weights_in_lists_and_closures_have_gradients_and_memory_is_written() -> None:
    def run(model: Any) -> list[Tensor]:
        found = []
        for step in range(4):
            loss = model(torch.full((2, 4), float(step)))
            loss.backward()
            found += [loss.detach(), model.bank.clone(), *(p.grad.clone() for p in model.parameters())]
        return found

    model: Any = hp.offload(Penalized(), budget="1MiB", host="1MiB")
    weights = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(run(model), run(Penalized()), strict=True))
    assert all(a is b for a, b in zip(model.weights, weights, strict=True))
    assert len(model.forward.notes) <= 4  # two places, each without gradients of before and with


class Taught(nn.Module):
    """Reads another model, which is no part of it, and a distribution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.others = nn.Linear(4, 4), [nn.Linear(4, 4)]
        self.prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.others[0](x)
        loss: Tensor = (self.layer(x) - target).square().mean() - self.prior.log_prob(self.layer.bias).sum()
        return loss


def test_another_model_and_a_distribution_may_be_replaced() -> None:
    def run(model: Any) -> list[float]:
        found = []
        for step in range(4):
            if step == 2:
                torch.manual_seed(step)
                model.others[0] = nn.Linear(4, 4)
                model.prior.loc = torch.full((4,), 3.0)
            loss = model(torch.ones(2, 4))
            loss.backward()
            found.append(float(loss.detach()))
        return found

    assert run(hp.offload(Taught(), budget="1MiB", host="1MiB")) == run(Taught())


def test_a_tensor_that_no_path_leads_to_is_refused() -> None:
    hidden: queue.SimpleQueue[dict[str, Tensor]] = queue.SimpleQueue()
    hidden.put({"factor": torch.ones(4)})

    def keep(model: Keeps, x: Tensor) -> None:
        tensors = hidden.get()
        hidden.put(tensors)
        x.mul_(tensors["factor"])

    with pytest.raises(CaptureError, match=r"in a dict that hp\.offload does not follow"):
        hp.offload(Keeps(keep), budget="1MiB", host="1MiB")(torch.ones(2, 4))
