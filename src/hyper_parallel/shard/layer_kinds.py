"""Decoder layers by kind under a strategy, and models with few of their layers: copies, or captures that skip some.

Two layers are of one kind if they are alike as modules (`graph.likeness`), each config's list with an entry for
every layer says the same of both, the plan and the dtypes are the same, and both or neither are recomputed. What one
layer of each kind costs, or looks like as a graph, is found once.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.graph.likeness import kinds
from hyper_parallel.graph.period_pattern import Unlike
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.memory import compute_dtypes, frees_after_forward, separately_gathered
from hyper_parallel.shard.model_structure import is_inside, owns_parameters, text_config
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.rules import matching
from hyper_parallel.strategy import Strategy, recomputed_layers


def layer_kinds(model: nn.Module, plan: Plan, strategy: Strategy) -> list[list[int]]:
    """The indices of the decoder layers by kind, in order of each kind's first layer; empty without layers."""
    layers = layers_in(model, plan)
    if layers is None:
        return []
    dtypes = compute_dtypes(model, strategy.precision)
    frees = frees_after_forward(strategy.memory, separately_gathered(model, plan, dtypes))
    per_layer = _per_layer(text_config(model), len(layers))
    again = set(recomputed_layers(strategy.memory, [len(layers)]))

    def more(index: int) -> dict[str, str]:
        settings = {f"config {key}": repr(values[index]) for key, values in per_layer.items()}
        settings["recomputed"] = str(index in again)
        return {**settings, **_placement(f"{plan.layers}.{index}", layers[index], plan, dtypes, frees)}

    return kinds(layers, more)


