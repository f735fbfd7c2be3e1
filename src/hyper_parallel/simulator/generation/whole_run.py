"""Closed form of a workload: seconds of its prompts and answers, pass by pass, with what every pass must read.

    prompts = Σ_turns Σ_pieces j  seconds of a pass of n pieces of P tokens behind j · P tokens · requests / n
    answers = seconds of a pass of B requests at their mean context · answer tokens · rounds of B requests

P is `inference.page`, n the pieces that `inference.rows` hold, B `inference.batch`. What a request shares with
another, or with its turn before, is computed once. Prompts and answers do not share passes here; the simulated trace
of passes (`estimate.generate_trace`) has the engine's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import Inference
from hyper_parallel.simulator.generation.pass_cost import PassCost, PassPricer
from hyper_parallel.simulator.generation.pass_load import PassLoad, Piece

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
        """Of the whole workload."""
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
