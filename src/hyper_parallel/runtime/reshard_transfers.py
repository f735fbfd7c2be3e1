"""Transfers between device groups of unlike meshes: each rank sends the boxes that others lack (`program.reshard`).

A value that k ranks of a group take crosses once: each receives a part of it at the `Recv`, and the others' parts from
its fellows at the `Wait`. All boxes from one rank to another are one message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program import Program, Recv, Send, Wait
from hyper_parallel.program.reshard import Buffer, ReshardPlan, Transfer, plan_reshard
from hyper_parallel.runtime.rank_transfers import RankTransfers, Transfers
from hyper_parallel.runtime.stage_runner import shaped

_ALIKE = 1e-2
"""By how much projections of copies may differ, of their length; copies have the same bits on most devices."""

_Boxes = dict[int, list[Transfer]]
"""Of a message by the rank at the other end."""


@dataclass(frozen=True)
class KnownPorts:
    """What a rank has found out about ports, for all Programs of a run."""

    largest_of_copies: Callable[[Tensor], Tensor] | None = None
    """Of fp64 [n], the largest over the ranks of this group that see the same rows, a collective of theirs. With it,
    the first value of each port is compared: its plan takes a value from one of the ranks that have all of it."""
    plans: dict[tuple[str, str], ReshardPlan] = field(default_factory=dict)
    """This rank's part of the plan that brings a port's value to a group."""
    compared: set[str] = field(default_factory=set)


class ReshardTransfers(RankTransfers):
    """What one rank sends and receives, of ports with a layout in each group. None of them is a pending sum."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        rank: int,
        transfers: Transfers,
        device: torch.device,
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
        known: KnownPorts | None = None,
    ) -> None:
        """Arguments as of `RankTransfers`."""
        super().__init__(program, partition, rank, transfers, device, turns)
        self._known = known or KnownPorts()

    def post(self, one: Recv) -> Tensor:
        """Post the receives of a value; `wait` gives it, and the memory that is given here has nothing."""
        for sender, boxes in self._received(self._plan(one.port, self.group.name), Buffer.SOURCE).items():
            self._post(self._to(one, sender), sender, boxes, one.port)
        return torch.empty(0, device=self._device)

    def send(self, one: Send, value: Tensor) -> None:
        """As `RankTransfers.send`."""
        whole = shaped(value, self.port(one.port))
        self._compare_copies(one.port, whole)
        for receiver, boxes in self._given(self._plan(one.port, one.to), Buffer.SOURCE).items():
            self._transfers.send(self._to(one, receiver), receiver, _packed(whole, boxes))

    def wait(self, one: Wait) -> Tensor:
        """As `RankTransfers.wait`."""
        port = self._program.ports[one.port]
        if port.group == self.group.name:
            for receiver in self._given(self._plan(one.port, one.peer), Buffer.SOURCE):
                self._transfers.wait(self._to(one, receiver))
            return torch.empty(0, device=self._device)
        plan, crossing = self._plan(one.port, self.group.name), self.port(one.port)
        flat = torch.empty(span(crossing.value), dtype=crossing.value.dtype, device=self._device)
        whole = shaped(flat, crossing)
        for sender, boxes in self._received(plan, Buffer.SOURCE).items():
            _unpack(self._transfers.wait(self._to(one, sender)), whole, boxes)
        self._gather(one, plan, whole)
        return flat

    def _compare_copies(self, port: str, whole: Tensor) -> None:
        """Raise HyperParallelError if ranks that should have the same value have others."""
        largest_of_copies, compared = self._known.largest_of_copies, self._known.compared
        if largest_of_copies is None or port in compared or not whole.is_floating_point():
            return
        compared.add(port)
        flat = whole.detach().double().reshape(-1)
        # A fixed projection: parts of a sum, or other elements, differ in it by about as much as their length.
        seen = flat @ torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype).mul(1.618).cos()
        largest, other, length = largest_of_copies(torch.stack([seen, -seen, flat.norm()])).tolist()
        if largest + other > _ALIKE * length:
            raise HyperParallelError(
                f"ranks of {self.group.name} have unlike values of {port}, which should be copies of one: the border "
                "of this submodel lies inside a module that its axes split; name the whole module"
            )

    def _gather(self, one: Wait, plan: ReshardPlan, whole: Tensor) -> None:
        """Exchange the parts that arrived with the ranks of this group that take the same."""
        coming, going = self._received(plan, Buffer.TARGET), self._given(plan, Buffer.TARGET)
        for sender, boxes in coming.items():
            self._post(self._among(one, sender), sender, boxes, one.port)
        for receiver, boxes in going.items():
            self._transfers.send((*self._among(one, receiver), "sent"), receiver, _packed(whole, boxes))
        for sender, boxes in coming.items():
            _unpack(self._transfers.wait(self._among(one, sender)), whole, boxes)
        for receiver in going:
            self._transfers.wait((*self._among(one, receiver), "sent"))

    def _post(self, key: Hashable, sender: int, boxes: Sequence[Transfer], port: str) -> None:
        self._transfers.post(key, sender, _count(boxes), self.port(port).value.dtype, self._device)

    def _messages(self, one: Send | Recv) -> Iterator[tuple[int, str]]:
        if isinstance(one, Send):
            boxes_of = self._given(self._plan(one.port, one.to), Buffer.SOURCE)
        else:
            boxes_of = self._received(self._plan(one.port, self.group.name), Buffer.SOURCE)
        for other, boxes in boxes_of.items():
            yield other, f"{_count(boxes)} {self.port(one.port).value.dtype}"

    def _plan(self, port: str, taker: str) -> ReshardPlan:
        """This rank's part of the plan that brings a port's value to a group."""
        plans = self._known.plans
        if (port, taker) not in plans:
            one, groups = self._program.ports[port], self._program.groups
            plan = plan_reshard(groups[one.group], one.layout, groups[taker], one.layout_in(taker))
            plans[port, taker] = plan.of(self._rank)
        return plans[port, taker]

    def _given(self, plan: ReshardPlan, reads: Buffer) -> _Boxes:
        sent = [one for one in _transfers(plan, reads) if one.sender == self._rank]
        return _by_rank((one.receiver, one) for one in sent)

    def _received(self, plan: ReshardPlan, reads: Buffer) -> _Boxes:
        coming = [one for one in _transfers(plan, reads) if one.receiver == self._rank]
        return _by_rank((one.sender, one) for one in coming)

    def _to(self, one: Send | Recv | Wait, other: int) -> tuple[Hashable, ...]:
        return (*self._key(one), other)

    def _among(self, one: Wait, other: int) -> tuple[Hashable, ...]:
        return (*self._key(one), other, self.group.name)


def _transfers(plan: ReshardPlan, reads: Buffer) -> Iterator[Transfer]:
    """Those of the phase that reads a buffer."""
    return (one for phase in plan.phases if phase.reads is reads for one in phase.transfers)


def _by_rank(transfers: Iterable[tuple[int, Transfer]]) -> _Boxes:
    found: _Boxes = {}
    for rank, one in transfers:
        found.setdefault(rank, []).append(one)
    return found


def _count(boxes: Sequence[Transfer]) -> int:
    return sum(one.elements for one in boxes)


def _packed(whole: Tensor, boxes: Sequence[Transfer]) -> Tensor:
    """The boxes of a rank's value one after the other, [elements]."""
    return torch.cat([whole[one.give].reshape(-1) for one in boxes])


def _unpack(message: Tensor, whole: Tensor, boxes: Sequence[Transfer]) -> None:
    parts = message.split([one.elements for one in boxes])
    for part, one in zip(parts, boxes, strict=True):
        into = whole[one.take]
        into.copy_(part.view(into.shape))
