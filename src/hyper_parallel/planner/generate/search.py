"""Search of a plan of generation: every set of axes, size of prompts' passes and tier split, by the closed form of a
workload.

    tensor · replicate = devices, expert ∈ {1, tensor}, rows of a pass in `ROWS`, a split by `choose_split`

The plan with the most tokens per second of those that fit wins; ties go to the smaller peak. With `most`, the most
requests at once for which some plan is fast, found by doubling and bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.run_file import memory_budget
from hyper_parallel.simulator.generation.choose_split import (
    SplitChoice,
    SplitQuestion,
    choose_split,
    hidden_share,
)
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.shape_pass import of_shape
from hyper_parallel.strategy.memory import GenerationMemory
from hyper_parallel.workload.shape import Shape

ROWS = ((256, 2048), (512, 8192), (1024, 16384), (2048, 8192), (4096, 16384))
"""Tokens of a piece and of a pass that are tried."""
MOST = 1 << 20
"""Requests at once, at most."""


@dataclass(frozen=True)
class GenerationQuestion:
    """A question: the generation to plan."""

    shape: Shape
    cluster: Cluster
    devices: int
    work: GenerationWorkload
    settings: Inference
    memory: GenerationMemory = field(default_factory=GenerationMemory)
    """Budgets that are given; else those of the cluster."""
    rows_given: bool = False
    """Whether `settings` says the sizes of passes."""
    axes: tuple[int, int] | None = None
    """(tensor, expert) that are given."""
    slow: bool = False
    """Whether a plan may be slow."""


@dataclass(frozen=True)
class GenerationPlan:
    """A strategy with what it would take. Everything is estimated."""

    tensor: int
    expert: int
    replicate: int
    settings: Inference
    work: GenerationWorkload
    question: SplitQuestion
    choice: SplitChoice

    @property
    def model(self) -> PassModel:
        """Its pass on one rank."""
        return self.question.model

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.choice.run.tokens_per_second * self.model.split

    @property
    def hidden(self) -> float:
        """Share of what a pass reads that hides behind memory reads on the link to the nearest tier; 0 without one."""
        tier = next(iter(self.question.tiers), None)
        return hidden_share(self.question, tier) if tier else 0.0


@dataclass(frozen=True)
class GenerationPlans:
    """The plans, the best first."""

    question: GenerationQuestion
    plans: tuple[GenerationPlan, ...]
    """Those that fit; the fast ones first."""
    tried: int

    @property
    def best(self) -> GenerationPlan:
        """The first plan."""
        return self.plans[0]


def solve(question: GenerationQuestion, say: Callable[[str], None] = lambda _: None) -> GenerationPlans:
    """The plans of a workload.

    Raises ConfigError where none fits, or none is fast and `slow` is not set, with the physics that forbid it.
    """
    found = list(_plans(question, say))
    fitting = sorted(
        (plan for plan in found if plan.choice.fits),
        key=lambda plan: (
            not plan.choice.fast,
            -round(plan.tokens_per_second, 1),
            plan.choice.footprint.device,
        ),
    )
    if not fitting:
        nearest = min(found, key=lambda plan: plan.choice.footprint.device)
        raise ConfigError(
            f"{question.shape.name} on {question.devices} × {question.cluster.name}: {nearest.choice.reason} (tensor "
            f"{nearest.tensor}); lower inference.batch or workload.prompt_tokens, give a larger tier, or take "
            "more devices"
        )
    if not fitting[0].choice.fast and not question.slow:
        best = fitting[0]
        raise ConfigError(
            f"{question.shape.name} on {question.devices} × {question.cluster.name} cannot be fast: "
            f"{best.choice.reason}; "
            f"plan it all the same with --slow-ok ({best.choice.slower:.0%} longer), raise the budget, or lower "
            "inference.batch"
        )
    return GenerationPlans(question, tuple(fitting), len(found))


def most_requests(
    question: GenerationQuestion, say: Callable[[str], None] = lambda _: None
) -> GenerationPlans:
    """The answer for the most requests at once for which some plan is fast (with `slow`: fits). Errors as of
    `solve`."""

    def at(count: int) -> GenerationQuestion:
        # All requests run at once; conversations keep how many of them there are for each that runs.
        times = max(1, question.work.requests // question.settings.batch)
        return replace(
            question,
            settings=question.settings.model_copy(update={"batch": count}),
            work=question.work.model_copy(update={"requests": count * question.devices * times}),
        )

    def solved(count: int) -> GenerationPlans | None:
        try:
            return solve(at(count))
        except ConfigError:
            return None

    best = solve(at(1))
    low, high = 1, 2
    while high <= MOST and (found := solved(high)) is not None:
        say(f"{high:,} requests at once")
        best, low, high = found, high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        found = solved(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best


def _plans(question: GenerationQuestion, say: Callable[[str], None]) -> Iterator[GenerationPlan]:
    problems: list[str] = []
    some = False
    for tensor, expert in _axes(question):
        replicate = question.devices // tensor
        try:
            model = of_shape(question.shape, tensor=tensor, expert=expert, copies=replicate)
        except ConfigError as error:
            problems.append(str(error))
            continue
        say(f"tensor {tensor} · replicate {replicate}{f' · expert {expert}' if expert > 1 else ''}")
        cluster = replace(question.cluster.for_workers(question.devices), name=question.cluster.name)
        budget, tiers = budgets(question, cluster)
        for settings in _settings(question):
            some = True
            split_question = SplitQuestion(model, cluster, question.work, settings, budget, tiers)
            yield GenerationPlan(
                tensor,
                expert,
                replicate,
                settings,
                question.work,
                split_question,
                choose_split(split_question),
            )
    if not some:
        raise ConfigError(problems[0] if problems else "no axes divide the devices")


def _axes(question: GenerationQuestion) -> Iterator[tuple[int, int]]:
    if question.axes is not None:
        yield question.axes
        return
    node = question.cluster.node or question.devices
    for tensor in range(1, question.devices + 1):
        if question.devices % tensor:
            continue
        # Beyond a node, only experts pay for the network.
        if tensor > node and not question.shape.experts:
            continue
        yield tensor, 1
        if question.shape.experts and tensor > 1:
            yield tensor, tensor


def _settings(question: GenerationQuestion) -> Iterator[Inference]:
    if question.rows_given:
        yield question.settings
        return
    for page, rows in ROWS:
        if page == ROWS[0][0] or page <= question.work.prompt_tokens:
            yield question.settings.model_copy(update={"page": page, "rows": rows})


def budgets(question: GenerationQuestion, cluster: Cluster) -> tuple[float, dict[str, float]]:
    """Bytes that a rank may use of the device and of each tier: those given, else what the cluster's leave."""
    memory, ranks = question.memory, question.devices
    own = memory_budget(cluster, fitted(), needed=float("inf"))
    device = float(memory.device) if isinstance(memory.device, int) else float(own.device)
    if not isinstance(memory.device, int) and not own.device:
        # A host that is its own device: what other programs leave is not known.
        device = cluster.tier("device").bytes / cluster.tier("device").ranks
    given = {
        "host": float(memory.host) if memory.host else 0.0,
        "pool": memory.pool / ranks if memory.pool else 0.0,
    }
    if memory.flash:
        flash = cluster.tier("flash")
        given["flash"] = flash.bytes / min(flash.ranks, ranks)
    tiers = {tier: size for tier, size in given.items() if size}
    if not tiers and not isinstance(memory.device, int):
        tiers = {tier: float(size) for tier, size in (("host", own.host), ("pool", own.pool)) if size}
    return device, tiers
