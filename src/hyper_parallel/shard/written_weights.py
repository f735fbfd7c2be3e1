"""Weights and buffers that a model's own forward pass writes: kept, where every rank writes the same.

A weight that is clipped, a teacher that follows its student or an embedding with `max_norm` is written in the gathered
tensor, which FSDP2 frees. What was written goes to each rank's shard before that. It is found by version counters, and
where code goes past these (`weight.data`), by comparing values. Ranks see other rows, so that what depends on the rows
would differ between them; checksums tell, and such a model is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat.fsdp_groups import GroupParameter, ParameterGroup, watch_data
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.agreed_collectives import AgreedCollectives
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.weights_elsewhere import WRITTEN_UNDER_TENSOR
from hyper_parallel.shard.written_buffers import Checksum, WrittenBuffers, checksum, refuse_differences
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
        names = {id(p): name for name, p in model.named_parameters()}
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
