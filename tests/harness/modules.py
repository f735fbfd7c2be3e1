"""Small modules of a user's own: right ones under the tensor axis, and ones that mix features that are split."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER, HEADS = 16, 32, 4
RULES = {"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"}
Between = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """x + down(between(up(x))), with parameters that `between` may use."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.per_feature = nn.Parameter(torch.ones(INNER))
        self.register_buffer("table", torch.linspace(0.5, 1.5, INNER))
        self.between = between
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return x + self.down(self.between(self, self.up(x)))


class Model(nn.Module):
    """Two blocks with a norm before and after."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Block(between) for _ in range(2)])
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _in_place(block: Block, h: Tensor) -> Tensor:
    h = h.clone()
    h[..., 0] = h[..., 1:].mean(-1)
    return h


def _counted(block: Block, h: Tensor) -> Tensor:
    return h * h.size(-1)


def _noise(block: Block, h: Tensor) -> Tensor:
    return h + torch.randn_like(h)


def _numpy_like(block: Block, h: Tensor) -> Tensor:
    return h * random.random()


def _halves(block: Block, h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([a * b.sigmoid(), b], -1)


def _pairs_of_halves(block: Block, h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([-b, a], -1) + h


# What is mixed over features, or is not the same on every rank, between projections that are split.
BROKEN: dict[str, Between] = {
    "softmax": lambda b, h: h.softmax(-1),
    "log-softmax": lambda b, h: h.log_softmax(-1),
    "layer norm": lambda b, h: F.layer_norm(h, h.shape[-1:]),
    "rms norm": lambda b, h: h * h.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "l2 norm": lambda b, h: F.normalize(h, dim=-1),
    "top-k": lambda b, h: torch.where(h >= h.topk(4, -1).values[..., -1:], h, 0.0),
    "k-th value": lambda b, h: h * (h > h.median(-1, keepdim=True).values),
    "max": lambda b, h: h - h.amax(-1, keepdim=True),
    "mean": lambda b, h: h - h.mean(-1, keepdim=True),
    "standard deviation": lambda b, h: h / (h.std(-1, keepdim=True) + 1.0),
    "sum": lambda b, h: h * h.sum(-1, keepdim=True).tanh(),
    "cumulative sum": lambda b, h: h.cumsum(-1),
    "flip": lambda b, h: h.flip(-1),
    "roll": lambda b, h: h.roll(1, -1),
    "sort": lambda b, h: h.sort(-1).values,
    "shared scalar": lambda b, h: h * b.scale,
    "shared scalar added": lambda b, h: h + b.scale,
    "shared scalar in a power": lambda b, h: torch.relu(h) ** (1 + b.scale.square()),
    "packed halves": _halves,
    "packed halves turned": _pairs_of_halves,
    "packed in four": lambda b, h: h.unflatten(-1, (4, -1)).softmax(-2).flatten(-2),
    "interleaved with distance": lambda b, h: h.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) * h,
    "group norm": lambda b, h: F.group_norm(h.transpose(1, 2), 1).transpose(1, 2),
    "in place": _in_place,
    "count of features": _counted,
    "noise": _noise,
    "alpha dropout": lambda b, h: F.alpha_dropout(h, 0.5, b.training),
    "random of Python": _numpy_like,
    "outer product": lambda b, h: h * (h.unsqueeze(-1) * h.unsqueeze(-2)).mean((-1, -2)).unsqueeze(-1),
    "skips the split": lambda b, h: h + F.pad(b.given, (0, h.size(-1) - WIDTH)) if h.size(-1) >= WIDTH else h,  # type: ignore[arg-type]
    "table": lambda b, h: h * b.table[: h.size(-1)],
    "whole parameter by feature": lambda b, h: h * b.per_feature[: h.size(-1)],
    "convolution over features": lambda b, h: F.avg_pool1d(h, 3, 1, 1),
}

# What sees one feature at a time, alike on every rank.
RIGHT: dict[str, Between] = {
    "nothing": lambda b, h: h,
    "relu": lambda b, h: h.relu(),
    "gelu": lambda b, h: F.gelu(h),
    "tanh gelu": lambda b, h: F.gelu(h, approximate="tanh"),
    "silu": lambda b, h: F.silu(h),
    "sigmoid": lambda b, h: h.sigmoid(),
    "square": lambda b, h: h.square(),
    "relu squared": lambda b, h: h.relu().square(),
    "gated": lambda b, h: F.silu(b.gate(b.given)) * h,
    "gated by gelu": lambda b, h: F.gelu(b.gate(b.given)) * h,
    "bilinear": lambda b, h: b.gate(b.given) * h,
    "constant scale": lambda b, h: h * 0.5,
    "clamp": lambda b, h: h.clamp(-1, 1),
    "leaky": lambda b, h: F.leaky_relu(h, 0.1),
    "softplus": lambda b, h: F.softplus(h),
    "sine": lambda b, h: h.sin(),
    "dropout off": lambda b, h: F.dropout(h, 0.5, False),
    "in place on a copy": lambda b, h: h.clone().relu_(),
    "round trip of shapes": lambda b, h: h.flatten(0, 1).view_as(h),
    "over positions": lambda b, h: h - h.mean(1, keepdim=True),
    "detached gate": lambda b, h: h * h.detach().sigmoid(),
    "through float64": lambda b, h: h.double().tanh().to(h.dtype),
}
