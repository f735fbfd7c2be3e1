"""Weights and buffers that a model's own forward pass writes, or uses where they are shards.

A weight that is clipped, a teacher that follows its student or an embedding with `max_norm` is written in the gathered
tensor, which FSDP2 frees. What was written goes to each rank's shard before that. It is found by version counters, and
where code goes past these (`weight.data`), by comparing values. Ranks see other rows, so that what depends on the rows
would differ between them; checksums tell, and such a model is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.compat.fsdp_groups import CHANGED_OUTPUT, GroupParameter, ParameterGroup, watch_data
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.agreed_collectives import AgreedCollectives
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.model_structure import REGISTERED, names_of_parameters
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.strategy import Strategy

_SAMPLED = 64


class WrittenWeights:
    """Finds what a forward pass writes, stores it, and compares it between the ranks."""

    def __init__(
        self, model: nn.Module, collectives: AgreedCollectives, axes: ProcessMesh, *, buffers: bool
    ) -> None:
        """`buffers`: compare written buffers too."""
        self._model, self._collectives, self._axes = model, collectives, axes
        self._buffers = WrittenBuffers(model, axes) if buffers else None
        names = names_of_parameters(model)
        self._names = {
            id(one.state): names[id(one.sharded)]
            for group in collectives.groups
            for one in group.parameters
            if id(one.sharded) in names
        }
        self._active = False
        self._versions: dict[int, int] = {}
        self._taken: dict[int, Tensor] = {}
        """Identity of a gathered parameter whose `.data` was taken, and its values then."""
        self._samples: dict[int, Tensor] = {}
        """Some values of gathered parameters that are split over the tensor axis, whose `.data` tells nothing."""
        self._written: dict[str, Checksum] = {}
        collectives.on_hold = self._note_gathered
        for group in collectives.groups:
            if group.name:
                wrap(group.module, self._around(group))
            for owner in {id(one.owner): one.owner for one in group.parameters}.values():
                owner.register_state_dict_pre_hook(self._refuse_state_dict)
                owner.register_load_state_dict_pre_hook(self._refuse_state_dict)

    def begin(self) -> None:
        """A forward pass begins."""
        # In inference mode tensors have no version counters.
        self._active = not torch.is_inference_mode_enabled()
        self._written.clear()
        self._versions.clear()
        self._note_gathered()
        if self._active and self._buffers is not None:
            self._buffers.begin()

    def abandon(self) -> None:
        """The forward pass raised an exception."""
        self._active = False
        self._taken.clear()
        self._samples.clear()

    def find(self) -> bool:
        """The forward pass has ended: whether it wrote something."""
        if not self._active:
            return False
        for group in self._collectives.groups:
            if group.is_gathered:
                self._find(group)
        if self._buffers is not None:
            self._written |= self._buffers.found()
        self._taken.clear()
        self._samples.clear()
        self._active = False
        return bool(self._written)

    def compare(self) -> None:
        """Compare what ranks wrote. A collective. Raises StrategyError where it differs."""
        buffers = self._buffers.names if self._buffers is not None else []
        refuse_differences(self._model, [*self._names.values()], buffers, self._written, self._axes)

    @property
    def _model_name(self) -> str:
        return type(self._model).__name__.removeprefix("FSDP")

    def _around(self, group: ParameterGroup) -> Any:
        """A wrapper of a unit, whose weights may be freed after it."""

        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if self._active:
                self._note(group)
            output = forward(*args, **kwargs)
            if self._active and group.is_gathered:
                self._find(group)
            return output

        return wrapper

    def _refuse_state_dict(self, module: nn.Module, *_: Any) -> None:
        """FSDP2 frees the gathered weights for a state dict."""
        if self._active:
            raise StrategyError(
                f"the forward pass of {self._model_name} takes or loads the state dict of a {type(module).__name__}, "
                "which has the shards of its weights; copy weight by weight: "
                "for a, b in zip(to.parameters(), of.parameters()): a.copy_(b)"
            )

    def _note_gathered(self) -> None:
        for group in self._collectives.groups:
            if self._active and group.is_gathered:
                self._note(group)

    def _note(self, group: ParameterGroup) -> None:
        for one in group.parameters:
            gathered = one.gathered
            if gathered is not None:
                watch_data(gathered, self._data_taken)
                self._versions.setdefault(id(one.state), _local(gathered)._version)
                if isinstance(gathered, DTensor) and id(one.state) not in self._samples:
                    self._samples[id(one.state)] = _sample(gathered)

    def _data_taken(self, parameter: Tensor) -> None:
        if self._active and id(parameter) not in self._taken:
            self._taken[id(parameter)] = torch.Tensor.detach(parameter).clone()

    def _find(self, group: ParameterGroup) -> None:
        for one in group.parameters:
            gathered = one.gathered
            if gathered is None:
                continue
            before = self._samples.pop(id(one.state), None)
            if before is not None and not torch.equal(before, _sample(gathered)):
                name = self._names.get(id(one.state), one.own)
                raise StrategyError(
                    f"the forward pass of {self._model_name} writes the weight {name!r}, {WRITTEN_UNDER_TENSOR}"
                )
            version = _local(gathered)._version
            noted = self._versions.setdefault(id(one.state), version)
            taken = self._taken.pop(id(gathered), None)
            if version != noted or (taken is not None and not torch.equal(taken, gathered.detach())):
                self._versions[id(one.state)] = version
                self._store(one, gathered)

    def _store(self, one: GroupParameter, gathered: nn.Parameter) -> None:
        name = self._names.get(id(one.state), one.own)
        if gathered.dtype != one.sharded.dtype:
            raise StrategyError(
                f"the forward pass of {self._model_name} writes the weight {name!r}, which is stored in "
                f"{one.sharded.dtype} and computed with in {gathered.dtype}: what is written would round all of it; "
                "write it outside of the forward pass, or set precision.compute to the dtype of precision.param"
            )
        with torch.no_grad():
            one.store()
        self._written[name] = checksum(_local(gathered))


def agree_on_collectives(model: nn.Module, axes: ProcessMesh, strategy: Strategy) -> None:
    """Have ranks agree on the collectives of a model whose code may branch, and keep what its forward pass writes."""
    # At this level weights are gathered for the whole step, and gradients kept whole, in any case.
    agreed = AgreedCollectives(model, axes, whole=strategy.memory.shard == "optimizer")
    written = WrittenWeights(model, agreed, axes, buffers=strategy.check)

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        agreed.begin_forward()
        written.begin()
        try:
            output = forward(*args, **kwargs)
            wrote = written.find()
        except BaseException:
            agreed.abandon()
            written.abandon()
            raise
        if agreed.end_forward(wrote):
            written.compare()
        return output

    wrap(model, wrapper)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sample(tensor: Tensor) -> Tensor:
    values = _local(tensor).detach().flatten()
    return values[:: max(values.numel() // _SAMPLED, 1)].clone()


# Buffers that a forward pass writes, on every rank alike.
#
# Ranks see other rows, so that a buffer which depends on them would differ between ranks. Checksums tell, and such a
# model is refused.

Checksum = tuple[float, float, float]
"""Elements, their sum, and that of their squares."""
_NOTHING: Checksum = (-1.0, 0.0, 0.0)


class WrittenBuffers:
    """Finds which buffers a forward pass writes, and compares them between the ranks."""

    def __init__(self, model: nn.Module, axes: ProcessMesh) -> None:
        self._model, self._axes = model, axes
        self._before: dict[str, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A forward pass begins."""
        self._before = {
            name: (x, x._version) for name, x in self._model.named_buffers() if not x.is_inference()
        }

    def found(self) -> dict[str, Checksum]:
        """The weights that the forward pass wrote."""
        now = dict(self._model.named_buffers())
        return {
            name: checksum(now[name])
            for name, (before, version) in self._before.items()
            if name in now and (now[name] is not before or now[name]._version != version)
        }

    @property
    def names(self) -> list[str]:
        """The names that there were at the beginning."""
        return sorted(self._before)

    @contextlib.contextmanager
    def alike(self, never: bool = False) -> Iterator[None]:
        """Inside, a forward pass runs. A collective, where the model has buffers. `never`: as if it had none.

        Raises StrategyError where ranks write other values.
        """
        if never or torch.is_inference_mode_enabled() or not any(True for _ in self._model.buffers()):
            yield
            return
        self.begin()
        yield
        written = self.found()
        if self._axes.any([bool(written)])[0]:
            refuse_differences(self._model, [], self.names, written, self._axes)


