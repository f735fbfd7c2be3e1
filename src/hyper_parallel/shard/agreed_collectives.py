"""Collectives that ranks agree on, where the order in which weights are gathered is that of the user's own code.

FSDP2 gathers a unit's weights when its module runs and reduces gradients as autograd reaches them. In code that
branches on its rows, ranks come to other units, or to another number of them, and one rank's gather would meet
another's of something else. So no collective runs before all ranks are known to be at the same one:

- **The first pass of its kind** asks before each collective whether all ranks are at it, and notes the order.
- **Later passes** follow this order without asking. A rank whose code comes to another one than the next joins all that
  are left of it, as the others expect, and then says so in the one small all-reduce with which every pass ends.
- **Once ranks differ**, all weights are gathered before the forward pass, in one order, and all gradients are reduced
  after the backward pass, in one order. This is right for any code, and takes the memory of the whole model.

Which parameters have a gradient differs between ranks too. Where one rank has none it adds zeros; where no rank has
one, there is none afterwards, as on one device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.compat.fsdp_groups import (
    BackwardFlags,
    ParameterGroup,
    after_backward,
    parameter_groups,
    unchanged_in_place,
    watch_lookups,
)
from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.process_mesh import ProcessMesh

log = logging.getLogger(__name__)

_END = 0
"""The event of a rank that has come to the end of a pass."""
_HELD = BackwardFlags(reduce=False, reshard=False)


class _Kind(IntEnum):
    GATHER = 1
    REDUCE = 2
    LOOKUP = 3
    """A weight that is not gathered is used outside of its unit's forward pass."""
    TERM = 4
    """A unit leaves a term of the loss elsewhere than in its output, which autograd may come to first."""


_AGREED = (_Kind.GATHER, _Kind.REDUCE)
"""What may happen again in later passes; the others need all weights until the backward pass is over."""


def _event(kind: _Kind, group: int) -> int:
    return 1 + len(_Kind) * group + kind - 1


def _kind_and_group(event: int) -> tuple[_Kind, int]:
    group, kind = divmod(event - 1, len(_Kind))
    return _Kind(kind + 1), group


@dataclass
class _Pass:
    """A forward or a backward pass of this rank."""

    key: tuple[Any, ...]
    """Its kind. Passes of one kind have the same order of collectives, unless the code branches."""
    script: tuple[int, ...] | None
    """The order that passes of this kind had; None in the first."""
    position: int = 0
    """How many of the script have run."""
    noted: list[int] = field(default_factory=list)


