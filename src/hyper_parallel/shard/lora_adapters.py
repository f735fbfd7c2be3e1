"""LoRA adapters of the library peft (Hu et al., arXiv 2106.09685), seen from outside: nothing here imports it.

peft wraps a linear map in an adapter layer, which holds the map under the name `base_layer`:

    y = base_layer(x) + lora_B(lora_A(dropout(x))) · scaling        A: [r, in]  B: [out, r]

A rule for the linear map applies to its adapter layer. Where the map's output features are split, B's are split the
same way and A is whole. Where its input features are split, A's are split the same way and B is whole, and one sum over
the axis serves both products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.traced_tensors import Source
from hyper_parallel.errors import StrategyError


@dataclass(frozen=True)
class Adapter:
    """One adapter of a layer."""

    name: str
    """As peft calls it: ``default`` unless the user said otherwise."""
    a: nn.Linear
    b: nn.Linear


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is peft's layer around a linear map or an embedding."""
    return _is_of_peft(module, "LoraLayer")


def base_of(module: nn.Module) -> nn.Module:
    """The linear map that peft put its layer around; the module itself where it did not."""
    base: nn.Module = module.base_layer if is_adapted(module) else module  # type: ignore[assignment]
    return base


def adapters_of(module: nn.Module) -> list[Adapter]:
    """The adapters of a layer around a linear map; none for another module."""
    if not is_adapted(module):
        return []
    layer: Any = module
    return [Adapter(name, a, layer.lora_B[name]) for name, a in layer.lora_A.items()]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every layer with adapters."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that peft put adapters into; the model itself where it did not."""
    wrapped: Any = model
    return wrapped.base_model.model if _is_of_peft(model, "PeftModel") else model


def name_in_base(name: str, model: nn.Module) -> str | None:
    """The name in the model without adapters of a module, parameter or buffer of `model`; None for an adapter's own.

    Raises nothing: names of a model without adapters are given back as they are.
    """
    if not _is_of_peft(model, "PeftModel"):
        return name
    parts, module, kept = name.split("."), model, []
    for part in parts:
        inside = is_adapted(module)
        if inside and part != "base_layer":
            return None
        if not inside:
            kept.append(part)
        module = getattr(module, part, module)
    return ".".join(kept).removeprefix("base_model").removeprefix(".").removeprefix("model").removeprefix(".")


def refuse_other_adapters(model: nn.Module, *, split: bool) -> None:
    """Refuse what adapters could do that no strategy can keep right; with `split`, what a tensor axis cannot.

    Raises StrategyError with the name of the layer.
    """
    for name, module in model.named_modules():
        layer: Any = module
        if _is_of_peft(module, "ParamWrapper"):
            raise StrategyError(
                f"{name!r} is LoRA on a parameter (target_parameters), which no strategy spreads; use target_modules"
            )
        if not is_adapted(module) or not split:
            continue
        if layer.lora_embedding_A:
            raise StrategyError(
                f"{name!r} is LoRA on an embedding, whose vocabulary the tensor axis splits; leave it out of "
                "target_modules, or use tensor: 1"
            )
        if layer.lora_variant:
            kinds = ", ".join(sorted({type(variant).__name__ for variant in layer.lora_variant.values()}))
            raise StrategyError(
                f"{name!r} is a variant of LoRA ({kinds}) that needs whole weights; use plain LoRA, or tensor: 1"
            )


def initialise(layer: Any, adapter: str, module: nn.Linear, how: object) -> None:
    """Draw the values of `module`, one of an adapter's two maps in `layer`, as peft does for `init_lora_weights`.

    Raises StrategyError where that needs the base's values.
    """
    if how is False:
        module.reset_parameters()  # what torch gave it when peft made it
    elif how is True or (isinstance(how, str) and how.lower() == "gaussian"):
        layer.reset_lora_parameters(adapter, how)
    else:
        raise StrategyError(
            f"init_lora_weights={how!r} is computed from the base model's values, which are not there when a model is "
            "built on the meta device; use True or 'gaussian', or build the model with values"
        )


def _is_of_peft(module: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith("peft.") for cls in type(module).__mro__)


# Magnitudes of DoRA (Liu et al., arXiv 2402.09353): of each output feature, the norm of the weights that give it.
#
#     W' = m · (W + s B A) / ‖W + s B A‖          m: [out], the norm over each row
#
# A magnitude begins as ‖W + s B A‖. Each rank computes those of its rows from slices of W, so that nothing is
# communicated and no rank needs the whole of W; values are the same under any strategy.

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
