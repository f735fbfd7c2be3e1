"""Weight transfer on one rank: its parameters, send, receive into staging tensors, and install between two passes.

    source    begin_send(version)       packs copies; the parameters may change from then on
              finish_send()
    target    begin_receive()           into staging tensors; the parameters stay as they are
              finish_receive() → version
              install(version)          copies them into the parameters
    both      exchange(version) → version, install(version)     where the roles are colocated

What is between begin and finish runs on a thread. All waits of a transfer end at its deadline, `seconds` after its
begin. A transfer that fails raises WeightsError at its finish, closes the connections, so that the other ranks' fail
too, and leaves the parameters and their version as they were. After that the object is of no more use: connect again,
with the next epoch.

**Install** is for the controller to order, on all ranks of a role, when all of them have received the version: so no
rank has newer weights than its peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.process_groups import PeerError, StandaloneGroup
from hyper_parallel.errors import WeightsError
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.rl.weights.description import Description, Parameter
from hyper_parallel.rl.weights.exchange import Exchange, Key, Link
from hyper_parallel.rl.weights.payload import box_of, torch_dtype
from hyper_parallel.rl.weights.plan import WeightPlan
from hyper_parallel.shard.lora_adapters import name_in_base
from hyper_parallel.shard.sharded_model import is_sharded, sharded

Tensors = Callable[[], Mapping[str, Tensor]]
"""This rank's parameters by name, asked for each time that they are read or written."""


def connect(
    plan: WeightPlan,
    rank: int,
    meeting: Meeting,
    *,
    source: Tensors | None = None,
    target: Tensors | None = None,
    computed: bool = False,
    seconds: float = 60.0,
    version: int = -1,
) -> WeightTransfer:
    """Meet the other ranks and make this one's transfer. All ranks of the plan call it.

    `rank`: of the plan. `source` and `target`: this rank's parameters in the roles that it has. `seconds`: the time for
    the meeting, and then for each transfer. `version`: of the weights that the target has, -1 for none that were sent.
    `computed`: the source's tensors are computed by all its ranks when they are asked for, so that they are first
    compared with the plan when a version is sent.

    Raises WeightsError when the ranks have not all come in time.
    """
    try:
        group = StandaloneGroup.connect(
            meeting.host,
            meeting.port,
            meeting.prefix,
            rank=rank,
            world=plan.world,
            seconds=seconds,
            digest=plan.digest.hex(),
        )
    except PeerError as error:
        ranks = f"all {plan.world} ranks of {plan.source.role} and {plan.target.role}"
        raise WeightsError(
            f"{plan.named(rank)}: connect for weights at {meeting.host}:{meeting.port}, epoch {meeting.epoch}: "
            f"{error}; {ranks} need the same plan, address and epoch"
        ) from error
    link = Link(plan=plan, rank=rank, group=group, epoch=meeting.epoch)
    return WeightTransfer(
        link, source=source, target=target, computed=computed, seconds=seconds, version=version
    )