def refuse_differences(
    model: nn.Module,
    weights: Sequence[str],
    buffers: Sequence[str],
    written: Mapping[str, Checksum],
    axes: ProcessMesh,
) -> None:
    """Raise StrategyError where ranks wrote other values. A collective; every rank gives the same names."""
    names = [*weights, *buffers]
    mine = [value for name in names for value in written.get(name, _NOTHING)]
    greatest = axes.greatest([*mine, *(-value for value in mine)])
    high, low = greatest[: len(mine)], [-value for value in greatest[len(mine) :]]
    for at, name in enumerate(names):
        here = slice(3 * at, 3 * at + 3)
        is_buffer = at >= len(weights)
        cached = is_buffer and min(low[3 * at], high[3 * at]) >= 0 and low[3 * at] != high[3 * at]
        # Tables that grow with the longest row differ in size, and are no state.
        if high[here] != low[here] and not cached:
            raise StrategyError(
                f"the forward pass of {type(model).__name__.removeprefix('FSDP')} writes the "
                f"{'buffer' if is_buffer else 'weight'} {name!r}, and not the same on every rank: what it writes "
                "depends on the rows that the rank has; write it outside of the forward pass from what all ranks "
                "know, or set axes.shard and axes.replicate to 1"
            )


def checksum(tensor: Tensor) -> Checksum:
    """The checksum of a tensor's values."""
    values = tensor.detach().double()
    numbers = (float(values.numel()), float(values.sum()), float(values.square().sum()))
    return tuple(-2.0 if value != value else value for value in numbers)  # type: ignore[return-value]


