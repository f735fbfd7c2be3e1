"""``hyper-parallel plan`` of training: one number of devices and one length, or a series of either"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.planner.answer import Answer
    from hyper_parallel.planner.query import Question
    from hyper_parallel.workload.shape import Shape
    from hyper_parallel.workload.workload import Adapter


def training_answer(
    load: Callable[[], tuple[Shape, dict[str, Any] | None]],
    cluster: str,
    options: dict[str, Any],
    say: Callable[[str], None],
) -> Answer:
    """The best strategies for the model that `load` reads; it also has the run file's `model`, where that is known."""
    from hyper_parallel.planner import query

    lengths = query.span("--sequence", options["sequence"])
    counts = query.span("--devices", options["devices"]) if options["devices"] else (0,)
    if (len(lengths) > 1) + (len(counts) > 1) + options["fit"] > 1:
        raise click.UsageError(
            "ask for one of --fit, a range of --devices, and a range of --sequence at a time"
        )
    shape, section = load()
    question = _question(shape, cluster, counts[-1], lengths[0], options)
    if options["fit"] or len(lengths) > 1 or len(counts) > 1:
        for option in ("compare", "out", "html"):
            if options[option]:
                raise click.UsageError(f"--{option} is for one number of devices and one length")
        if question.profile.ordered and options["simulate"] != 0:
            from hyper_parallel.planner.refine import with_captured_costs

            question, _ = with_captured_costs(question, section, say)
        return _series(question, counts, lengths, options, say)
    return _one(question, section, options, say)


def _question(shape: Shape, cluster: str, devices: int, sequence: int, options: dict[str, Any]) -> Question:
    from dataclasses import replace

    from hyper_parallel.cluster import Cluster
    from hyper_parallel.planner import query
    from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL, profile
    from hyper_parallel.planner.query import Question
    from hyper_parallel.planner.solve import TIE
    from hyper_parallel.workload.workload import Workload

    machine = Cluster.named(cluster)
    if not machine.name:
        machine = replace(machine, name=cluster)
    if options["fit"] and not devices and not machine.ranks:
        devices = 1
    if machine.ranks and devices > machine.ranks:
        raise ConfigError(
            f"--devices {devices:,}: {cluster} has {machine.ranks:,}; name the cluster without a number of devices, or "
            "with more"
        )
    # Two questions: what `train` would take, and what another framework would.
    theirs = profile(options["framework"]) if options["framework"] else HYPER_PARALLEL
    return Question(
        workload=Workload(
            shape,
            query.whole("--batch", options["batch"]),
            sequence,
            options["precision"],
            options["optimizer"],
            _adapter(options),
            query.whole("--prediction-modules", options["prediction_modules"], least=0),
        ),
        cluster=machine,
        profile=theirs,
        devices=devices,
        fix=query.fixed(options["fix"]),
        objective=options["objective"],
        top=options["top"],
        price=options["price"],
        runnable=options["runnable"] or theirs is HYPER_PARALLEL,
        tie=0.0 if options["quickest"] else TIE,
    )


def _adapter(options: dict[str, Any]) -> Adapter | None:
    """The adapter that is trained in place of the whole model."""
    from hyper_parallel.planner import query
    from hyper_parallel.workload.workload import Adapter

    if options["lora_rank"] is None:
        return None
    targets = tuple(name.strip() for name in options["lora_targets"].split(",") if name.strip())
    return Adapter(query.whole("--lora-rank", options["lora_rank"]), targets, options["frozen"])


def _one(
    question: Question, section: dict[str, Any] | None, options: dict[str, Any], say: Callable[[str], None]
) -> Answer:
    """The best strategies for one number of devices and one length."""
    from hyper_parallel.planner.solve import solve
    from hyper_parallel.planner.training import answer_of

    given: dict[str, Any] = {"compare": options["compare"], "tokens": _tokens(options), "model": section}
    if (count := _simulated(question, options)) > 0:
        # Only now, because this needs torch.
        from hyper_parallel.planner.refine import solved

        return answer_of(solved(question, count, say, **given), question, say)
    return answer_of(solve(question, **given), question, say)


def _simulated(question: Question, options: dict[str, Any]) -> int:
    """Strategies to simulate at most."""
    return (3 if question.profile.ordered else 0) if options["simulate"] is None else int(options["simulate"])


def _series(
    question: Question,
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    options: dict[str, Any],
    say: Callable[[str], None],
) -> Answer:
    """A series: over numbers of devices, over sequence lengths, or down to the fewest devices that fit."""
    from hyper_parallel.planner import solve as sweep
    from hyper_parallel.planner import sweep_tables
    from hyper_parallel.planner.constants import constants_for

    constants = constants_for(question.profile, question.cluster)
    if options["fit"]:
        found = sweep.fewest(question, constants, say)
        return sweep_tables.fewest(question, found, _tokens(options))
    if len(counts) > 1:
        points = sweep.curve((question.on(count) for count in counts), constants, say)
        return sweep_tables.scaling(points, _tokens(options))
    return sweep_tables.lengths(sweep.curve((question.at(length) for length in lengths), constants, say))


def _tokens(options: dict[str, Any]) -> float:
    from hyper_parallel.planner import query

    return query.tokens("--tokens", options["tokens"]) if options["tokens"] else 0.0
