"""Modules as users write them, whose code branches or writes weights: a variation each, by name.

A variation is what a module has beside two projections and what it does with its rows (`harness.own_modules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


@dataclass(frozen=True)
class Pattern:
    """A module of a kind."""

    kind: str
    build: Callable[[nn.Module], None]
    """Gives the module what it has beside `up`, `down` and `out`."""
    run: Callable[[Any, Tensor], Tensor]
    """[B, 8] to [B, 8], between the projections and the output."""
    alone: bool = False
    """On one device, too, each worker's rows are a call: the first row, or the number of rows, decides."""
    after: Callable[[nn.Module], None] = lambda module: None
    """What the user does to the module before it is parallelized."""


def _experts(m: Any, n: int = 4) -> None:
    m.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))


def _blocks(m: Any, n: int = 3) -> None:
    m.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))


def _through(m: Any, h: Tensor) -> Tensor:
    for layer in m.layers:
        h = h + torch.tanh(layer(h))
    return h


def _chosen(m: Any, h: Tensor) -> Tensor:
    mixed = h
    for number, expert in enumerate(m.experts):
        rows = (h[:, 0].abs() == number).nonzero().flatten()
        if rows.numel():
            mixed = mixed.index_add(0, rows, torch.tanh(expert(h[rows])))
    return mixed


def _by_popularity(m: Any, h: Tensor) -> Tensor:
    numbers, counts = h[:, 0].abs().long().unique(return_counts=True)
    mixed = torch.zeros_like(h)
    for number in numbers[counts.argsort(descending=True)].tolist():
        rows = (h[:, 0].abs() == number).nonzero().flatten()
        mixed = mixed.index_add(0, rows, m.experts[number](h[rows]))
    return h + mixed


def _named(m: Any, h: Tensor) -> Tensor:
    positive = h[:, 0] > 0
    for name, rows in (("positive", positive), ("negative", ~positive)):
        if rows.any():
            h = h.clone()
            h[rows] = h[rows] + m.branches[name](h[rows])
    return h


class _Mixture(nn.Module):
    """A layer with experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] > 1.5 if number else x[:, 0] < 0.5).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, torch.tanh(expert(x[rows])))
        return x


def _stop_by_all_rows(m: Any, h: Tensor) -> Tensor:
    for layer in m.layers:
        if not (h[:, 0] > 0.5).any():
            break
        h = torch.where(h[:, :1] > 0.5, torch.tanh(layer(h)) + h - 1, h)
    return h


def _build_named(m: Any) -> None:
    m.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("positive", "negative")})


def _one_head(m: Any, h: Tensor) -> Tensor:
    return h + m.experts[int(h[0, 0].abs())](h)


def _select_after_all_ran(m: Any, h: Tensor) -> Tensor:
    outputs = [torch.tanh(expert(h)) for expert in m.experts]
    return h + outputs[int(h[0, 0].abs())]


def _loops(m: Any, h: Tensor) -> Tensor:
    for _ in range(int(h[0, 0].abs())):
        h = h + torch.tanh(m.layers[0](h))
    return m.layers[1](h) + m.layers[2](h)


def _early_exit(m: Any, h: Tensor) -> Tensor:
    for layer in m.layers:
        h = h + torch.tanh(layer(h))
        if float(h[0, 0]) > 1.5:
            break
    return h


def _shared_layer(m: Any, h: Tensor) -> Tensor:
    for _ in range(3):
        for layer in m.layers:
            h = h + torch.tanh(layer(h))
    return h


class _Gated(nn.Module):
    """A layer that uses one of its weights for some rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.extra = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 1
        if chosen.any():
            x = x + chosen[:, None] * self.extra
        return x + torch.tanh(self.lin(x))


def _alternates(m: Any, h: Tensor) -> Tensor:
    m.count = getattr(m, "count", 0) + 1
    return h + m.layers[m.count % 2](h)


def _backwards(m: Any, h: Tensor) -> Tensor:
    for layer in reversed(m.layers):
        h = h + torch.tanh(layer(h))
    return h


def _teacher(m: Any) -> None:
    m.student, m.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    m.count = 0


def _writing(write: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, h: Tensor) -> Tensor:
        m.count = getattr(m, "count", 0) + 1
        with torch.no_grad():
            write(m, h)
        if hasattr(m, "teacher"):
            return torch.tanh(m.student(h)) + m.teacher(h)
        return _through(m, h) if hasattr(m, "layers") else h

    return run


def _pairs(m: Any) -> Any:
    return zip(m.teacher.parameters(), m.student.parameters(), strict=True)


def _ema_data(m: Any, h: Tensor) -> None:
    for teacher, student in _pairs(m):
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def _ema_later(m: Any, h: Tensor) -> None:
    if m.count > 1:
        _ema_data(m, h)


def _lerp(m: Any, h: Tensor) -> None:
    for teacher, student in _pairs(m):
        teacher.lerp_(student, 0.5)


def _from_rows_later(m: Any, h: Tensor) -> None:
    if m.count > 1:
        m.teacher.bias.add_(0.1 * h.mean(0))


def _center_later(m: Any, h: Tensor) -> None:
    if m.count > 1:
        m.kept.mul_(0.9).add_(h.mean(0), alpha=0.1)


