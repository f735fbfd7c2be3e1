"""The order of parts is that of their values, whatever the declaration says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, capture
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.partition import part_order
from hyper_parallel.shard.model_structure import submodel_of


class Joined(nn.Module):
    """Two encoders beside a decoder; `back`: the second encoder sees what the decoder made."""

    def __init__(self, back: bool, sound: bool = True) -> None:
        super().__init__()
        self.image, self.sound, self.text, self.head = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self._back, self._with_sound = back, sound

    def forward(self, x: Tensor) -> Tensor:
        y = self.text(x) + self.image(x) * 2
        if self._with_sound:
            y = y + self.sound(y if self._back else x)
        return self.head(y)


ASSIGNED = {"head": 0, "text": 0, "sound": 1, "image": 2}
NAMES = ("language", "audio", "vision")


def _graph(model: nn.Module) -> StepGraph:
    with fake_mode_with_symbols():
        x = torch.empty(2, 4)
        for module in model.modules():
            for name, one in module._parameters.items():
                if one is not None:  # no bias
                    module._parameters[name] = nn.Parameter(torch.empty(one.shape))
        given = {name: GivenTensor("parameter", one) for name, one in model.named_parameters()}
        return capture(lambda: {"out": model(x).sum()}, {**given, "x": GivenTensor("input", x)}, model)


def test_encoders_come_first() -> None:
    assert part_order(_graph(Joined(back=False)), submodel_of(ASSIGNED), NAMES) == [1, 2, 0]


def test_a_part_that_computes_nothing_is_left_out() -> None:
    assert part_order(_graph(Joined(back=False, sound=False)), submodel_of(ASSIGNED), NAMES) == [2, 0]


def test_parts_that_need_each_other_are_refused() -> None:
    with pytest.raises(GraphError, match="audio and language need each other's values in the forward pass"):
        part_order(_graph(Joined(back=True)), submodel_of(ASSIGNED), NAMES)
