"""Model structure: decoder and layers, attention heads, projections, and modules of submodels."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.shard.lora_adapters import base_of, name_in_base, without_adapters
from hyper_parallel.strategy.axes import Submodel

REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))
"""The attributes in which `nn.Module` keeps what is registered."""


def is_transformers(model: nn.Module) -> bool:
    """Whether the model is one of Transformers', with adapters in it or without; found out without importing either."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers")
        for cls in type(without_adapters(model)).__mro__
    )


def is_own(model: nn.Module) -> bool:
    """Whether the model's code is the user's own, and not that of one of Transformers' families."""
    return not type(without_adapters(model)).__module__.startswith("transformers.")


def decoder_of(model: nn.Module) -> str:
    """The name of the language model's decoder in a Transformers model: what holds the layers, and no vision tower."""
    core: Any = without_adapters(model)
    decoder = core.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def has_encoder(model: nn.Module) -> bool:
    """Whether a Transformers model attends in both directions: an encoder, or one with a decoder behind it.

    A vision tower beside a language model is none: the language model is what is spread.
    """
    core: Any = without_adapters(model)
    if getattr(core.config, "is_encoder_decoder", False):
        return True
    decoder = model.get_submodule(decoder_of(model))
    causal = {getattr(module, "is_causal", None) for module in decoder.modules()}
    return False in causal and True not in causal


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The table of the input ids; None where a model has none, as those of images have."""
    core: Any = without_adapters(model)
    try:
        found: nn.Module | None = core.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


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


def configs_of(model: nn.Module) -> Iterator[Any]:
    """The configs that modules hold, and those inside of them: of the text, of a tower, of the two stacks."""
    seen: set[int] = set()
    pending = [c for module in model.modules() if (c := getattr(module, "config", None)) is not None]
    while pending:
        config = pending.pop()
        if id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            pending += [value for key, value in vars(config).items() if key.endswith("config")]
            yield config


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


def is_projection(module: nn.Module) -> bool:
    """Whether the module, or what its adapter wraps, is a linear map: nn.Linear or Conv1D."""
    return isinstance(base_of(module), nn.Linear) or is_conv1d(base_of(module))


def dim_of_features(module: nn.Module, output: bool) -> int:
    """The dim of a projection's weight that its output (or input) features lie on."""
    return int(output == is_conv1d(module))


def features_of(module: nn.Module, output: bool) -> int:
    """The number of output (or input) features of a projection, or of the one that its adapter wraps."""
    base = base_of(module)
    return int(parameter_of(base, "weight").shape[dim_of_features(base, output)])


def parameter_of(module: nn.Module, own: str) -> nn.Parameter:
    """A module's own parameter, which must be there."""
    parameter = module._parameters[own]
    assert parameter is not None
    return parameter


def owns_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters itself, not only in the modules below it."""
    return any(parameter is not None for parameter in module._parameters.values())


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def is_called_attention(module: nn.Module) -> bool:
    """Whether a module is an attention by the name of its class, whose heads need not be recognised."""
    return re.search("attention|attn", type(module).__name__, re.IGNORECASE) is not None


def is_inside(name: str, parent: str) -> bool:
    """Whether a module is `parent` or lies in it, by its dotted name."""
    return name == parent or name.startswith(f"{parent}.")


def names_of_parameters(model: nn.Module) -> dict[int, str]:
    """`id` of each parameter to its name; of one that modules share, the first."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model without its values: every parameter and buffer is on the meta device."""
    empty = functools.partial(torch.empty_like, device="meta")
    return copied(model, empty, empty)


def copied(
    model: nn.Module, parameter: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A deep copy of a model, with what `parameter` makes of each parameter and `other` of each other tensor: buffers,
    and what modules keep of a forward pass or of weights (`nn.utils.weight_norm`), which a deep copy would refuse."""
    with torch.no_grad():
        known: dict[int, object] = {id(x): other(x) for x in (*_computed_attributes(model), *model.buffers())}
        for old in model.parameters():
            known[id(old)] = nn.Parameter(parameter(old), old.requires_grad)
    return copy.deepcopy(model, known)


def _computed_attributes(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that autograd computed and modules keep in attributes."""
    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if key not in REGISTERED}
        yield from (x for x in leaves_of(own) if isinstance(x, Tensor) and not x.is_leaf)


def is_by_head(parameter: nn.Parameter | None, heads: Heads) -> bool:
    """Whether an attention's own parameter has one element for each query head, as attention sinks do."""
    return parameter is not None and tuple(parameter.shape) == (heads.query,)


def assigned_modules(model: nn.Module, submodels: Mapping[str, Submodel]) -> dict[str, int]:
    """Names of modules to the places of their submodels, in the order of `submodels`; what a module contains belongs to
    it. "" is the submodel that has all others, if there is one. Where the model has adapters, `submodels` name modules
    as the model without them does.

    Raises StrategyError for a module that the model does not have or that two submodels name, for several submodels
    without modules, and for weights that no submodel has.
    """
    known: dict[str, str] = {}
    for path, _ in model.named_modules():
        plain = name_in_base(path, model)
        if plain is not None:
            known.setdefault(plain, path)  # what an adapter is put around is inside of it
    found: dict[str, int] = {}
    rest = [name for name, one in submodels.items() if not one.modules]
    if len(rest) > 1:
        raise StrategyError(
            f"submodels: {' and '.join(rest)} name no modules; one of them may have all others, and the rest must "
            "name theirs (modules)"
        )
    for place, (name, one) in enumerate(submodels.items()):
        for module in one.modules:
            if module not in known or not module:
                raise StrategyError(
                    f"submodels.{name}: the model has no module {module!r}{nearest(module, filter(None, known))}"
                )
            path = known[module]
            for other, taken in found.items():
                if is_inside(path, other) or is_inside(other, path):
                    raise StrategyError(
                        f"submodels.{name}: {module!r} overlaps {name_in_base(other, model)!r} of "
                        f"{list(submodels)[taken]}; give each module to one submodel"
                    )
            found[path] = place
    if rest:
        found[""] = list(submodels).index(rest[0])
    _check_weights(model, submodels, found)
    return found


def submodel_of(assigned: Mapping[str, int]) -> Callable[[str], int | None]:
    """The submodel of a module by its name, with `assigned` as of `assigned_modules`; None for a module that contains
    several: its own code joins their values, and belongs where these are.

    >>> of = submodel_of({"model.vision_tower": 0, "": 1})
    >>> of("model.vision_tower.layers.0"), of("model.language_model"), of("model")
    (0, 1, None)
    """
    containing = {""} | {
        module[:at] for module in assigned for at, letter in enumerate(module) if letter == "."
    }

    def found(module: str) -> int | None:
        return None if module in containing and module not in assigned.keys() - {""} else of(module)

    of = by_modules(assigned)
    return found


def _check_weights(model: nn.Module, submodels: Mapping[str, Submodel], found: Mapping[str, int]) -> None:
    """Every weight has a submodel, and every submodel a weight."""
    having: set[int] = set()
    for weight, _ in model.named_parameters():
        owners = [place for module, place in found.items() if module and is_inside(weight, module)]
        if not owners and "" not in found:
            raise StrategyError(
                f"submodels: no submodel has {weight!r}; name its module in one, or leave modules out in one, which "
                "then has all others"
            )
        having.add(owners[0] if owners else found[""])
    for place, name in enumerate(submodels):
        if place not in having:
            raise StrategyError(f"submodels.{name}: no weights are left for it; leave it out")
