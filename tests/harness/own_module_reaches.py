"""Modules as users write them, with hooks, weights used elsewhere and weights computed from others, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as spectral_norm_of_hooks
from torch.nn.utils import weight_norm as weight_norm_of_hooks

from harness.own_module_patterns import _W, WIDTH, Pattern, _blocks, _layers_of, _max_norm, _through


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


def _freeze(m: Any) -> None:
    m.layers[1].requires_grad_(False)


def _once_called(m: nn.Module) -> None:
    m(torch.zeros(2, WIDTH))


REACHING: dict[str, Pattern] = {
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
    "views changed in place": Pattern("other", _layers_of(_View, *_W), _in_place),
    "a dict of terms": Pattern("outside", _layers_of(_Collects, *_W), _collected, alone=True),
    "no elements": Pattern("other", _empty, _use_empty),
    "lazy": Pattern("other", _lazy, lambda m, h: h + m.lazy(h)),
    "lazy, once called": Pattern("other", _lazy, lambda m, h: h + m.lazy(h), after=_once_called),
    "frozen layer": Pattern("other", _blocks, _through, after=_freeze),
    "output kept": Pattern("other", _blocks, _keep, after=_once_called),
    "weight that nothing uses": Pattern("other", _blocks, lambda m, h: h + m.layers[0](h)),
}
