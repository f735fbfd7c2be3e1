"""Cells of the campaign that compares generated tokens with Transformers' `generate`: family × axes × memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.ranks import RanksError, run_ranks
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.strategy import Strategy
from inference.small_models import prompts, small

LENGTHS = (1, 31, 33, 70)
"""Tokens of the prompts."""
TIE = 1e-4
"""Two logits that are as close are a tie, which rounding decides."""
SMALL = {"page": 16, "pages": 4}
"""Of a cache with tiers: fewer pages on the device than the longest request has."""
MOST_TIES = 1e-3
"""Of all tokens."""
EXPERTS = frozenset({"gpt-oss", "mixtral", "qwen3-moe", "deepseek-v3"})


@dataclass
class Outcome:
    """What a cell comes to: `right`, `refused` with the reason, or `wrong`."""

    outcome: str
    detail: str = ""
    tokens: int = 0
    ties: int = 0
    moved: list[str] = field(default_factory=list)
    """What each rank says was moved between memories."""


class Reference:
    """Greedy tokens of a model, or a family's, by Transformers' `generate`, one prompt at a time, in float32."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model: Any = small(model) if isinstance(model, str) else model
        self.tokens = tokens
        self.prompts = prompts(self.model, LENGTHS)
        self.expected = [self._generated(prompt) for prompt in self.prompts]

    def _generated(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        # A mask of ones: without one Transformers guesses it from the padding token.
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.tokens,
            pad_token_id=0,
        )
        return list(out[0, len(prompt) :].tolist())

    def judge(self, found: list[list[int]]) -> Outcome:
        """Each token is the one of `generate`, or, after a tie, within `TIE` of the top logit of a forward pass."""
        ties = 0
        for prompt, own, expected in zip(self.prompts, found, self.expected, strict=True):
            if len(own) != len(expected):
                return Outcome("wrong", f"{len(own)} tokens instead of {len(expected)}")
            if own == expected:
                continue
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
            gaps = logits.amax(-1) - logits[torch.arange(len(own)), torch.tensor(own)]
            if float(gaps.max()) > TIE:
                place = int(gaps.gt(TIE).nonzero()[0])
                return Outcome(
                    "wrong",
                    f"prompt of {len(prompt)} tokens, token {place}: {gaps[place]:.2g} below the top logit",
                )
            # Two tokens may have the same logit: what was chosen otherwise first is a tie, too.
            ties += max(1, int(gaps.gt(0).sum()))
        count = sum(map(len, found))
        outcome = "right" if ties <= MOST_TIES * count else "wrong"
        return Outcome(outcome, f"{ties} ties" if ties else "", count, ties)


def run_cell(reference: Reference, axes: dict[str, int], memory: str | None) -> Outcome:
    """Generate a family's prompts with a strategy and a memory tier (None: no budget); judge all ranks' tokens."""
    world = Strategy(axes=axes).axes.world
    with tempfile.TemporaryDirectory() as folder:
        reference.model.save_pretrained(Path(folder) / "model")
        try:
            ranks = run_ranks(
                _generate, world, folder, axes, memory, reference.prompts, reference.tokens, timeout=1200
            )
        except RanksError as error:
            return Outcome("wrong", str(error)[-500:])
    if refused := next(
        (said for _, said in ranks if isinstance(said, str) and said.startswith("refused: ")), None
    ):
        return Outcome("refused", refused.removeprefix("refused: "))
    found = next(
        (found for found in (reference.judge(tokens) for tokens, _ in ranks) if found.outcome != "right"),
        None,
    )
    found = found or reference.judge(ranks[0][0])
    found.moved = [said for _, said in ranks if said]
    if memory is not None and found.outcome == "right" and len(found.moved) < world:
        return Outcome("wrong", f"{memory} was set and {world - len(found.moved)} ranks moved nothing")
    return found


def _generate(
    rank: int,
    world: int,
    folder: str,
    axes: dict[str, int],
    memory: str | None,
    given: list[list[int]],
    tokens: int,
) -> tuple[list[list[int]], str]:
    """Answers, and what was moved or why the cell was refused."""
    from hyper_parallel.config.generate import GenerationStrategy
    from hyper_parallel.inference import Generator

    model = Path(folder) / "model"
    budget: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_tokens": tokens}
    try:
        if memory is not None:
            settings |= SMALL
            place = str(Path(folder) / "flash") if memory == "flash" else "1GiB"
            tier = {memory: place}
            roomy = GenerationStrategy.model_validate({"axes": axes, "memory": {"device": "1GiB", **tier}})
            with Generator(model, strategy=roomy, **settings) as generator:
                budget = {"device": generator.smallest_budget(given), **tier}
        strategy = GenerationStrategy.model_validate({"axes": axes, "memory": budget})
        with Generator(model, strategy=strategy, **settings) as generator:
            return [answer.tokens for answer in generator(given)], generator.moved()
    except HyperParallelError as error:
        return [], f"refused: {error}"
