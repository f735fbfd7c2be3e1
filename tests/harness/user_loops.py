"""A grammar of user loops: settings, side effects, views, dtypes, wrappers, caches and changed memory, drawn together.

A `Part` is one thing that people do around or inside a model. A pattern is a small model with one to four parts of
different groups, drawn by a seed, and a loop of three steps. `values` runs the loop and gives what it comes to: losses,
gradients, what parts keep, weights, the random state.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

WIDTH, ROWS, CLASSES, STEPS = 64, 32, 8, 3
Batch = dict[str, Tensor]


class Part:
    """One thing that people do; nothing, unless a subclass says otherwise."""

    computes = False
    """The loop runs operators of its own while the model's passes are under way, which no budget covers."""

    def build(self, net: Any) -> None:
        """Change a new model."""

    def inside(self, net: Any, x: Tensor) -> Tensor:
        """In the forward pass."""
        return x

    def before(self, net: Any, step: int) -> None:
        """Before a step."""

    def inputs(self, net: Any, batch: Batch, step: int) -> Batch:
        """The model's inputs."""
        return batch

    def between(self, net: Any, step: int) -> None:
        """After the forward pass and before the backward pass."""

    def call(self, net: Any, batch: Batch) -> Any:
        """The call of the model; NotImplemented for the usual one."""
        return NotImplemented

    def around(self, net: Any) -> AbstractContextManager[Any]:
        """Around the forward pass."""
        return nullcontext()

    def loss(self, net: Any, out: dict[str, Tensor]) -> Tensor | None:
        """What is added to the loss."""
        return None

    def seen(self, net: Any) -> Iterator[Tensor]:
        """What the loop reads after a step."""
        yield from ()


