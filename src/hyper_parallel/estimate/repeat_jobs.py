"""Repeats the jobs of a captured layer, to arrange a step of all layers without its graph.

As the code is written, the nodes of a layer are a block (`estimate.repeat_ops`), and so are their jobs. What all layers
hold at once in an order of collectives is not what few hold times their number: how far a collective runs ahead depends
on what is busy then. Therefore all jobs are arranged (`overlap.list_scheduling`), which for 80 layers takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from hyper_parallel.estimate.repeat_ops import Loop, Tag, repeat
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap.jobs import Jobs
from hyper_parallel.overlap.list_scheduling import Job
from hyper_parallel.trace import Bytes, Op

CAPTURED = 6
"""Layers of a kind that are captured where there are more: those at either end, and between them one that is repeated
and its likes."""
MIDDLE = 2
"""Its place among them."""


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers of one kind."""

    total: int
    captured: int
    """Layers that are captured."""

    @classmethod
    def of(cls, total: int, captured: int = CAPTURED) -> LayerRun:
        """So many layers, of which so many are captured at most."""
        return cls(total, min(total, captured))


def jobs_of_all(few: Jobs, runs: Sequence[LayerRun]) -> Jobs:
    """The jobs of all layers, from those of a step in which each run of layers has `captured` of them.

    Raises Unlike where they cannot be repeated.
    """
    names = [(str(node.target), region_of(node).phase) for node in few.nodes]
    layers = [_layer(region_of(node).layer) for node in few.nodes]
    place = {layer: at for at, layer in enumerate(sorted({layer for layer in layers if layer is not None}))}
    tags: list[Tag] = [None if layer is None else place[layer] for layer in layers]
    jobs, first = list(few.jobs), 0
    for run in runs:
        if run.total > run.captured:
            loop = Loop(first + MIDDLE, run.total - run.captured + 1)
            shared = {
                storage
                for job, tag in zip(jobs, tags, strict=True)
                if tag is None
                for storage, _ in job.makes
            }
            made = repeat(_ops(jobs, names, tags, shared), tags, (), loop)
            jobs = [
                _job(op, jobs[origin], tags[origin], made.origin, shared)
                for op, origin in zip(made.ops, made.origin, strict=True)
            ]
            names, tags = [names[at] for at in made.origin], [tags[at] for at in made.origin]
        first += run.captured
    return replace(few, jobs=tuple(jobs))


def _layer(name: str) -> Tag:
    number = name.rpartition(".")[2]
    return int(number) if number.isdecimal() else None


def _ops(
    jobs: Sequence[Job], names: Sequence[tuple[str, str]], tags: Sequence[Tag], shared: Set[int]
) -> list[Op]:
    """Jobs as ops, which free what they use; but for what layers use of outside (`shared`), which all copies use."""
    return [
        Op(
            at,
            name,
            phase=phase,
            queue=job.queue,
            after=job.after if job.waits is None else (*job.after, job.waits),
            allocates=tuple(Bytes(storage, size, "temporary") for storage, size in job.makes),
            frees=tuple(one for one in job.uses if tag is None or one not in shared),
        )
        for at, (job, (name, phase), tag) in enumerate(zip(jobs, names, tags, strict=True))
    ]


def _job(op: Op, like: Job, tag: Tag, origin: Sequence[int], shared: Set[int]) -> Job:
    outside = () if tag is None else tuple(one for one in like.uses if one in shared)
    waits = None
    if like.waits is not None:
        waits = next(other for other in op.after if origin[other] == like.waits)
    return Job(
        like.seconds,
        like.queue,
        op.after,
        waits,
        tuple((held.storage, held.bytes) for held in op.allocates),
        (*op.frees, *outside),
        like.lane,
    )
