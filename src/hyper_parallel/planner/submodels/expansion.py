"""The predicted step of parts on devices of their own: the Program that `hp.submodels` runs, expanded and simulated.

The search compares sizes by the order's own clock (`schedule.step_schedule`), in which a transfer takes its time and
shares nothing. What is reported of the sizes that it chose is simulated: transfers between the parts' unlike meshes are
those of the resharding plans and share their links, a rank that is ahead waits to send, and what runs once a step lies
before and behind the micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hyper_parallel.layout import Layout
from hyper_parallel.planner.submodels.sizes import Row, Sizes, Task, optimizer_seconds
from hyper_parallel.program import DeviceGroup, Port, Schedule, TaskOps, to_program
from hyper_parallel.program import Task as ProgramTask
from hyper_parallel.program.build import stage_tasks
from hyper_parallel.program.step_trace import OncePerStep, PortMemory, PricedStage, StageMemory, step_trace
from hyper_parallel.schedule import MicroBatchKind
from hyper_parallel.simulator import simulate
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Collective, Op, Timeline

_BF16 = 2
_ROWS = "shard"
"""The axis of data ranks, by which what crosses between parts is cut."""


def timeline_of(
    task: Task, one: Sizes, shared: Counter[Row], kinds: Sequence[MicroBatchKind], schedule: Schedule
) -> Timeline:
    """The simulated step. `shared`, `kinds`: as of `sizes.micro_batch_kinds`, which made the one of the other;
    `schedule`: of these kinds."""
    groups = groups_of(task, one)
    stages: list[_Stage] = []
    ports: list[Port] = []
    tasks: list[ProgramTask] = []
    first = 0
    for (units, _), kind in zip(sorted(shared.items(), reverse=True), kinds, strict=True):
        mine = [_Stage(task, one, units, kind, stage) for stage in range(len(kind.placement))]
        for source, target in kind.forward:
            ports += _crossing(task, one, mine[source], mine[target], len(stages), groups)
        for stage, own in enumerate(mine):
            flows = (
                (tuple(own.receives), tuple(own.sends)),
                (tuple(own.gradients_in), tuple(own.gradients_out)),
            )
            within = tuple(range(first, first + kind.count)) if len(kinds) > 1 else None
            tasks += stage_tasks(len(stages) + stage, groups[own.rank].name, *flows, within)
        stages += mine
        first += kind.count
    of_rank: dict[int, int] = {}
    for number, own in enumerate(stages):
        of_rank.setdefault(own.rank, number)
    sizes = {name: memory.bytes for own in stages for name, memory in (own.sends | own.gradients_out).items()}
    trace = step_trace(
        to_program(schedule, groups, tasks, ports),
        {number: own.priced() for number, own in enumerate(stages)},
        {group.name: _once(task, one, rank, group, of_rank) for rank, group in enumerate(groups)},
        sizes=sizes,
        joined={
            number: of_rank[own.rank] for number, own in enumerate(stages) if of_rank[own.rank] != number
        },
        slowest=task.cluster.slowest,
    )
    return simulate(trace, task.cluster, masking=False)


def groups_of(task: Task, one: Sizes) -> tuple[DeviceGroup, ...]:
    """The device groups of the encoders and of the stages of the language model, by rank of the schedule."""
    encoders = (
        (f"encoder {each.name}", Strategy.model_validate({"version": 1, "axes": {_ROWS: count}}))
        for each, count in zip(task.costs.encoders, one.encoders, strict=True)
    )
    axes = {"pipeline": one.pipeline, _ROWS: one.data, "tensor": one.tensor}
    language = Strategy.model_validate({"version": 1, "axes": axes})
    return DeviceGroup.of_submodels({**dict(encoders), "language": language})


@dataclass
class _Stage:
    """A stage of one kind of micro-batches."""

    task: Task
    one: Sizes
    units: Row
    kind: MicroBatchKind
    stage: int
    receives: dict[str, PortMemory] = field(default_factory=dict)
    sends: dict[str, PortMemory] = field(default_factory=dict)
    gradients_in: dict[str, PortMemory] = field(default_factory=dict)
    gradients_out: dict[str, PortMemory] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Of the schedule."""
        return self.kind.placement[self.stage]

    @property
    def encoder(self) -> int | None:
        """Its encoder; None for a stage of the language model."""
        return self.rank if self.rank < len(self.one.encoders) else None

    def port(self, ports: dict[str, PortMemory], name: str, size: int, last: int) -> None:
        """Add a value that crosses. `last`: as of PortMemory."""
        known = (self.receives, self.sends, self.gradients_in, self.gradients_out)
        ports[name] = PortMemory(sum(map(len, known)), size, 0, last)

    def priced(self) -> PricedStage:
        """Its tasks' seconds and memory."""
        costs, at = self.kind.costs, self.encoder
        saved = int(costs.saved[self.stage])
        language = self.task.costs.language.workspace[self.one.tensor]
        most = saved + int(
            language(self.one.rows) if at is None else self.task.costs.encoders[at].workspace(self.units[at])
        )
        return PricedStage(
            (costs.forward[self.stage], costs.input[self.stage], costs.weight[self.stage]),
            StageMemory(saved, saved, (most, most, most)),
            # `StateBytes` counts gradients with the parameters.
            0,
            self.receives,
            self.sends,
            self.gradients_in,
            self.gradients_out,
        )


