"""Choice of a tier split: what lies away from the device so that a workload fits, with the least time.

What costs no pass any time goes first: idle contexts and unused shared prompts, pages that every query has passed,
what sparse attention does not select. Then as little as fits of what a pass reads (experts that are seldom chosen,
fetched or computed on the host; weights; contexts), alone or together, priced by the closed form of the whole
workload; the shortest wins. A choice is *fast* if it takes at most `TOLERANCE` longer than with everything on the
device; else physics is named: a pass of t seconds hides t · link bytes,

    hidden ≤ link / memory bandwidth        of what a pass reads, where reading decides it          `hidden_share`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.simulator.generation.pass_cost import PassCost, PassPricer, Sparse, link_rate
from hyper_parallel.simulator.generation.pass_model import PassLoad, PassModel, Piece
from hyper_parallel.simulator.generation.tier_split import Footprint, Held, TierSplit, footprint, held_at_once
from hyper_parallel.units import format_bytes

# Closed form of a workload: seconds of its prompts and answers, pass by pass, with what every pass must read.
#
#     prompts = Σ_turns Σ_pieces j  seconds of a pass of n pieces of P tokens behind j · P tokens · requests / n
#     answers = seconds of a pass of B requests at their mean context · answer tokens · rounds of B requests
#
# P is `inference.page`, n the pieces that `inference.rows` hold, B `inference.batch`. What a request shares with
# another, or with its turn before, is computed once. Prompts and answers do not share passes here; the simulated trace
# of passes (`estimate.generate_trace`) has the engine's scheduler.

_POINTS = 9
"""Passes of a long prompt that are priced; those between are interpolated."""


@dataclass(frozen=True)
class WholeRun:
    """A workload on one rank."""

    prompts: float
    """Seconds of passes with pieces of prompts."""
    prompts_bound: float
    """The same, by the bound of each pass."""
    answers: float
    """Seconds of passes that generate."""
    answers_bound: float
    prompt_pass: PassCost
    """The last pass of a prompt."""
    answer_pass: PassCost
    """A pass at the mean context."""
    answer_load: PassLoad
    prompt_load: PassLoad
    tokens: int
    """Answer tokens of this rank."""
    first_token: float
    """Seconds of the first prompt's passes, when nothing else runs."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole workload."""
        return self.prompts + self.answers

    @property
    def bound(self) -> float:
        """Seconds that no implementation beats."""
        return self.prompts_bound + self.answers_bound

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens of this rank's requests."""
        return self.tokens / self.seconds


