"""Builds the scheduling `Problem` of a StepGraph: use intervals of storages and node start times.

A storage is in use at a node that is given any view of it or that gives one; what a collective or a transfer was given
or gives is in use until it was waited for. The times are those of a simulation on a cluster, in which nothing waits for
memory. Of updates on the host the state is no storage of the device: it only takes room where it lies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, lifetimes, values_of, workspaces
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.host_nodes import HOST, HostPoint, is_update, storages_of, tier_of
from hyper_parallel.graph.ir import Kind, Value, is_wait, ranks_of
from hyper_parallel.graph.liveness import Lifetime
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.memory_effects import begun, touched, writes
from hyper_parallel.offloading.schedule.problem import (
    Buffer,
    ForcedOffload,
    OffloadTier,
    Problem,
    Update,
    UseInterval,
    Workspace,
)
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Collective, Trace
from hyper_parallel.workload.work import Work

Costs = Mapping[fx.Node, Work | Collective]
STATE: Collection[Kind] = ("parameter", "optimizer", "buffer")
"""What lives across steps and may be elsewhere between them."""


def build_problem(
    step: StepGraph,
    cluster: Cluster,
    budget: int,
    spaces: tuple[OffloadTier, ...],
    sizes: Mapping[Any, int] | None = None,
    largest: Mapping[Any, int] | None = None,
    priced: Costs | None = None,
) -> Problem:
    """Build the offload scheduling problem of a step under `budget` bytes.

    `spaces`: offload tiers, the fastest first. `sizes`: values of data-dependent sizes, from which times are computed;
    `largest`: the values at which every storage has its largest size (`graph.dynamic_sizes`), from which bytes are
    computed; by default the same. `priced`: the work of its nodes, where the caller knows it.
    """
    known = dict(sizes or {})
    most = known if largest is None else dict(largest)
    lives = lifetimes(step, most)
    return Problem(
        starts_of(step, cluster, known, lives if known == most else None, priced),
        _held(step, lives),
        tuple(Workspace(life.born, life.died, life.bytes) for life in workspaces(step, most)),
        _beside_state(step, spaces),
        budget,
        _updates(step, cluster, spaces, known),
    )


def starts_of(
    step: StepGraph,
    cluster: Cluster,
    sizes: Mapping[Any, int] | None = None,
    lives: list[Lifetime] | None = None,
    priced: Costs | None = None,
) -> tuple[float, ...]:
    """Simulated start of each node in seconds where every rank runs this step, and the end of the step.

    `lives`, `priced`: the step's lifetimes at these sizes and the work of its nodes, where the caller has them.
    """
    found = lowered(step, sizes=sizes, views=False, lives=lives, priced=priced)
    trace = Trace({"all": found.ops}, dict.fromkeys(ranks_of(step), "all"), {"all": found.resident})
    timeline = simulate(trace, cluster, masking=False)
    began: dict[fx.Node, float] = {}
    for span in timeline.spans:
        if span.op.queue == "compute":
            began[found.nodes[span.op.index]] = span.start
    starts, now = [], 0.0
    for node in step.nodes:
        # A node without a priced operation starts with the one before it.
        now = max(now, began.get(node, now))
        starts.append(now)
    # The host goes on while the next step begins.
    end = max((span.end for span in timeline.spans if span.op.queue != "host"), default=now)
    return (*starts, max(end, now))


def _updates(
    step: StepGraph, cluster: Cluster, spaces: tuple[OffloadTier, ...], sizes: Mapping[Any, int]
) -> tuple[Update, ...]:
    work = costs(step, sizes, filter(is_update, step.nodes))
    rates = {space.name: space.work for space in spaces}
    found = []
    for at, node in enumerate(step.nodes):
        if is_update(node):
            parameter, gradient, *_ = storages_of(node)
            done, rate = work[node], rates[tier_of(node)]
            assert isinstance(done, Work)
            ranks = len(ranks_of(step))
            seconds = cluster.host_seconds(done, ranks) if rate is None else (done.read + done.written) / rate
            found.append(Update(at, seconds, gradient, parameter))
    return tuple(found)


def _beside_state(step: StepGraph, spaces: tuple[OffloadTier, ...]) -> tuple[OffloadTier, ...]:
    """Bytes that are left of each space beside the state that lies there for good."""
    taken: Counter[str] = Counter()
    for node in step.nodes:
        if is_update(node):
            taken[tier_of(node)] += sum(step.storages[storage].bytes for storage in storages_of(node)[2:])
    return tuple(replace(space, bytes=max(0, space.bytes - taken[space.name])) for space in spaces)


def _held(step: StepGraph, lives: list[Lifetime]) -> tuple[Buffer, ...]:
    nodes = list(step.nodes)
    uses, changed = _uses(nodes)
    returned = {value.storage for node in step.output.all_input_nodes for value in values_of(node)}
    outside = step.outside
    updates = [(at, node) for at, node in enumerate(nodes) if is_update(node)]
    resting = {storage for _, node in updates for storage in storages_of(node)[2:]}
    must = {
        storage: ForcedOffload(tier_of(node), at) for at, node in updates for storage in storages_of(node)[:2]
    }
    found = []
    for storage, life in sorted({life.storage: life for life in lives}.items()):
        if storage in resting:
            continue
        places = uses.get(storage, [])
        state = storage in outside
        if not places:
            # Nothing of the step looks at it: there all the time.
            places = [(0, len(nodes) - 1)]
        elif storage in returned and not state:
            # Whoever is given it may look at it from its birth on.
            places = [(places[0][0], len(nodes) - 1)]
        movable = (
            storage not in returned
            and life.bytes > 0
            and storage in uses
            and (life.kind in STATE or not state)
        )
        found.append(
            Buffer(
                storage,
                life.bytes,
                life.kind,
                _busy(places, changed[storage]),
                state,
                movable,
                life.name or life.module,
                must.get(storage),
            )
        )
    return tuple(found)


def _uses(nodes: list[fx.Node]) -> tuple[dict[int, list[tuple[int, int]]], dict[int, set[int]]]:
    """For each storage, the (first, last) nodes of its uses, and the nodes that change it."""
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    changed: dict[int, set[int]] = defaultdict(set)
    ends = {begun(node): at for at, node in enumerate(nodes) if is_wait(node)}
    ends.update(transfer_ends(nodes))
    # One of several results cannot be moved before it has been taken out from among them.
    named: dict[int, int] = {}
    for at, node in enumerate(nodes):
        value = node.meta.get("value")
        if isinstance(value, Value):
            named.setdefault(value.storage, at)
    for at, node in enumerate(nodes):
        fresh, given = {value.storage for value in values_of(node)}, touched(node)
        for storage in given | fresh:
            uses[storage].append((at, max(ends.get(node, at), named.get(storage, at))))
        for storage in writes(node) | (fresh - given):
            changed[storage].add(at)
    return uses, changed


def _busy(places: list[tuple[int, int]], changed: Collection[int]) -> tuple[UseInterval, ...]:
    """The uses of a storage, joined where nothing lies between them."""
    joined: list[list[int]] = []
    for first, last in sorted(places):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    ordered = sorted(changed)
    return tuple(
        UseInterval(first, last, any(first <= at <= last for at in ordered)) for first, last in joined
    )


# Transfers between ranks as host points, so that liveness and planners see when their memory is in use.
#
#     buffer = host("post")                  memory that a value will be received in
#     host("wait", [buffer])                 what was received is in it: the node writes to it
#     sent = host("send", [value])           the value is being sent from its memory
#     host("wait", [sent, value])            its memory is free
#
# From the node that begins a transfer to the wait for it the memory is in use, by the network.

BEGINS = (HostPoint.POST, HostPoint.SEND)
"""The points at which a transfer begins."""


def transfer_ends(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Each node that begins a transfer, and the place of the wait for it."""
    for at, node in enumerate(nodes):
        if node.target is HOST and node.args[0] == HostPoint.WAIT:
            yield from ((one, at) for one in node.all_input_nodes if _begins(one))


def _begins(node: fx.Node) -> bool:
    return node.target is HOST and node.args[0] in BEGINS