def _crossing(
    task: Task, one: Sizes, source: _Stage, target: _Stage, first: int, groups: Sequence[DeviceGroup]
) -> Iterator[Port]:
    """The ports of a value and of its gradient. `first`: the number of the kind's first stage."""
    names = [f"{what} of {first + source.stage} for {first + target.stage}" for what in ("value", "gradient")]
    homes = groups[source.rank], groups[target.rank]
    if source.encoder is None:
        # Between equal meshes each rank sends what it has.
        size = int(task.costs.language.border * one.rows)
        layouts = [Layout.replicated(home.mesh, (math.ceil(size / _BF16),)) for home in homes]
        held = [size, size]
    else:
        rows, at = one.rows * one.data, source.encoder
        whole = source.units[at] * one.encoders[at] * task.costs.encoders[at].features
        shape = (rows, math.ceil(whole / _BF16 / rows))
        layouts = [Layout(home.mesh, shape, ((_ROWS,), ())) for home in homes]
        held = [_BF16 * shape[1] * rows // home.mesh.size(_ROWS) for home in homes]
    # What the language model takes of others is the input of its first layer, which is saved.
    source.port(source.sends, names[0], held[0], 0)
    target.port(target.receives, names[0], held[1], 2)
    target.port(target.gradients_out, names[1], held[1], 1)
    source.port(source.gradients_in, names[1], held[0], 1)
    for name, (here, mine), (there, taken) in zip(
        names,
        zip(homes, layouts, strict=True),
        zip(reversed(homes), reversed(layouts), strict=True),
        strict=True,
    ):
        received: Mapping[str, Layout] = {} if source.encoder is None else {there.name: taken}
        yield Port(name, mine, "bfloat16", here.name, received)


def _once(task: Task, one: Sizes, rank: int, group: DeviceGroup, of_rank: Mapping[int, int]) -> OncePerStep:
    """What a part's ranks hold, and do once a step: gathers of weights in bfloat16, the sum of such gradients."""
    language = task.costs.language
    if rank < len(one.encoders):
        parameters, copies = float(task.costs.encoders[rank].parameters), one.encoders[rank]
    else:
        parameters, copies = language.parameters / (one.tensor * one.pipeline), one.data
    ranks = group.groups(_ROWS)[0]

    def moved(kind: str, what: str, size: float) -> tuple[TaskOps, ...]:
        if copies == 1:
            return ()
        call = Collective(kind, ranks, int(size), _ROWS, what)
        begins = Op(0, what, phase=what, queue=f"comm:{_ROWS}", collective=call)
        return (TaskOps((begins, Op(1, f"wait for {what}", phase=what, after=(0,)))),)

    state = {of_rank[rank]: (int(task.state.of(parameters, copies)), 0)} if rank in of_rank else {}
    return OncePerStep(
        state,
        optimizer_seconds(task.cluster, parameters, copies),
        before=moved("all_gather", "gather", _BF16 * parameters / copies),
        after=moved("reduce_scatter", "reduce", _BF16 * parameters),
    )