def layers_in(model: nn.Module, plan: Plan) -> nn.ModuleList | None:
    """The decoder layers that the plan found."""
    if plan.layers is None:
        return None
    layers = model.get_submodule(plan.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def with_layers(
    model: nn.Module, plan: Plan, strategy: Strategy, keep: Sequence[int]
) -> tuple[nn.Module, Strategy]:
    """A copy of the model with only the layers `keep`, ascending, and the strategy with rules for their new names.

    The config of a Transformers model is adapted: the number of layers, and each list with one entry per layer.
    """
    layers, name = layers_in(model, plan), plan.layers
    assert layers is not None
    assert name is not None
    parent_name, _, own = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    try:
        setattr(parent, own, nn.ModuleList(layers[index] for index in keep))
        copied = copy.deepcopy(model)
    finally:
        setattr(parent, own, layers)
    config: Any = text_config(copied)
    if config is not None:
        for key, values in _per_layer(config, len(layers)).items():
            setattr(config, key, [values[index] for index in keep])
        config.num_hidden_layers = len(keep)
    return copied, _renamed(model, plan, strategy, keep)


def _renamed(model: nn.Module, plan: Plan, strategy: Strategy, keep: Sequence[int]) -> Strategy:
    """Patterns written out for the modules they match, by the names that these have in the smaller model."""
    new = {f"{plan.layers}.{old}": f"{plan.layers}.{at}" for at, old in enumerate(keep)}
    names = [name for name, _ in model.named_modules()]
    owners = [name for name, module in model.named_modules() if owns_parameters(module)]

    def renamed(name: str) -> str | None:
        for prefix in new:
            if is_inside(name, prefix):
                return new[prefix] + name[len(prefix) :]
        return None if name.startswith(f"{plan.layers}.") else name

    def written_out(patterns: Mapping[str, Any], among: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pattern, value in patterns.items():
            for name in matching(pattern, among):
                known = renamed(name)
                if known is not None:
                    # Of several patterns that match, the last holds: its place is the last too.
                    found.pop(known, None)
                    found[known] = value
        return found

    precision = strategy.precision.model_copy(
        update={"modules": written_out(strategy.precision.modules, names)}
    )
    changed: dict[str, Any] = {
        "rules": written_out(strategy.rules, owners),
        "precision": precision,
        "expert_replicas": written_out(strategy.expert_replicas, names),
    }
    memory: dict[str, Any] = {}
    if isinstance(strategy.memory.recompute_layers, int):
        # The first layers of the model are recomputed, and so the first of those that are kept.
        count = sum(layer < strategy.memory.recompute_layers for layer in keep)
        memory |= {"recompute_layers": count} if count else {"recompute": "none", "recompute_layers": None}
    if isinstance(strategy.memory.reshard_after_forward, dict):
        apart = separately_gathered(model, plan, compute_dtypes(model, strategy.precision))
        frees = frees_after_forward(strategy.memory, apart)
        by_name = {known: free for name, free in frees.items() if (known := renamed(name)) is not None}
        memory["reshard_after_forward"] = by_name
    changed["memory"] = strategy.memory.model_copy(update=memory)
    return strategy.model_copy(update=changed)


def _placement(
    name: str, layer: nn.Module, plan: Plan, dtypes: Mapping[str, torch.dtype], frees: Mapping[str, bool]
) -> dict[str, str]:
    """How a strategy places a layer and computes it."""
    found: dict[str, str] = {}
    for path, module in layer.named_modules():
        full = f"{name}.{path}" if path else name
        planned = (plan.modules.get(full), plan.regions.get(full), plan.experts.get(full), frees.get(full))
        # A plan names other modules of its layer, which stand at the same place in each.
        found[f"{path}:plan"] = repr((dtypes[full], *planned, *_listed(full, plan))).replace(f"{name}.", "")
        for own in module._parameters:
            known = plan.parameters.get(f"{full}.{own}")
            if known is not None:
                found[f"{path}:{own}:plan"] = f"{known.layout} {known.storage} {known.summed} {known.chosen}"
    return found


def _listed(name: str, plan: Plan) -> list[Any]:
    """What the parts of a plan say of a module that list modules."""
    found: list[Any] = [name in plan.whole]
    if plan.context is not None:
        found.append(name in plan.context.attentions)
    if plan.tensor2d is not None:
        two = plan.tensor2d
        found += [two.attentions.get(name), two.mlps.get(name), two.norms.get(name), name in two.swapped]
    return found


def _per_layer(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """The config's lists with an entry for every layer."""
    if config is None:
        return {}
    return {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }


# Captures a model with few of its layers: the others run as modules that hand on what they are given.
#
# A model's own code goes through all of its layers, with the indices and the settings that it has for each. A layer
# that is skipped returns what the layer in front returned, and checks that it was called as the layer is that stands
# for it: with the same tensors and numbers, but for the activations that flow from layer to layer. What is between the
# layers in the model's own code is so run as often as there are layers, whatever it depends on, and seen in the graph.
#
# A layer may know its own index. While layers are skipped no index can be read: code that computes with it would be
# another in each layer.

_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def layers_skipped(
    layers: nn.ModuleList,
    name: str,
    like: Mapping[int, int],
    own_index: Sequence[Mapping[str, Sequence[str]]],
) -> Iterator[None]:
    """Inside, the layers of the keys of `like` are skipped; the values are the layers that stand for them, each in
    front of the layers that it stands for.

    `name`: of the list of layers; `own_index`: of each layer, the attributes that are its index
    (`alike_layers.own_index`). Raises Unlike inside for a layer that is called otherwise than that which stands for it,
    and for code that reads a layer's index; at the end where layers were not called equally often.
    """
    flow = _Flow()
    held = dict(layers._modules)
    kept = [index for index in range(len(held)) if index not in like]
    with contextlib.ExitStack() as undo:
        undo.callback(layers._modules.update, held)
        for index in kept:
            layer = layers[index]
            for handle in (
                layer.register_forward_pre_hook(flow.entering(index), with_kwargs=True),
                layer.register_forward_hook(flow.leaving()),
            ):
                undo.callback(handle.remove)
            _hide(layer, index, own_index[index], undo)
        for index, other in like.items():
            layers._modules[str(index)] = _Skipped(layers[index], index, other, flow)
        undo.enter_context(
            replace(current_step(), skipped=frozenset(f"{name}.{index}" for index in like)).installed()
        )
        yield
    flow.check(like)


class _Flow:
    """The tensors that go from layer to layer in a forward pass."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, Any]] = {}
        self._output: Any = None
        self._calls: Counter[int] = Counter()

    def entering(self, index: int) -> Callable[..., None]:
        """A hook of a layer that runs."""

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._given[index] = (args, kwargs)
            self._calls[index] += 1

        return hook

    def leaving(self) -> Callable[..., None]:
        """Likewise."""

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._output = output

        return hook

    def through(self, index: int, like: int, args: Any, kwargs: Any) -> Any:
        """The output of a layer that is skipped."""
        self._calls[index] += 1
        given = self._given.get(like)
        flowing = _tensors(self._output)
        if given is None or not flowing & _tensors((args, kwargs)):
            raise Unlike(f"layer {index} is not given what the layer in front of it returned")
        if not _alike((args, kwargs), given, flowing):
            raise Unlike(f"layer {index} is called otherwise than layer {like}")
        return self._output

    def check(self, like: Mapping[int, int]) -> None:
        """Raise Unlike where layers ran more often than others."""
        for index, other in like.items():
            if self._calls[index] != self._calls[other]:
                raise Unlike(
                    f"layer {index} runs {self._calls[index]} times, and layer {other} {self._calls[other]} times"
                )


class _Skipped(nn.Module):
    """Stands where a layer is, and hands on."""

    def __init__(self, layer: nn.Module, index: int, like: int, flow: _Flow) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _index=index, _like=like, _flow=flow)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer in front returned."""
        of = self.__dict__
        return of["_flow"].through(of["_index"], of["_like"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class _OwnIndex:
    """In place of a layer's index: may be handed on, and not be read."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unlike("a layer computes with its own index")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = _refuse


def _hide(
    layer: nn.Module, index: int, own_index: Mapping[str, Sequence[str]], undo: contextlib.ExitStack
) -> None:
    for path, names in own_index.items():
        part = layer.get_submodule(path)
        for name in names:
            if part.__dict__.get(name) != index:
                raise Unlike(f"{name} of layer {index} is not its index any more")
            undo.callback(part.__dict__.__setitem__, name, part.__dict__[name])
            part.__dict__[name] = _OwnIndex()


def _tensors(value: Any) -> set[int]:
    """The identities of the tensors in arguments or outputs."""
    return {id(leaf) for leaf in leaves_of(value) if isinstance(leaf, Tensor)}


def _alike(mine: Any, its: Any, flowing: set[int]) -> bool:
    """Whether two calls are given the same, but for what flows."""
    if mine is its or id(mine) in flowing:
        return isinstance(mine, Tensor) == isinstance(its, Tensor)
    if type(mine) is not type(its):
        return False
    if isinstance(mine, _PLAIN):
        return bool(mine == its)
    if isinstance(mine, Mapping):
        return mine.keys() == its.keys() and all(_alike(mine[key], its[key], flowing) for key in mine)
    if isinstance(mine, tuple | list):
        return len(mine) == len(its) and all(_alike(x, y, flowing) for x, y in zip(mine, its, strict=True))
    return False