_USED = "got mixed torch.Tensor and DTensor"
_WRITTEN = ("Output 0 of _Moved is a view", "Output 0 of _Local is a view")
WRITTEN_UNDER_TENSOR = (
    "which is kept under axes.shard and axes.replicate alone; write it outside of the forward pass, or set axes.tensor "
    "to 1"
)


def refuse_parameters_in_attributes(model: nn.Module) -> None:
    """Raise StrategyError for a parameter that a module keeps in an attribute: another one will take its place."""
    names = names_of_parameters(model)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in REGISTERED or (isinstance(module, nn.RNNBase) and key == "_flat_weights"):
                continue
            kept = next((names[id(one)] for one in leaves_of(value) if id(one) in names), None)
            if kept is not None:
                raise StrategyError(
                    f"the module {name or type(model).__name__!r} keeps the parameter {kept!r} in its attribute "
                    f"{key!r}, which would stay what it is now while shards are trained; take it from its module in "
                    "the forward pass"
                )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise StrategyError for an embedding with sparse gradients, which no collective reduces."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise StrategyError(
                f"{name!r} is an {type(module).__name__} with sparse=True, and sparse gradients cannot be reduced over "
                "ranks; build it with sparse=False"
            )


def explain_errors(model: nn.Module) -> None:
    """Raise StrategyError where the model's code meets a shard in a weight's place."""
    name = type(model).__name__.removeprefix("FSDP")

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if _USED in text:
                raise StrategyError(
                    f"the forward pass of {name} uses a weight outside of the layer that it belongs to, or in a hook "
                    "before that layer's forward pass, where axes.tensor with axes.shard or axes.replicate has a "
                    "shard of it; use it inside, or set axes.tensor to 1"
                ) from error
            if CHANGED_OUTPUT in text:
                raise StrategyError(
                    f"the forward pass of {name} changes the output of one of its layers in place, which is a view, so "
                    "that the layer's weights would not be gathered for the backward pass; write out = out + x in the "
                    "place of out += x"
                ) from error
            if any(one in text for one in _WRITTEN):
                raise StrategyError(
                    f"the forward pass of {name} writes a weight, {WRITTEN_UNDER_TENSOR}"
                ) from error
            raise

    wrap(model, wrapper)