class Net(nn.Module):
    """Two blocks, a head and parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.parts = list(parts)
        for part in parts:
            part.build(self)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.norm(x + self.second(self.first(x).relu()))
        for part in self.parts:
            x = part.inside(self, x)
        logits = self.head(x.to(self.head.weight.dtype))
        return {"loss": nn.functional.cross_entropy(logits.float(), y), "logits": logits}


# Settings: a factor that the forward pass reads, wherever people keep one, and that changes from step to step.

FACTORS = {"factor": 1.0}
_default_of: dict[str, float] = {"factor": 1.0}


def _by_default(x: Tensor, settings: dict[str, float] = _default_of) -> Tensor:
    return x * settings["factor"]


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class OfClass(nn.Module):
    """A module whose class has the setting."""

    factor = 1.0


@dataclass
class Setting(Part):
    """`read` and `write` one."""

    read: Callable[[Any, Tensor], Tensor]
    write: Callable[[Any, float], None]
    make: Callable[[Any], None] = lambda net: None
    values: tuple[float, ...] = (1.0, 2.0, 2.0, 0.5)

    def build(self, net: Any) -> None:
        self.make(net)

    def inside(self, net: Any, x: Tensor) -> Tensor:
        return self.read(net, x)

    def before(self, net: Any, step: int) -> None:
        self.write(net, self.values[step % len(self.values)])


def _set(where: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda net: net.__dict__.__setitem__(where, value())


def closure_setting() -> Part:
    factor = 1.0

    def write(net: Any, value: float) -> None:
        nonlocal factor
        factor = value

    return Setting(lambda net, x: x * factor, write)


def hook_setting() -> Part:
    scale = {"by": 1.0}
    return Setting(
        lambda net, x: x,
        lambda net, value: scale.update(by=value),
        lambda net: net.norm.register_forward_hook(lambda module, given, out: out * scale["by"]) and None,
    )


def partial_setting() -> Part:
    return Setting(
        lambda net, x: net.scale(x),
        lambda net, value: setattr(net, "scale", functools.partial(torch.mul, other=value)),
        lambda net: setattr(net, "scale", functools.partial(torch.mul, other=1.0)),
    )


SETTINGS: dict[str, Callable[[], Part]] = {
    "attribute": lambda: Setting(
        lambda net, x: x * net.factor, lambda net, v: setattr(net, "factor", v), _set("factor", lambda: 1.0)
    ),
    "list": lambda: Setting(
        lambda net, x: x * net.rates[1],
        lambda net, v: net.rates.__setitem__(1, v),
        _set("rates", lambda: [0.0, 1.0]),
    ),
    "list made anew": lambda: Setting(
        lambda net, x: x * net.rates[1],
        lambda net, v: setattr(net, "rates", [0, v]),
        _set("rates", lambda: [0, 1.0]),
    ),
    "dict": lambda: Setting(
        lambda net, x: x * net.by["f"], lambda net, v: net.by.update(f=v), _set("by", lambda: {"f": 1.0})
    ),
    "config in a config": lambda: Setting(
        lambda net, x: x * net.config.inner.factor,
        lambda net, v: setattr(net.config.inner, "factor", v),
        _set("config", lambda: SimpleNamespace(inner=SimpleNamespace(factor=1.0))),
    ),
    "private slots": lambda: Setting(
        lambda net, x: x * net._state.factor,
        lambda net, v: setattr(net._state, "factor", v),
        _set("_state", Slotted),
    ),
    "getattr": lambda: Setting(
        lambda net, x: x * getattr(net, f"scale_{1}"),
        lambda net, v: setattr(net, "scale_1", v),
        _set("scale_1", float),
    ),
    "class": lambda: Setting(
        lambda net, x: x * net.inner.factor,
        lambda net, v: setattr(OfClass, "factor", v),
        lambda net: setattr(net, "inner", OfClass()),
    ),
    "global": lambda: Setting(lambda net, x: x * FACTORS["factor"], lambda net, v: FACTORS.update(factor=v)),
    "default": lambda: Setting(lambda net, x: _by_default(x), lambda net, v: _default_of.update(factor=v)),
    "closure": closure_setting,
    "hook": hook_setting,
    "partial": partial_setting,
    "set": lambda: Setting(
        lambda net, x: x * 2 if "twice" in net.flags else x,
        lambda net, v: net.flags.add("twice") if v > 1 else net.flags.discard("twice"),
        _set("flags", set),
    ),
    "array": lambda: Setting(
        lambda net, x: x * float(net.array[0]),
        lambda net, v: net.array.__setitem__(0, v),
        _set("array", lambda: np.ones(2)),
    ),
    "tensor attribute": lambda: Setting(
        lambda net, x: x * net.weight,
        lambda net, v: setattr(net, "weight", torch.tensor(v)),
        _set("weight", lambda: torch.tensor(1.0)),
    ),
    "function": lambda: Setting(
        lambda net, x: net.act(x),
        lambda net, v: setattr(net, "act", torch.tanh if v > 1 else torch.relu),
        _set("act", lambda: torch.relu),
    ),
    "default dtype": lambda: Setting(
        lambda net, x: (x + torch.ones(1)).float(),
        lambda net, v: torch.set_default_dtype(torch.float64 if v == 0.5 else torch.float32),
    ),
}


# Side effects: what the forward pass leaves behind.


@dataclass
class Keeps(Part):
    """Keeps something of the forward pass, and reads it after a step."""

    keep: Callable[[Any, Tensor], None]
    read: Callable[[Any], Sequence[Tensor]]
    make: Callable[[Any], None] = lambda net: None
    reset: Callable[[Any], None] = lambda net: None

    def build(self, net: Any) -> None:
        self.make(net)

    def inside(self, net: Any, x: Tensor) -> Tensor:
        self.keep(net, x)
        return x

    def before(self, net: Any, step: int) -> None:
        self.reset(net)

    def seen(self, net: Any) -> Iterator[Tensor]:
        yield from self.read(net)


class HookKeeps(Part):
    """Hooks of an inner module keep its result, or its gradient."""

    def __init__(self, gradients: bool) -> None:
        self.kept: dict[str, Tensor] = {}
        self.gradients = gradients

    def build(self, net: Any) -> None:
        kept = self.kept
        if self.gradients:
            net.norm.register_full_backward_hook(lambda module, given, out: kept.update(norm=out[0]))
        else:
            net.norm.register_forward_hook(lambda module, given, out: kept.update(norm=out.detach()))

    def seen(self, net: Any) -> Iterator[Tensor]:
        yield from self.kept.values()


class AddsLoss(Part):
    """Auxiliary losses in a list, which the loop adds."""

    computes = True

    def build(self, net: Any) -> None:
        net.auxiliary = []

    def inside(self, net: Any, x: Tensor) -> Tensor:
        net.auxiliary.append(x.square().mean())
        return x

    def before(self, net: Any, step: int) -> None:
        net.auxiliary.clear()

    def loss(self, net: Any, out: dict[str, Tensor]) -> Tensor | None:
        return sum(net.auxiliary, torch.zeros(()))


def _counted(net: Any, x: Tensor) -> None:
    net.calls += 1


def _average(net: Any, x: Tensor) -> None:
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)


class CountsInLoss(Part):
    """A factor of the loss that grows from call to call."""

    def build(self, net: Any) -> None:
        net.__dict__["calls"] = 0

    def inside(self, net: Any, x: Tensor) -> Tensor:
        net.calls += 1
        return x * (1.0 if net.calls < 3 else 2.0)


class PythonRandom(Part):
    """A random number of Python's."""

    def inside(self, net: Any, x: Tensor) -> Tensor:
        return x * random.random()


EFFECTS: dict[str, Callable[[], Part]] = {
    "hook keeps": lambda: HookKeeps(False),
    "backward hook keeps": lambda: HookKeeps(True),
    "attribute": lambda: Keeps(
        lambda net, x: net.__dict__.update(last=x.detach()),
        lambda net: [net.last],
        _set("last", lambda: None),
    ),
    "dict, with its gradient": lambda: Keeps(
        lambda net, x: net.kept.update(x=x), lambda net: list(net.kept.values()), _set("kept", dict)
    ),
    "list, cleared": lambda: Keeps(
        lambda net, x: net.kept.append(x.detach()),
        lambda net: net.kept,
        _set("kept", list),
        lambda net: net.kept.clear(),
    ),
    "list, growing": lambda: Keeps(
        lambda net, x: net.kept.append(x.detach().mean()), lambda net: net.kept, _set("kept", list)
    ),
    "deque": lambda: Keeps(
        lambda net, x: net.kept.append(x.detach().mean()),
        lambda net: list(net.kept),
        _set("kept", lambda: collections.deque(maxlen=2)),
    ),
    "auxiliary losses": AddsLoss,
    "counter": lambda: Keeps(_counted, lambda net: [torch.tensor(net.calls)], _set("calls", int)),
    "counter in the loss": CountsInLoss,
    "running average": lambda: Keeps(
        _average, lambda net: [net.mean], _set("mean", lambda: torch.zeros(WIDTH))
    ),
    "shape": lambda: Keeps(
        lambda net, x: net.__dict__.update(shape=x.shape),
        lambda net: [torch.tensor(net.shape)],
        _set("shape", lambda: None),
    ),
    "random number": PythonRandom,
}


# Caches: tables that the forward pass makes once.


@functools.lru_cache(None)
def _table(rows: int) -> Tensor:
    return torch.linspace(0.5, 1.5, rows)[:, None]


_TABLES: dict[int, Tensor] = {}


class Cache(Part):
    """A table for so many rows."""

    def __init__(self, where: str) -> None:
        self.where, self.tables = where, dict[int, Tensor]()

    def inside(self, net: Any, x: Tensor) -> Tensor:
        if self.where == "lru":
            return x * _table(len(x))
        tables = _TABLES if self.where == "global" else self.tables
        if len(x) not in tables:
            tables[len(x)] = torch.linspace(0.5, 1.5, len(x))[:, None]
        return x * tables[len(x)]