class WeightTransfer:
    """One rank's part of a plan, version after version."""

    def __init__(
        self,
        link: Link,
        *,
        source: Tensors | None = None,
        target: Tensors | None = None,
        computed: bool = False,
        seconds: float = 60.0,
        version: int = -1,
    ) -> None:
        """As `connect`. Raises WeightsError where the parameters are not those of the plan."""
        assert link.plan.gives(link.rank) == (source is not None), f"{link.named} and its source"
        assert link.plan.takes(link.rank) == (target is not None), f"{link.named} and its target"
        self.plan, self.rank, self.seconds = link.plan, link.rank, seconds
        self.version = version
        """Of the weights in the target's parameters."""
        self._link, self._exchange = link, Exchange(link)
        self._source, self._target = source, target
        self._transferred = -1
        """The last version that was sent or received."""
        self._staged: dict[str, Tensor] = {}
        """What was received last. It stays: the next version is received into the same memory."""
        self._thread: threading.Thread | None = None
        self._outcome: int | BaseException | None = None
        self._failed = False
        self._expected = {
            "source": _expected(self.plan.source, 0, self.rank),
            "target": _expected(self.plan.target, self.plan.target_rank(0), self.rank),
        }
        for tensors, side in ((None if computed else source, "source"), (target, "target")):
            if tensors is not None:
                self._read(tensors, side)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far, headers and acknowledgements included."""
        return self._exchange.sent_bytes

    def begin_send(self, version: int) -> None:
        """Copy what this rank sends of its parameters, and begin to send it. Versions rise."""
        assert not self.plan.takes(self.rank), "a rank that only sends"
        self._begin(version)

    def finish_send(self) -> int:
        """Wait until those that it was sent to have found it right; the version. Raises WeightsError."""
        return self._finish()

    def send(self, version: int) -> int:
        """`begin_send` and `finish_send`."""
        self.begin_send(version)
        return self.finish_send()

    def begin_receive(self, version: int | None = None) -> None:
        """Begin to receive a version; None takes whichever is sent, if it is newer than the last."""
        assert not self.plan.gives(self.rank), "a rank that only receives"
        self._begin(version)

    def finish_receive(self) -> int:
        """Wait until this rank has received everything; the version, for `install`. Raises WeightsError."""
        return self._finish()

    def receive(self, version: int | None = None) -> int:
        """`begin_receive` and `finish_receive`."""
        self.begin_receive(version)
        return self.finish_receive()

    def exchange(self, version: int) -> int:
        """Send and receive, of colocated roles; the version, for `install`. Raises WeightsError."""
        assert self.plan.colocated, "a rank that sends and receives"
        self._begin(version)
        return self._finish()

    @property
    def under_way(self) -> bool:
        """Whether messages are still being sent or received; `finish` does not wait otherwise."""
        return self._thread is not None and self._thread.is_alive()

    def install(self, version: int) -> None:
        """Copy the received weights into the parameters. Raises WeightsError where `version` was not received."""
        assert self._target is not None, "a rank that receives"
        if self._thread is not None or self._failed or version != self._transferred:
            last = f"the last version received is {self._transferred}"
            state = (
                "a transfer is under way" if self._thread else "the link has failed" if self._failed else last
            )
            raise WeightsError(
                f"{self._link.named}: install weights, version {version}: {state}; the weights are still those of "
                f"version {self.version}"
            )
        if version == self.version:
            return
        with torch.no_grad():
            parameters = self._read(self._target, "target")
            for name, values in self._staged.items():
                parameters[name].copy_(values)
        self.version = version

    def close(self) -> None:
        """Close the connections. A transfer under way fails, on this rank by its deadline; nobody waits for it."""
        self._failed, self._thread = True, None
        self._link.group.close()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _begin(self, version: int | None) -> None:
        if self._failed:
            raise WeightsError(
                f"{self._link.named}: the link for weights has failed or was closed; connect again with the next epoch"
            )
        assert self._thread is None, "a transfer begins when the last one is finished"
        if version is not None and version <= self._transferred:
            raise WeightsError(
                f"{self._link.named}: version {version} is stale: version {self._transferred} was transferred before"
            )
        source = self._read(self._source, "source") if self._source is not None else {}
        packed = self._exchange.packed(source)
        if self._target is not None:
            self._stage(source, self._read(self._target, "target"))
        self._outcome = None
        self._thread = threading.Thread(
            target=self._run, args=(version, packed), name="weight transfer", daemon=True
        )
        self._thread.start()

    def _run(self, version: int | None, packed: dict[Key, Tensor]) -> None:
        try:
            self._outcome = self._exchange.run(version, packed, self._staged, self._transferred, self.seconds)
        except BaseException as error:
            self._outcome = error
            self._link.group.close()

    def _finish(self) -> int:
        assert self._thread is not None, "a transfer has begun"
        self._thread.join()
        self._thread = None
        if not isinstance(self._outcome, int):
            assert self._outcome is not None
            self._failed, self._staged = True, {}
            raise self._outcome
        self._transferred = self._outcome
        return self._outcome

    def _stage(self, source: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Staging tensors in the element types of the way, and into them what this rank has in the source's role."""
        if not self._staged:
            self._staged = {
                one.target: torch.empty(parameters[one.target].shape, dtype=torch_dtype(one.dtype))
                for one in self.plan.parameters
                if one.target in parameters
            }
        for part in self.plan.local.get(self.rank, ()):
            into = box_of(self._staged[part.parameter.target], part.take)
            into.copy_(box_of(source[part.parameter.source], part.give))

    def _read(self, tensors: Tensors, side: str) -> Mapping[str, Tensor]:
        """This rank's tensors of a side. Raises WeightsError where they have not the shapes and dtypes described."""
        there = tensors()
        for name, (dtype, shape) in self._expected[side].items():
            found = there.get(name)
            if found is None or tuple(found.shape) != shape or found.dtype != torch_dtype(dtype):
                got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise WeightsError(
                    f"{self._link.named}: {name} is {got} here, and {dtype} {list(shape)} in the {side}'s "
                    "description; describe the model again"
                )
        return there


