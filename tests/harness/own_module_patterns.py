"""Modules as users write them, of the kinds that a lowering may get wrong: a variation each, by name.

A variation is what a module has beside two projections and what it does with its rows (`harness.own_modules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as spectral_norm_of_hooks
from torch.nn.utils import weight_norm as weight_norm_of_hooks
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


# Conditional modules.


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
        _experts(self, 2)

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


# Weights and buffers that are written.


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


def _max_norm(m: Any) -> None:
    m.table = nn.Embedding(4, WIDTH, max_norm=1.0)


class _Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


# Hooks.


def _hook(of: str, hook: Callable[[Tensor], Any], post: bool = False) -> Callable[[nn.Module], None]:
    def after(m: nn.Module) -> None:
        parameter = m.get_parameter(of)
        (parameter.register_post_accumulate_grad_hook if post else parameter.register_hook)(hook)

    return after


def _removed(m: nn.Module) -> None:
    m.get_parameter("out.weight").register_hook(lambda g: g * 0.0).remove()


def _two_hooks(m: nn.Module) -> None:
    m.get_parameter("out.weight").register_hook(lambda g: g.clamp(-0.1, 0.1))
    m.get_parameter("out.weight").register_hook(lambda g: g * 3)


def _quarter(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.25)


def _backward_hook(m: Any) -> None:
    m.layers[1].register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.5,))


# Weights used outside of their module.


def _attention(m: Any, h: Tensor) -> Tensor:
    x = h[:, None] + torch.arange(3.0)[None, :, None]
    return m.attention(x, x, x)[0].mean(1)


def _encoder(m: Any) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    m.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _penalty(m: Any, h: Tensor) -> Tensor:
    h = _through(m, h)
    return h * (1 + sum(layer.weight.pow(2).mean() for layer in m.layers))


def _penalty_in_the_loss(m: Any, h: Tensor) -> Tensor:
    m.penalty = m.out.weight.pow(2).sum() * h.mean()
    return _through(m, h)


def _penalty_of_all(m: Any, h: Tensor) -> Tensor:
    h = _through(m, h)
    return h * (1 + sum(p.pow(2).mean() for p in m.layers.parameters()))


class _Sparse(nn.Linear):
    """Leaves a term of its weight where the loss finds it."""

    term: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.term = self.weight.abs().mean()
        return output


def _side_term(m: Any, h: Tensor) -> Tensor:
    h = _through(m, h)
    return h * (1 + sum(layer.term for layer in m.layers))


def _tied(m: Any) -> None:
    m.table = nn.Embedding(4, WIDTH)
    m.head = nn.Linear(WIDTH, 4, bias=False)
    m.head.weight = m.table.weight


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized(parametrize_it: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    def after(m: Any) -> None:
        parametrize_it(m.layers[1])

    return after


def _cached(m: Any, h: Tensor) -> Tensor:
    with parametrize.cached():
        return _through(m, _through(m, h))


def _lazy(m: Any) -> None:
    m.lazy = nn.LazyLinear(WIDTH)


def _empty(m: Any) -> None:
    m.nothing, m.wide = nn.Parameter(torch.zeros(0, WIDTH)), nn.Linear(WIDTH, 0)


def _use_empty(m: Any, h: Tensor) -> Tensor:
    return torch.cat([h, m.wide(h)], 1) + m.nothing.sum()


def _keep(m: Any, h: Tensor) -> Tensor:
    m.kept_output = h
    return h


def _nothing(m: Any) -> None:
    pass


def _same(m: Any, h: Tensor) -> Tensor:
    return h


def _recurrent(m: Any, h: Tensor) -> Tensor:
    return h + m.rnn(h[:, None].expand(-1, 3, -1))[0][:, -1]


def _listed(m: Any) -> None:
    m.lin = nn.Linear(WIDTH, WIDTH)
    m.kept_weights = [m.lin.weight]


def _parameter_list(m: Any) -> None:
    m.weights = nn.ParameterList([torch.randn(WIDTH) * 0.1 for _ in range(4)])


def _by_list(m: Any, h: Tensor) -> Tensor:
    for number, weight in enumerate(m.weights):
        rows = h[:, 0].abs() == number
        if rows.any():
            h = h + rows[:, None] * weight
    return h


def _repeated(m: Any) -> None:
    m.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 3)


def _checkpointed(m: Any, h: Tensor) -> Tensor:
    mixed = h
    for number, expert in enumerate(m.experts):
        rows = (h[:, 0].abs() == number).nonzero().flatten()
        if rows.numel():
            part = checkpoint(lambda x, expert=expert: torch.tanh(expert(x)), h[rows], use_reentrant=False)
            mixed = mixed.index_add(0, rows, part)
    return mixed


class _View(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


def _in_place(m: Any, h: Tensor) -> Tensor:
    for layer in m.layers:
        output = layer(h)
        output += h.flatten()
        h = torch.tanh(output).view_as(h)
    return h


class _Collects(nn.Linear):
    def forward(self, x: Tensor, terms: Any = None) -> Tensor:
        output = super().forward(x)
        if terms is not None:
            terms["sum"] = terms.get("sum", 0.0) + self.weight.square().sum()
        return output


def _collected(m: Any, h: Tensor) -> Tensor:
    terms: dict[str, Any] = {}
    for layer in m.layers:
        h = h + torch.tanh(layer(h, terms))
    return h * (1 + 0.1 * terms["sum"])


def _once_called(m: nn.Module) -> None:
    m(torch.zeros(2, WIDTH))


def _layers_of(cls: type[nn.Module], *args: Any) -> Callable[[Any], None]:
    def build(m: Any) -> None:
        m.layers = nn.ModuleList(cls(*args) for _ in range(3))

    return build


_W = (WIDTH, WIDTH)
PATTERNS: dict[str, Pattern] = {
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
        _writing(lambda m, h: setattr(m, "kept", m.kept * 0.9 + 0.1 * h.mean(0))),
    ),
    "buffer replaced": Pattern("written", _buffer(torch.ones(WIDTH)), _writing(_replace_buffer)),
    "mask on a gradient": Pattern(
        "hooks", _nothing, _same, after=_hook("out.weight", lambda g: g * (torch.arange(4.0)[:, None] > 1))
    ),
    "clip of a gradient": Pattern(
        "hooks", _nothing, _same, after=_hook("out.weight", lambda g: g / g.norm().clamp_min(0.1))
    ),
    "hook on a layer": Pattern("hooks", _blocks, _through, after=_hook("layers.1.weight", lambda g: g * 0.3)),
    "hook on a split weight": Pattern(
        "hooks", _nothing, _same, after=_hook("up.weight", lambda g: g / g.norm())
    ),
    "hook after accumulation": Pattern(
        "hooks", _blocks, _through, after=_hook("layers.0.bias", _quarter, True)
    ),
    "two hooks": Pattern("hooks", _nothing, _same, after=_two_hooks),
    "hook removed": Pattern("hooks", _nothing, _same, after=_removed),
    "hook on a tied weight": Pattern(
        "hooks",
        _tied,
        lambda m, h: h + m.table(h[:, 0].abs().long()) * m.head(h).mean(1, keepdim=True),
        after=_hook("table.weight", lambda g: g.clamp(-0.1, 0.1)),
    ),
    "backward hook of a layer": Pattern("hooks", _blocks, _through, after=_backward_hook),
    "attention": Pattern(
        "outside",
        lambda m: setattr(m, "attention", nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
        _attention,
    ),
    "encoder": Pattern(
        "outside", _encoder, lambda m, h: m.encoder(h[:, None] + torch.arange(3.0)[:, None])[:, 0]
    ),
    "functional": Pattern("outside", _blocks, lambda m, h: F.linear(h, m.layers[1].weight, m.layers[1].bias)),
    "penalty": Pattern("outside", _blocks, _penalty),
    "penalty of all": Pattern("outside", _blocks, _penalty_of_all),
    "penalty in the loss": Pattern(
        "outside",
        _blocks,
        _penalty_in_the_loss,
        alone=True,
    ),
    "term left by a layer": Pattern("outside", _layers_of(_Sparse, *_W), _side_term, alone=True),
    "weight of a split module": Pattern(
        "outside", _nothing, lambda m, h: h + h @ m.down.weight @ m.up.weight * 0.1
    ),
    "weight of another layer": Pattern(
        "outside", _blocks, lambda m, h: F.linear(_through(m, h), m.layers[0].weight.t())
    ),
    "tied by hand": Pattern(
        "outside", _max_norm, lambda m, h: h + F.linear(h, m.table.weight.detach()).mean(1, keepdim=True)
    ),
    "weight norm": Pattern(
        "parametrized", _blocks, _through, after=_parametrized(parametrizations.weight_norm)
    ),
    "spectral norm": Pattern(
        "parametrized", _blocks, _through, after=_parametrized(parametrizations.spectral_norm)
    ),
    "orthogonal": Pattern(
        "parametrized", _blocks, _through, after=_parametrized(parametrizations.orthogonal)
    ),
    "symmetric": Pattern(
        "parametrized",
        _blocks,
        _through,
        after=_parametrized(lambda m: parametrize.register_parametrization(m, "weight", _Symmetric())),
    ),
    "cached": Pattern("parametrized", _blocks, _cached, after=_parametrized(parametrizations.weight_norm)),
    "weight norm of hooks": Pattern(
        "parametrized", _blocks, _through, after=_parametrized(weight_norm_of_hooks)
    ),
    "spectral norm of hooks": Pattern(
        "parametrized", _blocks, _through, after=_parametrized(spectral_norm_of_hooks)
    ),
    "weight norm of a split weight": Pattern(
        "parametrized",
        _nothing,
        _same,
        after=lambda m: parametrizations.weight_norm(m.up),  # type: ignore[arg-type]
    ),
    "recurrent": Pattern(
        "outside", lambda m: setattr(m, "rnn", nn.LSTM(WIDTH, WIDTH, batch_first=True)), _recurrent
    ),
    "recurrent layers": Pattern("outside", _layers_of(nn.GRUCell, *_W), _through),
    "parameters in a list": Pattern("outside", _listed, lambda m, h: h + h @ m.kept_weights[0]),
    "a list of parameters": Pattern("outside", _parameter_list, _by_list),
    "one layer in three places": Pattern("outside", _repeated, _through),
    "checkpointed experts": Pattern("conditional", _experts, _checkpointed),
    "two passes": Pattern("conditional", _experts, lambda m, h: _chosen(m, _chosen(m, h))),
    "views changed in place": Pattern("other", _layers_of(_View, *_W), _in_place),
    "a dict of terms": Pattern("outside", _layers_of(_Collects, *_W), _collected, alone=True),
    "no elements": Pattern("other", _empty, _use_empty),
    "lazy": Pattern("other", _lazy, lambda m, h: h + m.lazy(h)),
    "lazy, once called": Pattern("other", _lazy, lambda m, h: h + m.lazy(h), after=_once_called),
    "frozen layer": Pattern("other", _blocks, _through, after=lambda m: m.layers[1].requires_grad_(False)),  # type: ignore[index,union-attr]
    "output kept": Pattern("other", _blocks, _keep, after=_once_called),
    "weight that nothing uses": Pattern("other", _blocks, lambda m, h: h + m.layers[0](h)),
}