def _copies(m: Any, h: Tensor) -> None:
    if m.count % 2 == 0:
        m.teacher.load_state_dict(m.student.state_dict())


def _normalize(m: Any, h: Tensor) -> None:
    m.layers[0].weight.data = F.normalize(m.layers[0].weight.data, dim=1)


def _exchange(m: Any, h: Tensor) -> None:
    m.student.weight = nn.Parameter(m.student.weight.clamp(-0.1, 0.1))


def _buffer(value: Tensor) -> Callable[[Any], None]:
    def build(m: Any) -> None:
        m.register_buffer("kept", value.clone())

    return build


def _replace_buffer(m: Any, h: Tensor) -> None:
    m.kept = m.kept * 0.9 + 0.1


def _replace_center(m: Any, h: Tensor) -> None:
    m.kept = m.kept * 0.9 + 0.1 * h.mean(0)


def _max_norm(m: Any) -> None:
    m.table = nn.Embedding(4, WIDTH, max_norm=1.0)


class _Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def _checkpointed(m: Any, h: Tensor) -> Tensor:
    mixed = h
    for number, expert in enumerate(m.experts):
        rows = (h[:, 0].abs() == number).nonzero().flatten()
        if rows.numel():
            part = checkpoint(lambda x, expert=expert: torch.tanh(expert(x)), h[rows], use_reentrant=False)
            mixed = mixed.index_add(0, rows, part)
    return mixed


def _layers_of(cls: type[nn.Module], *args: Any) -> Callable[[Any], None]:
    def build(m: Any) -> None:
        m.layers = nn.ModuleList(cls(*args) for _ in range(3))

    return build


_W = (WIDTH, WIDTH)


BRANCHING_AND_WRITING: dict[str, Pattern] = {
    "experts of some rows": Pattern("conditional", _experts, _chosen),
    "experts by popularity": Pattern("conditional", _experts, _by_popularity),
    "experts by name": Pattern("conditional", _build_named, _named),
    "one head of a batch": Pattern("conditional", _experts, _one_head, alone=True),
    "all heads run, one is used": Pattern("conditional", _experts, _select_after_all_ran, alone=True),
    "rounds": Pattern("conditional", _blocks, _loops, alone=True),
    "early exit": Pattern("conditional", _blocks, _early_exit, alone=True),
    "a weight of some rows in a layer": Pattern("conditional", _layers_of(_Gated), _through),
    "layers with experts": Pattern("conditional", _layers_of(_Mixture), _through),
    "until no row is left": Pattern("conditional", _blocks, _stop_by_all_rows),
    "layers that run three times": Pattern("conditional", _blocks, _shared_layer),
    "layers by turns": Pattern("conditional", _blocks, _alternates),
    "layers from last to first": Pattern("conditional", _blocks, _backwards),
    "clamp": Pattern("written", _blocks, _writing(lambda m, h: m.out.weight.clamp_(-0.1, 0.1))),
    "clamp of a layer": Pattern(
        "written", _blocks, _writing(lambda m, h: m.layers[1].weight.clamp_(-0.1, 0.1))
    ),
    "clamp inside a layer": Pattern("written", _layers_of(_Clipped, *_W), _through),
    "clamp of data": Pattern("written", _blocks, _writing(lambda m, h: m.out.weight.data.clamp_(-0.1, 0.1))),
    "data set": Pattern("written", _blocks, _writing(_normalize)),
    "teacher": Pattern("written", _teacher, _writing(_lerp)),
    "teacher by data": Pattern("written", _teacher, _writing(_ema_data)),
    "teacher after a while": Pattern("written", _teacher, _writing(_ema_later)),
    "teacher copied": Pattern("written", _teacher, _writing(_copies)),
    "parameter exchanged": Pattern("written", _teacher, _writing(_exchange)),
    "weight of the rows": Pattern(
        "written", _teacher, _writing(lambda m, h: m.teacher.bias.add_(0.1 * h.mean(0)))
    ),
    "weight of the rows after a while": Pattern("written", _teacher, _writing(_from_rows_later)),
    "center after a while": Pattern("written", _buffer(torch.zeros(WIDTH)), _writing(_center_later)),
    "max_norm": Pattern("written", _max_norm, lambda m, h: h + m.table(h[:, 0].abs().long())),
    "counter": Pattern("written", _buffer(torch.zeros(())), _writing(lambda m, h: m.kept.add_(1))),
    "counter of rows": Pattern(
        "written", _buffer(torch.zeros(())), _writing(lambda m, h: m.kept.add_(len(h)))
    ),
    "center": Pattern(
        "written",
        _buffer(torch.zeros(WIDTH)),
        _writing(lambda m, h: m.kept.mul_(0.9).add_(h.mean(0), alpha=0.1)),
    ),
    "center replaced": Pattern(
        "written",
        _buffer(torch.zeros(WIDTH)),
        _writing(_replace_center),
    ),
    "buffer replaced": Pattern("written", _buffer(torch.ones(WIDTH)), _writing(_replace_buffer)),
    "checkpointed experts": Pattern("conditional", _experts, _checkpointed),
    "two passes": Pattern("conditional", _experts, lambda m, h: _chosen(m, _chosen(m, h))),
}