def _expected(described: Description, first: int, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what a rank of the plan holds of each parameter of a side, whose rank 0 is `first`."""
    return {
        one.name: (one.dtype, one.layout.local_shape(group.coordinate(rank)))
        for one in described.parameters
        for group in one.device_groups(described.role, first)
        if rank in group.ranks
    }


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address of the store, which one process of the source serves, and how many times the roles met before."""

    host: str
    port: int
    link: str = "weights"
    """Different for links that share a store."""
    epoch: int = 0
    """One more after each restart of a rank: a group that has lost one is of no more use."""

    @property
    def prefix(self) -> str:
        """Of the keys in the store."""
        return f"{self.link}/{self.epoch}"


def describe(model: nn.Module, role: str, world: int = 1) -> Description:
    """The parameters of a role's model, those of its base with adapters merged; the same on all its ranks.

    `model`: one that `parallelize` returned, or any other, of which each of the role's `world` ranks holds a copy.
    Experts that are placed anew by their loads change it: ask again afterwards.
    """
    if is_sharded(model):
        fsdp.free_gathered(model)
        listed = [
            (p.name, p.layout, p.parameter.dtype, tuple(tuple(group.ranks) for group in p.owners))
            for p in sharded(model).parameters()
        ]
    else:
        listed = [
            (name, Layout.replicated(Mesh(), tuple(p.shape)), p.dtype, ())
            for name, p in model.named_parameters()
        ]
    parameters = tuple(
        Parameter(
            name=plain,
            layout=_on_ranks(layout, world),
            dtype=str(dtype).removeprefix("torch."),
            groups=groups or (tuple(range(world)),),
        )
        for name, layout, dtype, groups in listed
        if (plain := name_in_base(name, model)) is not None
    )
    return Description(role=role, world=world, parameters=parameters, ties=_ties(model))


def local_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """This rank's part of each parameter that it holds, by the name in the description, without autograd. Writing to
    one writes the parameter."""
    if is_sharded(model):
        fsdp.free_gathered(model)  # a forward pass without a backward pass leaves whole parameters behind
        return {p.name: p.local for p in sharded(model).owned()}
    return {name: p.detach() for name, p in model.named_parameters()}


def _on_ranks(layout: Layout, world: int) -> Layout:
    """A layout on a mesh of one rank, which is every process's own, as copies on all ranks of the role."""
    if layout.mesh.world == 1 and world > 1:
        return Layout.replicated(Mesh(("replicate", world)), layout.shape)
    return layout


def _ties(model: nn.Module) -> dict[str, str]:
    """Second and further names of parameters to their first."""
    first: dict[int, str] = {}
    ties = {}
    for own, parameter in model.named_parameters(remove_duplicate=False):
        name = name_in_base(own, model)
        if name is not None and first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties
