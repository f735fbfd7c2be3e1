"""``hyper-parallel plan --generate``"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.planner.answer import Answer
    from hyper_parallel.workload.shape import Shape

_OF_TRAINING = (
    "fit",
    "fix",
    "runnable",
    "compare",
    "simulate",
    "evaluate",
    "lora_rank",
    "framework",
    "tokens",
    "html",
    "images",
    "recordings",
)
"""Options that say something about training only."""


def generation_answer(
    shape: Shape,
    model: Mapping[str, Any] | str,
    cluster: str,
    overrides: Sequence[str],
    options: dict[str, Any],
    say: Callable[[str], None],
) -> Answer:
    """The plan of a workload. `model`: of its file, a section or a published name."""
    from dataclasses import replace

    from hyper_parallel.cluster import Cluster
    from hyper_parallel.config.generate import load_plan
    from hyper_parallel.planner import query
    from hyper_parallel.planner.generate.answer import answer_of
    from hyper_parallel.planner.generate.search import GenerationQuestion, most_requests, solve

    for option in _OF_TRAINING:
        if options.get(option):
            raise click.UsageError(
                f"--{option.replace('_', '-')} is of training; leave it out, or leave --generate out"
            )
    plan_file = load_plan(overrides)
    settings, strategy = plan_file.inference, plan_file.strategy
    if options["batch"] is not None:
        settings = settings.model_copy(update={"batch": query.whole("--batch", options["batch"])})
    machine = Cluster.named(cluster)
    machine = machine if machine.name else replace(machine, name=cluster)
    axes = strategy.axes
    devices = (
        query.whole("--devices", options["devices"]) if options["devices"] else machine.ranks or axes.world
    )
    if machine.ranks and devices > machine.ranks:
        raise ConfigError(f"--devices {devices:,}: {cluster} has {machine.ranks:,}; name a larger cluster")
    given = axes.world > 1
    if given and axes.world != devices:
        raise ConfigError(
            f"strategy.axes multiply to {axes.world}, and {devices} devices are planned for; make them equal, or "
            "leave the "
            "axes out"
        )
    changed = {text.partition("=")[0].strip() for text in overrides}
    question = GenerationQuestion(
        shape=shape,
        cluster=machine,
        devices=devices,
        work=plan_file.workload,
        settings=settings,
        memory=strategy.memory,
        rows_given=bool(changed & {"inference.rows", "inference.page", "inference"}),
        axes=(axes.tensor, axes.expert) if given else None,
        slow=options["slow_ok"],
    )
    found = most_requests(question, say) if options["most"] else solve(question, say)
    return answer_of(found, model, cluster, options["top"])
