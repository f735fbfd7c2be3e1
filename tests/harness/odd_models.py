"""Changes to a family's model that a pipeline has to follow, or to refuse: shared layers, skips, buffers that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora.adapted import adapt


def with_adapters(model: Any) -> nn.Module:
    """LoRA adapters, and all else frozen."""
    return adapt(model)


def frozen_embedding(model: Any) -> nn.Module:
    """The embedding is not trained, nor the head that is tied to it."""
    model.get_input_embeddings().weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def frozen_end(model: Any) -> nn.Module:
    """Nothing of the second half of the layers is trained, nor the norm and the head behind them."""
    half = len(model.model.layers) // 2
    for part in (*model.model.layers[half:], model.model.norm, model.lm_head):
        part.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def frozen_start(model: Any) -> nn.Module:
    """The embedding and the first half of the layers are not trained."""
    half = len(model.model.layers) // 2
    for part in (*model.model.layers[:half], model.model.embed_tokens):
        part.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def weight_norms(model: Any) -> nn.Module:
    """A parametrized weight in each layer."""
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
    return model  # type: ignore[no-any-return]


def repeated_layers(model: Any) -> nn.Module:
    """The second half of the layers is the first half once more."""
    layers = model.model.layers
    half = len(layers) // 2
    for at in range(half):
        layers[half + at] = layers[at]
    return model  # type: ignore[no-any-return]


class _Around(nn.Module):
    """A layer and something around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __init_subclass__(cls) -> None:
        # By this name the family knows its layers.
        cls.__name__ = "LlamaDecoderLayer"


class _Skip(_Around):
    def __init__(self, layer: nn.Module, left: list[Tensor], *, begins: bool, ends: bool) -> None:
        super().__init__(layer)
        self._left, self._begins, self._ends = [left], begins, ends

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.layer(hidden, *args, **kwargs)
        if self._begins:
            self._left[0].append(hidden)
        return result + self._left[0].pop() if self._ends else result


def skip_over_all(model: Any) -> nn.Module:
    """What enters the first layer is added to what leaves the last one."""
    left: list[Tensor] = []
    return _with(model, lambda layer, at, last: _Skip(layer, left, begins=at == 0, ends=last))


class _Norm(_Around):
    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__(layer)
        self.norm = nn.BatchNorm1d(features)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.layer(hidden, *args, **kwargs)
        normed: Tensor = self.norm(result.flatten(0, 1))
        return normed.view_as(result)


def batch_norms(model: Any) -> nn.Module:
    """Each layer ends with a norm that counts in its buffers."""
    return _with(model, lambda layer, at, last: _Norm(layer, model.config.hidden_size))


class _Counter(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


class _Counting(_Around):
    def __init__(self, layer: nn.Module, counter: _Counter) -> None:
        super().__init__(layer)
        self.counter = counter

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.counter.seen += 1.0
        result: Tensor = self.layer(hidden * (1 + 0.01 * self.counter.seen), *args, **kwargs)
        return result


def counters(model: Any) -> nn.Module:
    """Each layer counts its calls in a buffer, and computes with the count."""
    return _with(model, lambda layer, at, last: _Counting(layer, _Counter()))


def one_counter(model: Any) -> nn.Module:
    """All layers count in one buffer."""
    counter = _Counter()
    return _with(model, lambda layer, at, last: _Counting(layer, counter))


def _with(model: Any, around: Any) -> nn.Module:
    layers = model.model.layers
    for at, layer in enumerate(layers):
        layers[at] = around(layer, at, at == len(layers) - 1)
    return model  # type: ignore[no-any-return]
