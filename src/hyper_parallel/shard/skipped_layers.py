"""Captures a model with few of its layers: the others run as modules that hand on what they are given.

A model's own code goes through all of its layers, with the indices and the settings that it has for each. A layer that
is skipped returns what the layer in front returned, and checks that it was called as the layer is that stands for it:
with the same tensors and numbers, but for the activations that flow from layer to layer. What is between the layers in
the model's own code is so run as often as there are layers, whatever it depends on, and seen in the graph.

A layer may know its own index. While layers are skipped no index can be read: code that computes with it would be
another in each layer.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor, nn

from hyper_parallel.graph.period_pattern import Unlike
from hyper_parallel.graph.step_context import current_step

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
    """What goes from layer to layer in a forward pass."""

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
        flowing = {id(one) for one in _tensors(self._output)}
        if given is None or not flowing & {id(one) for one in _tensors((args, kwargs))}:
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
        """What the layer in front returned."""
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


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