class AgreedCollectives:
    """The gathers and reductions of one model on this rank."""

    def __init__(self, model: nn.Module, axes: ProcessMesh, *, whole: bool) -> None:
        """`whole`: gather and reduce all at once from the first pass on."""
        self.groups = parameter_groups(model)
        self._model, self._axes, self._whole = model, axes, whole
        self._index = {id(group): index for index, group in enumerate(self.groups)}
        self._scripts: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._pass: _Pass | None = None
        self._forwards = 0
        """Forward passes with gradients since the last backward pass."""
        self._trains = False
        """There was one: what FSDP2 announces outside of forward passes belongs to a backward pass; one graph may have
        several."""
        self._held: dict[int, BackwardFlags] | None = None
        """While everything is gathered: what each group's backward pass was asked to do."""
        self._unreduced: list[bool] = []
        """Whether each trained parameter had a gradient to reduce in this backward pass, on this rank."""
        self._before: list[bool] = []
        """Whether each had a reduced gradient before it."""
        self._partial: set[int] = set()
        """The places of those with a gradient that is not summed over copies yet."""
        self.on_hold: Callable[[], None] = lambda: None
        """Called when all weights are gathered."""
        for group in self.groups:
            # The root's weights are gathered when the model is called, which every rank does.
            group.announce(self._gathers if group.name else None, self._reduces)
            if group.name:
                watch_lookups(group, self._looked_up)
                wrap(group.module, self._around(group))
        self._trained = [(group, one) for group in self.groups for one in group.trained]
        self._places: dict[int, list[int]] = {id(group): [] for group in self.groups}
        for place, (group, _) in enumerate(self._trained):
            self._places[id(group)].append(place)
        after_backward(model, self._end_backward)

    # What the model's own wrapper calls.

    def begin_forward(self) -> None:
        """The root's weights are gathered, and its code runs next."""
        if not self._forwards:
            self._note_before()
        self._forwards += torch.is_grad_enabled()
        self._trains |= torch.is_grad_enabled()
        if self._whole:
            self._hold()
        self._pass = self._new_pass("forward", torch.is_grad_enabled())

    def end_forward(self, wrote: bool) -> bool:
        """The code has run. `wrote`: it wrote weights or buffers. Returns whether some rank's did."""
        assert self._pass is not None
        escalates, written = self._end_pass([wrote])
        if escalates:
            self._escalate()
            written = self._axes.any([wrote])
        self._pass = None
        if not self._forwards:
            self._release()
        return written[0]

    def abandon(self) -> None:
        """The code raised an exception."""
        self._pass = None
        self._forwards -= torch.is_grad_enabled()

    # What FSDP2 announces.

    def _gathers(self, group: ParameterGroup) -> None:
        self._comes_to(_event(_Kind.GATHER, self._index[id(group)]))

    def _reduces(self, group: ParameterGroup) -> None:
        if not self._trains:
            return  # of a module that was called by itself
        self._note_gradients(group)
        self._comes_to(_event(_Kind.REDUCE, self._index[id(group)]))

    def _looked_up(self, group: ParameterGroup) -> None:
        if self._follows_forward() and not group.is_gathered:
            self._comes_to(_event(_Kind.LOOKUP, self._index[id(group)]))

    def _around(self, group: ParameterGroup) -> Wrapper:
        """A wrapper of a unit's module."""

        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not self._follows_forward():
                return forward(*args, **kwargs)
            known = [*leaves_of((args, kwargs))]
            output = forward(*args, **kwargs)
            known += leaves_of(output)
            if leaves_terms(group.module, (args, kwargs), known):
                self._comes_to(_event(_Kind.TERM, self._index[id(group)]))
            return unchanged_in_place(output)

        return wrapper

    def _follows_forward(self) -> bool:
        """Whether a forward pass runs in which units are gathered one by one."""
        return self._pass is not None and self._pass.key[0] == "forward" and self._held is None

    def _note_before(self) -> None:
        self._before = [
            one.sharded.grad is not None or place in self._partial
            for place, (_, one) in enumerate(self._trained)
        ]
        self._unreduced = [False] * len(self._trained)

    def _note_gradients(self, group: ParameterGroup) -> None:
        for place in self._places[id(group)]:
            if self._trained[place][1].has_gradient:
                self._unreduced[place] = True

    # The protocol.

    def _new_pass(self, *key: Any) -> _Pass:
        gathered = tuple(group.is_gathered for group in self.groups)
        flags = tuple(group.flags for group in self.groups)
        key = (*key, self._model.training, gathered, flags)
        return _Pass(key, self._scripts.get(key))

    def _comes_to(self, event: int) -> None:
        """Return when all ranks have agreed that `event` is next, or when everything is gathered."""
        if self._pass is None and self._trains:
            self._pass = self._new_pass("backward", self._forwards)
        now = self._pass
        if now is None or self._held is not None:
            return
        kind, _ = _kind_and_group(event)
        if now.script is None:
            if self._at_one(event) and kind in _AGREED:
                now.noted.append(event)
                return
        elif now.position < len(now.script) and now.script[now.position] == event and kind in _AGREED:
            now.position += 1
            return
        else:
            self._join_the_rest(now)
            # The others come here at the end of their pass, with as many flags as it has.
            count = 1 if now.key[0] == "forward" else len(self._trained)
            self._axes.any([True, *[False] * count])
        self._escalate(event)

    def _end_pass(self, flags: list[bool]) -> tuple[bool, list[bool]]:
        """End this rank's pass: whether ranks differed in it, and which of the flags are set on some rank."""
        now = self._pass
        assert now is not None
        if self._held is not None:
            return False, self._axes.any(flags)
        # Gradients that came after their unit's were reduced: of a weight that is used elsewhere too.
        late = now.key[0] == "backward" and any(
            one.has_gradient for group, one in self._trained if group.flags.reduce
        )
        if now.script is None:
            if not self._at_one(_END):
                return True, flags
            self._scripts[now.key] = tuple(now.noted)
        else:
            late |= now.position < len(now.script)
            self._join_the_rest(now)
        differs, *some = self._axes.any([late, *flags])
        return differs, some

    def _join_the_rest(self, now: _Pass) -> None:
        """Gather and reduce with the other ranks what they still will: this rank adds the gradients that it has."""
        assert now.script is not None
        for event in now.script[now.position :]:
            kind, index = _kind_and_group(event)
            if kind == _Kind.GATHER:
                self.groups[index].gather()
            else:
                self._note_gradients(self.groups[index])
                self.groups[index].reduce()
        now.position = len(now.script)

    def _escalate(self, event: int | None = None) -> None:
        """From now on gather everything first and reduce everything last; every rank comes here together."""
        if not self._whole:
            name = self.groups[_kind_and_group(event)[1]].name if event is not None else None
            log.warning(
                "%s does not run, or use the weights of, the same modules in the same order on every rank%s: from "
                "now on all weights are gathered before a forward pass, and all gradients reduced after the "
                "backward pass, which needs the memory of the whole model",
                type(self._model).__name__.removeprefix("FSDP"),
                f" (found at {name!r})" if name else "",
            )
        self._whole = True
        self._hold()

    def _hold(self) -> None:
        """Gather everything, in the order of the modules, and hold back the reductions."""
        if self._held is None:
            self._held = {id(group): group.flags for group in self.groups}
        for group in self.groups:
            group.keep_after_forward()
            group.flags = _HELD
            group.finish_gather()
        # Where ranks differ, a rank may have gathered what another has freed again.
        missing = self._axes.any([not group.is_gathered for group in self.groups])
        for group, is_missing in zip(self.groups, missing, strict=True):
            if is_missing:
                group.free()
                group.gather()
        self.on_hold()

    def _release(self) -> None:
        """End a pass that no backward pass follows; `fsdp.keep_gathered_fresh` frees what it gathered."""
        if self._held is not None:
            for group in self.groups:
                group.flags = self._held[id(group)]
        self._held = None

    def _end_backward(self) -> None:
        """FSDP2 has ended a backward pass."""
        if not self._trains:
            return  # of modules that were called by themselves
        if self._pass is None:
            self._pass = self._new_pass("backward", self._forwards)
        if self._held is None:
            escalates, some = self._end_pass(self._unreduced)
            if escalates:
                self._escalate()
        if self._held is not None:
            self._reduce_all()
            some = self._axes.any(self._unreduced)
        for place, (group, one) in enumerate(self._trained):
            if not some[place] and not self._before[place]:
                one.sharded.grad = None
            elif group.sums_copies:
                self._partial.discard(place)
            else:
                self._partial.add(place)
        self._pass, self._forwards = None, 0
        self._note_before()

    def _reduce_all(self) -> None:
        """Reduce the gradients that are there, in the order of the modules."""
        assert self._held is not None
        for group in self.groups:
            group.flags = flags = self._held[id(group)]
            if flags.reduce:
                self._note_gradients(group)
                group.reduce()
            elif flags.reshard:
                group.free()
        for group in self.groups:
            group.settle()
        self._held = None

    # Agreement.

    def _at_one(self, event: int) -> bool:
        """Whether all ranks are at this event. A collective."""
        high, low = self._axes.greatest([float(event), -float(event)])
        return high == -low


def leaves_terms(module: nn.Module, given: Any, known: list[Any]) -> bool:
    """Whether a module keeps, or put into what it was given, a tensor with gradients that is none of `known`."""
    seen = {id(one) for one in known}
    kept = [leaf for part in module.modules() for value in vars(part).values() for leaf in _shallow(value)]
    return any(
        isinstance(one, Tensor) and one.grad_fn is not None and id(one) not in seen
        for one in [*kept, *leaves_of(given)]
    )


def _shallow(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    return value if isinstance(value, list | tuple) else (value,)
