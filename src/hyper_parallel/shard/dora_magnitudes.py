"""Magnitudes of DoRA (Liu et al., arXiv 2402.09353): of each output feature, the norm of the weights that give it.

    W' = m · (W + s B A) / ‖W + s B A‖          m: [out], the norm over each row

A magnitude begins as ‖W + s B A‖. Each rank computes those of its own rows from slices of W, so that nothing is
communicated and no rank needs the whole of W; values are the same under any strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.traced_tensors import Source
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.lora_adapters import adapted_layers

_MODULES = "lora_magnitude_vector"


def is_magnitude(path: str) -> bool:
    """Whether a module of that name holds an adapter's magnitudes."""
    return path.rpartition(".")[0].rpartition(".")[2] == _MODULES


@dataclass(frozen=True)
class RowNorms:
    """The norms of the rows of W + change, of slices of them."""

    weight: Source
    """[out, in], or [in, out] where `transposed`."""
    change: torch.Tensor
    """s B A: [out, in]."""
    transposed: bool
    dtype: torch.dtype
    """In which the model holds W."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        (rows,) = slices
        every = slice(None)
        part = self.weight[(every, rows)].mT if self.transposed else self.weight[(rows, every)]
        whole = part.to(self.dtype) + self.change[rows].to(part.device, self.dtype)
        norms: torch.Tensor = torch.linalg.norm(whole, dim=1)
        return norms


class Magnitudes:
    """The initial magnitudes of a model's adapters, made from other initial values as these pass by."""

    def __init__(self, skeleton: nn.Module) -> None:
        """`skeleton`: the unsplit model on the meta device. Raises StrategyError for layers other than linear ones."""
        self._kept: dict[str, Source] = {}
        self._of: dict[str, tuple[str, tuple[str, str, str]]] = {}
        self._layers: dict[str, Any] = {}
        for path, module in adapted_layers(skeleton):
            layer: Any = module
            for adapter in getattr(layer, _MODULES, {}):
                if adapter not in layer.lora_A:
                    raise StrategyError(
                        f"{path!r} is DoRA on another layer than a linear one; name other target_modules"
                    )
                name = f"{path}.{_MODULES}.{adapter}.weight"
                a, b = (f"{path}.lora_{factor}.{adapter}.weight" for factor in "AB")
                needed = (f"{path}.base_layer.weight", a, b)
                self._layers[name] = layer
                self._of.update(dict.fromkeys(needed, (name, needed)))

    def after(self, name: str, values: Source) -> Iterator[tuple[str, Source]]:
        """What can be made once a parameter's values, whole or to be read in slices, are known: (name, values)."""
        if name not in self._of:
            return
        self._kept[name] = values
        made, needed = self._of[name]
        if not all(one in self._kept for one in needed):
            return
        weight, a, b = (self._kept.pop(one) for one in needed)
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        layer, adapter = self._layers[made], made.split(".")[-2]
        change = b @ a * layer.scaling[adapter]
        dtype = getattr(layer, _MODULES)[adapter].weight.dtype
        yield made, RowNorms(weight, change, layer.fan_in_fan_out, dtype)