def loads(work: GenerationWorkload, settings: Inference, split: int) -> tuple[PassLoad, PassLoad]:
    """The largest pass of prompts and the pass that generates, of one of `split` ranks with different requests."""
    requests = -(-work.requests // split)
    batch = min(settings.batch, requests)
    count, size = _pieces(work, settings, requests)
    last = max(0, (work.prompt_tokens - 1) // size * size)
    prompt = PassLoad.of([Piece(size, last)] * count, count)
    mean = work.prompt_of((work.turns - 1) // 2) + work.answer_tokens // 2
    return prompt, PassLoad.decode(batch, mean)


def _pieces(work: GenerationWorkload, settings: Inference, requests: int) -> tuple[int, int]:
    """Pieces of a pass of prompts, and tokens of each."""
    size = min(settings.page, work.prompt_tokens)
    return max(1, min(settings.rows // settings.page, settings.batch, requests)), size


def whole_run(pricer: PassPricer, work: GenerationWorkload, settings: Inference) -> WholeRun:
    """The closed form of a workload with a model under a tier split."""
    split = pricer.model.split
    requests = -(-work.requests // split)
    prompt_load, answer_load = loads(work, settings, split)
    count, size = _pieces(work, settings, requests)
    passes = [0.0, 0.0]
    for first, end, times in _spans(work, requests):
        seconds, bound = _span(pricer, first, end, count, size)
        passes[0] += seconds * times / count
        passes[1] += bound * times / count
    decode = pricer.price(answer_load)
    rounds = -(-requests // len(answer_load.pieces)) * work.turns
    alone, _ = _span(pricer, 0, work.prompt_tokens, 1, size)
    return WholeRun(
        prompts=passes[0],
        prompts_bound=passes[1],
        # The first token of an answer comes with the prompt's last pass.
        answers=decode.seconds * (work.answer_tokens - 1) * rounds,
        answers_bound=decode.bound * (work.answer_tokens - 1) * rounds,
        prompt_pass=pricer.price(prompt_load),
        answer_pass=decode,
        answer_load=answer_load,
        prompt_load=prompt_load,
        tokens=requests * work.turns * work.answer_tokens,
        first_token=alone,
    )


def _spans(work: GenerationWorkload, requests: int) -> Iterator[tuple[int, int, int]]:
    """Positions of prompts that are computed, and how often."""
    if work.shared_tokens:
        yield 0, work.shared_tokens, min(work.shared_prompts, requests)
    if work.shared_tokens < work.prompt_tokens:
        yield work.shared_tokens, work.prompt_tokens, requests
    for turn in range(1, work.turns):
        # Tokens of the answer are read again as a part of the next prompt.
        yield work.prompt_of(turn - 1), work.prompt_of(turn), requests


def _span(pricer: PassPricer, first: int, end: int, count: int, size: int) -> tuple[float, float]:
    """Seconds and bound of the passes of `count` prompts at once from position `first` to `end`."""
    starts = list(range(first, end, size))
    step = max(1, -(-len(starts) // _POINTS))
    chosen = sorted({*range(0, len(starts), step), len(starts) - 1})
    found = []
    for at in chosen:
        cost = pricer.price(PassLoad.of([Piece(min(size, end - starts[at]), starts[at])] * count, count))
        found.append((at, cost.seconds, cost.bound))
    seconds, bound = found[0][1], found[0][2]
    for (at, low, low_bound), (to, high, high_bound) in pairwise(found):
        # Passes behind `at` up to `to`: the mean of a straight line.
        width = to - at
        seconds += width * low + (high - low) * (width + 1) / 2
        bound += width * low_bound + (high_bound - low_bound) * (width + 1) / 2
    return seconds, bound


TOLERANCE = 0.01
"""Longer than with everything on the device by at most this share is fast."""


@dataclass(frozen=True)
class SplitChoice:
    """A tier split for a workload."""

    split: TierSplit
    run: WholeRun
    footprint: Footprint
    fits: bool
    whole: WholeRun
    """With everything on the device, whether it fits or not."""
    whole_footprint: Footprint
    reason: str = ""
    """Why it is slow, or does not fit; empty if it is fast."""

    @property
    def slower(self) -> float:
        """Seconds over those with everything on the device, less 1."""
        return self.run.seconds / self.whole.seconds - 1

    @property
    def fast(self) -> bool:
        """Whether it fits and takes next to no more time."""
        return self.fits and self.slower <= TOLERANCE


@dataclass(frozen=True)
class SplitQuestion:
    """A workload of a model on a cluster, with what each tier may hold of one rank."""

    model: PassModel
    cluster: Cluster
    work: GenerationWorkload
    settings: Inference
    device: float
    """Bytes."""
    tiers: Mapping[str, float]
    """Bytes by tier, the nearest first."""

    @property
    def sparse(self) -> Sparse:
        """The settings that decide how much a pass reads of experts and contexts."""
        work = self.work
        return Sparse(work.expert_skew, work.selected_tokens, work.selected_again)

    @property
    def load(self) -> PassLoad:
        """The largest pass."""
        return max(loads(self.work, self.settings, self.model.split), key=lambda load: load.rows)

    def footprint(self, split: TierSplit) -> Footprint:
        """Bytes that each tier holds."""
        model, work = self.model, self.work
        batch = min(self.settings.batch, -(-work.requests // model.split))
        selected = (
            model.held(min(work.selected_tokens, work.context)) * batch if work.selected_tokens else 0.0
        )
        if not self.tiers:
            selected = 0.0
        return footprint(model, split, self._held, self._workspace, selected)

    @cached_property
    def _held(self) -> Held:
        batch = min(self.settings.batch, -(-self.work.requests // self.model.split))
        return held_at_once(self.model, self.work, batch, self.settings.page)

    @cached_property
    def _workspace(self) -> float:
        load = self.load
        return self.model.workspace(load.rows, load.answers)

    def pricer(self, split: TierSplit) -> PassPricer:
        """Prices passes under a split."""
        sparse = self.sparse
        if not self.tiers or split.tier not in self.tiers:
            # Everything is on the device: nothing of what is selected is copied.
            sparse = replace(sparse, apart=False)
        return PassPricer(self.model, self.cluster, split, sparse)

    def fits(self, found: Footprint) -> bool:
        """Whether every tier has room."""
        return found.device <= self.device and all(
            found.of(tier) <= size for tier, size in self.tiers.items() if tier in found.by_tier
        )


def choose_split(question: SplitQuestion) -> SplitChoice:
    """The split with the least time of those that fit; one that does not fit, and says so, where none does."""
    whole_question = replace(question, tiers={})
    nothing = TierSplit()
    whole = whole_run(whole_question.pricer(nothing), question.work, question.settings)
    whole_footprint = whole_question.footprint(nothing)
    if whole_footprint.device <= question.device:
        return SplitChoice(nothing, whole, whole_footprint, True, whole, whole_footprint)
    found: list[SplitChoice] = []
    least: tuple[TierSplit, Footprint] | None = None
    for tier in question.tiers:
        for split in _candidates(question, tier):
            held = question.footprint(split)
            if least is None or held.device < least[1].device:
                least = split, held
            if question.fits(held):
                run = whole_run(question.pricer(split), question.work, question.settings)
                found.append(SplitChoice(split, run, held, True, whole, whole_footprint))
    if not found:
        if least is None:
            least = nothing, whole_footprint
        return SplitChoice(
            least[0], whole, least[1], False, whole, whole_footprint, _missing(question, least[1])
        )
    best = min(found, key=lambda one: (round(one.run.seconds / whole.seconds, 3), one.footprint.device))
    return best if best.fast else replace(best, reason=_physics(question, best))


def _candidates(question: SplitQuestion, tier: str) -> Iterator[TierSplit]:
    """Splits to compare: what costs nothing, and then, of each kind and of two together, as little as fits."""
    free = TierSplit(tier=tier, idle=True, windows=True)
    yield free
    experts: list[TierSplit] = []
    local = question.model.local_experts
    if local:
        hows: tuple[Literal["device", "host"], ...] = ("device", "host") if tier == "host" else ("device",)
        for how in hows:
            experts += [
                replace(free, experts=max(1, round(local * share / 8)), experts_computed=how)
                for share in range(1, 9)
            ]
    yield from experts
    layers = len(question.model.order)
    for base in (free, *experts[::4]):
        yield from _least(question, [replace(base, layers=count) for count in range(1, layers + 1)])
    if not question.work.selected_tokens:
        shares = [step / 20 for step in range(1, 21)]
        yield from _least(question, [replace(free, contexts=share) for share in shares])
        for share in (0.25, 0.5, 1.0):
            splits = [replace(free, contexts=share, layers=count) for count in range(1, layers + 1)]
            yield from _least(question, splits)


def _least(question: SplitQuestion, splits: list[TierSplit]) -> Iterator[TierSplit]:
    """The first of splits, ordered by what is away, that fits; the last where none does."""
    low, high = 0, len(splits) - 1
    while low < high:
        middle = (low + high) // 2
        if question.fits(question.footprint(splits[middle])):
            high = middle
        else:
            low = middle + 1
    yield splits[low]


def hidden_share(question: SplitQuestion, tier: str) -> float:
    """Share of what a pass reads that the link can bring in the time in which memory reads all of it."""
    device = question.cluster.device
    assert device is not None
    return link_rate(question.cluster, tier, question.model.world) / device.memory.read


def _physics(question: SplitQuestion, choice: SplitChoice) -> str:
    """Why a split that fits is slow."""
    split, run, whole = choice.split, choice.run, choice.whole
    share = hidden_share(question, split.tier)
    saved = 1 - question.device / choice.whole_footprint.device
    parts = []
    if run.answers > whole.answers * (1 + TOLERANCE):
        parts.append(
            f"dense decode reads every byte that it needs in each pass, and at most {share:.1%} of them hide behind "
            f"memory reads on the link to {split.tier}; this budget has to hide {saved:.1%} of what is held: "
            f"{run.answer_pass.seconds / whole.answer_pass.seconds:.1f}× the seconds of a pass"
        )
    if run.prompts > whole.prompts * (1 + TOLERANCE):
        cost, tokens = run.prompt_pass, run.prompt_load.tokens
        parts.append(
            f"passes of {tokens:,} tokens of prompts take {whole.prompt_pass.seconds:.3g} s, and what they read of "
            f"{split.tier} {cost.linking:.3g} s: passes of more tokens hide more (inference.rows and page)"
        )
    return "; ".join(parts) or f"takes {choice.slower:.1%} longer than with everything on the device"


def _missing(question: SplitQuestion, held: Footprint) -> str:
    """Why nothing fits."""
    over = [
        f"{tier} needs {format_bytes(held.of(tier))} and has {format_bytes(size)}"
        for tier, size in (("device", question.device), *question.tiers.items())
        if held.of(tier) > size
    ]
    return f"nothing fits: {'; '.join(over)}" if over else "nothing fits"