CACHES: dict[str, Callable[[], Part]] = {
    where: functools.partial(Cache, where) for where in ("lru", "dict of an object", "global")
}


# Inputs: views of weights and of each other, expanded ones, with gradients.


@dataclass
class Inputs(Part):
    """Other inputs."""

    make: Callable[[Any, Batch, int], Tensor]
    computes: bool = False
    leaf: Tensor | None = field(default=None, repr=False)

    def build(self, net: Any) -> None:
        net.table = nn.Parameter(torch.randn(3 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3)))

    def inside(self, net: Any, x: Tensor) -> Tensor:
        return x + net.table[:1]

    def inputs(self, net: Any, batch: Batch, step: int) -> Batch:
        self.leaf = self.make(net, batch, step)
        return {**batch, "x": self.leaf}

    def seen(self, net: Any) -> Iterator[Tensor]:
        if self.leaf is not None and self.leaf.is_leaf and self.leaf.grad is not None:
            yield self.leaf.grad


INPUTS: dict[str, Callable[[], Part]] = {
    "view of a weight": lambda: Inputs(lambda net, b, step: net.table.detach()[step : step + ROWS]),
    "view of a weight, with its gradient": lambda: Inputs(
        lambda net, b, step: net.table[step : step + ROWS], True
    ),
    "transposed": lambda: Inputs(lambda net, b, step: b["x"].T.contiguous().T),
    "expanded": lambda: Inputs(lambda net, b, step: b["x"][:1].expand(ROWS, WIDTH)),
    "expanded, with gradient": lambda: Inputs(
        lambda net, b, step: b["x"][:1].clone().expand(ROWS, WIDTH).requires_grad_()
    ),
    "leaf with gradient": lambda: Inputs(lambda net, b, step: b["x"].clone().requires_grad_()),
    "computed": lambda: Inputs(lambda net, b, step: b["x"] * net.table[:ROWS], True),
    "fewer rows, then more": lambda: Inputs(lambda net, b, step: b["x"]),
}


# Dtypes.


@dataclass
class Dtype(Part):
    """The model, or what it computes, in another dtype."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    extra: Callable[[Tensor], Tensor] | None = None

    def build(self, net: Any) -> None:
        if not self.autocast and self.extra is None:
            net.to(self.dtype)

    def inputs(self, net: Any, batch: Batch, step: int) -> Batch:
        return batch if self.autocast or self.extra else {**batch, "x": batch["x"].to(self.dtype)}

    def around(self, net: Any) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype) if self.autocast else nullcontext()

    def inside(self, net: Any, x: Tensor) -> Tensor:
        return x if self.extra is None else self.extra(x)


DTYPES: dict[str, Callable[[], Part]] = {
    "bfloat16": lambda: Dtype(torch.bfloat16),
    "float64": lambda: Dtype(torch.float64),
    "autocast": lambda: Dtype(torch.bfloat16, True),
    "complex": lambda: Dtype(extra=lambda x: torch.fft.ifft(torch.fft.fft(x, dim=1) * 0.5j, dim=1).imag),
    "integer": lambda: Dtype(extra=lambda x: x + (x > 0).sum(1, keepdim=True).to(torch.int64)),
}


# Modules and wrappers.


@dataclass
class Wrapper(Part):
    """A module of another kind in the model, or a tool around it."""

    make: Callable[[Any], None] = lambda net: None
    run: Callable[[Any, Batch], Any] | None = None
    computes: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def build(self, net: Any) -> None:
        self.make(net)

    def inside(self, net: Any, x: Tensor) -> Tensor:
        return net.extra(x) if "extra" in net._modules else x

    def call(self, net: Any, batch: Batch) -> Any:
        return NotImplemented if self.run is None else self.run(net, batch)

    def around(self, net: Any) -> AbstractContextManager[Any]:
        return self.context()


class Recurrent(nn.Module):
    """An LSTM or a GRU over rows."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x[None].to(torch.float32))[0][0]
        return x + found


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(len(x)) % 4)
        return found


