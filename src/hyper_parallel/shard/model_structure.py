"""Model structure: decoder layers, attention heads, fused projections."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hyper_parallel.compat.pytree import leaves_of
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.rules import decoder_of, is_transformers

REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))
"""The attributes in which `nn.Module` keeps what is registered."""


@dataclass(frozen=True)
class Heads:
    """An attention's heads: H query heads, K key and value heads (K divides H), each of `size` features."""

    query: int
    kv: int
    size: int
    latent: bool = False
    """Multi-head latent attention: keys and values have as many heads as queries, and sizes of their own."""

    @property
    def fused(self) -> tuple[int, int, int]:
        """Features of query, key and value in one projection."""
        return (self.query * self.size, self.kv * self.size, self.kv * self.size)


def text_config(model: nn.Module) -> object | None:
    """The config of the language model; None for a module that is not Transformers'."""
    if not is_transformers(model):
        return None
    config: Any = without_adapters(model).config
    text: object = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text


def heads_of(module: nn.Module, config: object | None) -> Heads | None:
    """The heads of an attention module, or None for a module that is no attention."""
    query = getattr(config, "num_attention_heads", None)
    if not isinstance(query, int):
        return None
    latent = getattr(module, "qk_head_dim", None)
    if isinstance(latent, int) and hasattr(module, "kv_b_proj"):
        return Heads(query, query, latent, latent=True)
    size = getattr(module, "head_dim", None)
    if not isinstance(size, int):
        return None
    kv = getattr(config, "num_key_value_heads", None) or query
    return Heads(query, int(kv), size)


def heads_in_encoder(module: nn.Module) -> Heads | None:
    """The heads of an attention of an encoder, or of a decoder behind one: each module says what its own are."""
    counts = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_heads"))
    sizes = (
        getattr(module, name, None) for name in ("head_dim", "attention_head_size", "key_value_proj_dim")
    )
    query, size = (next((n for n in found if isinstance(n, int)), None) for found in (counts, sizes))
    return None if query is None or size is None else Heads(query, query, size)


def fused_parts(name: str, features: int, parent: nn.Module, heads: Heads | None) -> tuple[int, ...]:
    """The lengths of the parts that a fused projection's output consists of; one part when it is not fused."""
    last = name.rsplit(".", 1)[-1]
    siblings = {child.rsplit(".", 1)[-1] for child, _ in parent.named_children()}
    if heads is not None and features == sum(heads.fused) and not siblings & {"k_proj", "key", "kv_b_proj"}:
        return heads.fused
    if last == "gate_up_proj" and features % 2 == 0:
        return (features // 2, features // 2)
    return (features,)


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The name and the list of the model's decoder layers.

    In a Transformers model: the longest list, in the language model's decoder, of modules of the classes that the
    model says not to split. Otherwise: the longest ModuleList whose elements are all of one class. None when there is
    none.
    """
    unsplit = set(getattr(without_adapters(model), "_no_split_modules", None) or ())
    decoder = decoder_of(model) if is_transformers(model) else ""
    found: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList)
            or isinstance(module, ParametrizationList)
            or len(module) == 0
        ):
            continue
        if decoder and not name.startswith(f"{decoder}."):
            continue
        classes = {type(layer).__name__ for layer in module}
        fits = classes <= unsplit if unsplit else len(classes) == 1
        if fits and (found is None or len(module) > len(found[1])):
            found = (name, module)
    return found


def layers_or_refuse(model: nn.Module, why: str) -> tuple[str, nn.ModuleList]:
    """The decoder layers; a StrategyError that says what needed them when there are none."""
    found = layers_of(model)
    if found is None:
        raise StrategyError(
            f"{why} needs the model's layers in one nn.ModuleList, and {type(model).__name__} has none"
        )
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is Transformers' Conv1D: a linear map that keeps its weight as [in, out]."""
    return type(module).__name__ == "Conv1D"


def dim_of_features(module: nn.Module, output: bool) -> int:
    """The dim of a projection's weight that its output (or input) features lie on."""
    return int(output == is_conv1d(module))


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model without its values: every parameter and buffer is on the meta device."""
    known: dict[int, object] = {id(x): torch.empty_like(x, device="meta") for x in computed_attributes(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        for buffer in model.buffers():
            known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, known)


def computed_attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that modules keep of a forward pass, or of weights (`nn.utils.weight_norm`): a deep copy refuses
    what autograd computed."""
    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if key not in REGISTERED}
        yield from (x for x in leaves_of(own) if isinstance(x, torch.Tensor) and not x.is_leaf)


def is_by_head(parameter: nn.Parameter | None, heads: Heads) -> bool:
    """Whether an attention's own parameter has one element for each query head, as attention sinks do."""
    return parameter is not None and tuple(parameter.shape) == (heads.query,)


def parameter_of(module: nn.Module, own: str) -> nn.Parameter:
    """A module's own parameter, which must be there."""
    parameter = module._parameters[own]
    assert parameter is not None
    return parameter