class Checkpointed(nn.Module):
    """A block that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class Inner(nn.Module):
    """A gradient inside the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda v: v.square().sum())(x)
        return x + 0.1 * gradient


def _extra(make: Callable[[], nn.Module]) -> Callable[[], Part]:
    return lambda: Wrapper(lambda net: setattr(net, "extra", make()))


def _functional(net: Any, batch: Batch) -> Any:
    weights = {name: p * 1.0 for name, p in net.named_parameters()}
    return torch.func.functional_call(net, weights, (), batch)


def _func_grad(net: Any, batch: Batch) -> Any:
    weights = {name: p.detach() for name, p in net.named_parameters()}
    torch.func.grad(lambda w: torch.func.functional_call(net, w, (), batch)["loss"])(weights)
    return net(**batch)


def _compiled(net: Any, batch: Batch) -> Any:
    return torch.compile(net, backend="eager")(**batch)


WRAPPERS: dict[str, Callable[[], Part]] = {
    "LSTM": _extra(lambda: Recurrent(nn.LSTM)),
    "GRU": _extra(lambda: Recurrent(nn.GRU)),
    "dropout": _extra(lambda: nn.Dropout(0.3)),
    "batch norm": _extra(lambda: nn.BatchNorm1d(WIDTH)),
    "checkpoint": _extra(Checkpointed),
    "sparse embedding": _extra(lambda: Sparse(True)),
    "embedding": _extra(lambda: Sparse(False)),
    "TorchScript": _extra(lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH))),
    "compiled part": _extra(lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")),  # type: ignore[arg-type,return-value]
    "weight norm": _extra(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "gradient inside": _extra(Inner),
    "functional_call": lambda: Wrapper(run=_functional, computes=True),
    "torch.func.grad": lambda: Wrapper(run=_func_grad),
    "compiled around": lambda: Wrapper(run=_compiled),
    "FlopCounterMode": lambda: Wrapper(context=lambda: FlopCounterMode(display=False)),
}


# Memory that changes.


@dataclass
class Memory(Part):
    """What happens to the model before step 2, or between the passes."""

    change: Callable[[Any], None] = lambda net: None
    late: Callable[[Any], None] | None = None

    def before(self, net: Any, step: int) -> None:
        if step == 2:
            self.change(net)

    def between(self, net: Any, step: int) -> None:
        if self.late is not None:
            self.late(net)


def _replaced(net: Any) -> None:
    for p in net.parameters():
        p.data = p.data.clone() + 0.01


def _flat(net: Any) -> None:
    flat = torch.cat([p.detach().flatten() for p in (net.first.weight, net.second.weight)])
    net.first.weight.data, net.second.weight.data = (
        flat[: 2 * WIDTH * WIDTH].view(2 * WIDTH, WIDTH),
        flat[2 * WIDTH * WIDTH :].view(WIDTH, 2 * WIDTH),
    )


def _assigned(net: Any) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


def _scaled(p: nn.Parameter) -> None:
    p.data.mul_(1.1).add_(0.1)


def _tied(net: Any) -> None:
    net.norm.bias.data = net.norm.weight.data


MEMORY: dict[str, Callable[[], Part]] = {
    "data replaced": lambda: Memory(_replaced),
    "data made one": lambda: Memory(_flat),
    "data tied": lambda: Memory(_tied),
    "shared": lambda: Memory(lambda net: net.share_memory() and None),
    "assigned": lambda: Memory(_assigned),
    "numpy view": lambda: Memory(lambda net: net.__dict__.update(view=net.head.weight.detach().numpy())),
    "frozen later": lambda: Memory(lambda net: net.first.requires_grad_(False) and None),
    "evaluation": lambda: Memory(lambda net: net.eval() and net.train() and None),
    "data between the passes": lambda: Memory(late=lambda net: _scaled(net.first.bias)),
    "weights between the passes": lambda: Memory(late=lambda net: _scaled(net.second.weight)),
}


# Several models.


class Teacher(Part):
    """Another model, without gradients, in a list."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.others = [nn.Linear(WIDTH, WIDTH)]

    def inside(self, net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.others[0](x.float())
        return x + 0.1 * target.to(x.dtype)

    def before(self, net: Any, step: int) -> None:
        with torch.no_grad():
            self.others[0].weight.mul_(0.9)


class Copied(Part):
    """A copy that follows the model."""

    average: Any = None

    def before(self, net: Any, step: int) -> None:
        if self.average is None:
            self.average = [p.detach().clone() for p in net.parameters()]
        for mine, theirs in zip(self.average, net.parameters(), strict=True):
            mine.lerp_(theirs.detach().to(mine.dtype), 0.1)

    def seen(self, net: Any) -> Iterator[Tensor]:
        yield from self.average


class Restored(Part):
    """The model's state is saved and loaded."""

    def before(self, net: Any, step: int) -> None:
        net.load_state_dict(copy.deepcopy(net.state_dict()))


MODELS: dict[str, Callable[[], Part]] = {"teacher": Teacher, "average": Copied, "restored": Restored}

GROUPS: dict[str, dict[str, Callable[[], Part]]] = {
    "setting": SETTINGS,
    "side effect": EFFECTS,
    "cache": CACHES,
    "input": INPUTS,
    "dtype": DTYPES,
    "wrapper": WRAPPERS,
    "memory": MEMORY,
    "models": MODELS,
}


def drawn(seed: int) -> list[tuple[str, str]]:
    """(group, part) of a pattern: one to four of different groups. The first goes through all parts in turn."""
    draw = random.Random(seed)
    every = [(group, name) for group, parts in GROUPS.items() for name in parts]
    first = every[seed % len(every)]
    groups = draw.sample([group for group in GROUPS if group != first[0]], draw.randint(0, 3))
    return [first, *((group, draw.choice(list(GROUPS[group]))) for group in groups)]


def built(pattern: Sequence[tuple[str, str]]) -> Net:
    """The model of a pattern, with the same values each time."""
    FACTORS["factor"] = _default_of["factor"] = OfClass.factor = 1.0
    torch.set_default_dtype(torch.float32)
    _TABLES.clear()
    _table.cache_clear()
    torch.manual_seed(0)
    random.seed(0)
    return Net([GROUPS[group][name]() for group, name in pattern])


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float32)
    return {"x": x, "y": torch.randint(CLASSES, (ROWS,), generator=generator)}


Watch = Callable[[Any, torch.optim.Optimizer, Batch], AbstractContextManager[Any]]


def values(net: Any, watch: Watch | None = None) -> list[Tensor]:
    """What the loop comes to. `watch`: around both passes of each step."""
    torch.manual_seed(1)
    parts: list[Part] = net.parts
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    found: list[Tensor] = []
    for step in range(STEPS):
        for part in parts:
            part.before(net, step)
        batch = batch_of(step)
        for part in parts:
            batch = part.inputs(net, batch, step)
        with watch(net, optimizer, batch) if watch is not None else nullcontext():
            contexts = [part.around(net) for part in parts]
            out = NotImplemented
            for context in contexts:
                context.__enter__()
            for part in parts:
                out = part.call(net, batch) if out is NotImplemented else out
            out = net(**batch) if out is NotImplemented else out
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            loss = out["loss"]
            for part in parts:
                part.between(net, step)
                more = part.loss(net, out)
                loss = loss if more is None else loss + more
            loss.backward()
        found += [loss.detach().clone(), out["logits"].detach().clone()]
        for part in parts:
            found += [x.detach().clone() for x in part.seen(net)]
        found += [p.grad.detach().to_dense().clone() for p in net.parameters() if p.grad is not None]
        del out, loss
        optimizer.step()
        optimizer.zero_grad()
    found += [p.detach().clone() for p in (*net.parameters(), *net.buffers())]
    return [*found, torch.get_rng_state()]
