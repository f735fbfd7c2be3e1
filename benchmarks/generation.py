"""Generation in benchmarks: requests that are drawn, those who answer them, and how they are compared.

Who answers gives the same greedy tokens; answers that differ are listed with the distance of the two logits where they
first do, which is a tie where it is small.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from measure import Taken, in_turns, paired_ratio, taken
from torch import Tensor
from transformers import ContinuousBatchingConfig

from hyper_parallel import Generator

Answers = list[list[int]]
Run = Callable[[], Answers]
Cache = Callable[[], AbstractContextManager[Any]]


# Requests.


@dataclass(frozen=True)
class Work:
    """Prompts, and the tokens of each answer."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer, to which a static batch may be padded."""
        return max(map(len, self.prompts)) + max(self.lengths)


def drawn(
    requests: int,
    prompts: tuple[int, int],
    answers: tuple[int, int],
    vocabulary: int,
    lengths_first: bool = False,
) -> Work:
    """Requests with lengths between those given. `lengths_first`: draw the lengths of answers before the prompts."""
    draws = torch.Generator().manual_seed(7)

    def between(bounds: tuple[int, int]) -> list[int]:
        return torch.randint(bounds[0], bounds[1] + 1, (requests,), generator=draws).tolist()

    sizes = between(prompts)
    lengths = between(answers) if lengths_first else []
    ids = [torch.randint(4, vocabulary, (size,), generator=draws).tolist() for size in sizes]
    return Work(ids, lengths or between(answers))


# Answers.


def answered(generator: Generator, work: Work) -> Run:
    """`Generator`: all requests at once, each with its own length."""
    each = [generator.settings.model_copy(update={"max_tokens": length}) for length in work.lengths]

    def run() -> Answers:
        requests = [generator.request(ids, chosen) for ids, chosen in zip(work.prompts, each, strict=True)]
        found = dict(generator.run(requests))
        return [found[place].tokens for place in range(len(requests))]

    return run


def padded(prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [B, longest], padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def generated(
    model: Any,
    work: Work,
    size: int,
    cache: Cache = nullcontext,
    order: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Answers:
    """`model.generate` on static batches in an order, that of the requests where none is given; each batch has a cache
    of its own, and runs until its longest answer is there."""
    order = order or range(len(work.prompts))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        ids, mask = padded([work.prompts[place] for place in batch], device)
        most = max(work.lengths[place] for place in batch)
        with cache() as one:
            own = {} if one is None else {"past_key_values": one}
            out = model.generate(ids, attention_mask=mask, max_new_tokens=most, **own)
        for place, row in zip(batch, out, strict=True):
            found[place] = row[ids.size(1) : ids.size(1) + work.lengths[place]].tolist()
    return [found[place] for place in range(len(order))]


def static(model: Any, work: Work, size: int) -> Run:
    """`generate` on batches sorted by the lengths of answers."""
    order = sorted(range(len(work.prompts)), key=work.lengths.__getitem__)
    return lambda: generated(model, work, size, order=order, device=model.device)


def continuous(model: Any, work: Work, page: int) -> Run:
    """`generate_batch` with each request's own length, which its own arguments have for all requests only."""
    tokens = [len(ids) + length for ids, length in zip(work.prompts, work.lengths, strict=True)]
    blocks = sum(-(-one // page) for one in tokens)

    def run() -> Answers:
        config = ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=256, max_requests_per_batch=len(tokens)
        )
        batching = model.continuous_batching_context_manager(continuous_batching_config=config)
        found: dict[str, list[int]] = {}
        with torch.no_grad(), batching as manager:
            for place, (ids, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
                manager.add_request(ids, request_id=str(place), max_new_tokens=length)
            while len(found) < len(tokens):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    found[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the thread of generate_batch ended before its requests")
        model.set_attn_implementation("sdpa")
        return [found[str(place)] for place in range(len(tokens))]

    return run


# Comparison.


def turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Taken]]:
    """Each alternative once a round, of which the first is not counted; with `rounds` 0 it is all there is."""
    return in_turns(runs, max(rounds, 1), taken, warm=1 if rounds else 0)


KINDS = ("clock", "processor")
"""Of seconds."""


def seconds(runs: Sequence[Taken], kind: str) -> list[float]:
    """Of each run."""
    return [getattr(one, kind) for one in runs]


def medians(runs: Sequence[Taken]) -> dict[str, float]:
    """Seconds of the clock and of the processor."""
    return {f"{kind}_s": statistics.median(seconds(runs, kind)) for kind in KINDS}


def ratios(runs: Sequence[Taken], others: Sequence[Taken]) -> dict[str, dict[str, float]]:
    """How many times the seconds of `others` these take, by the clock and by the processor."""
    return {kind: paired_ratio(seconds(runs, kind), seconds(others, kind)) for kind in KINDS}


def equal_tokens(one: Sequence[int], two: Sequence[int]) -> int:
    """Before the first that differs."""
    return next((at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), len(one))


def logit_gaps(model: Any, work: Work, own: Answers, other: Answers) -> list[float]:
    """Of each answer that differs: how near the two logits are where it first does."""
    gaps = []
    for prompt, one, two in zip(work.prompts, own, other, strict=True):
        if (place := equal_tokens(one, two)) < len(one):
            with torch.no_grad():
                ids = torch.tensor([prompt + one[:place]], device=model.device)
                logits = model(ids).logits[0, -1]
            gaps.append(float((logits[one[place]] - logits[two[place]]).abs()))
    return gaps


def differences(model: Any, work: Work, own: Answers, other: Answers) -> dict[str, Any]:
    """Answers that differ, and the largest distance of logits."""
    gaps = logit_gaps(model, work, own, other)
    return {"answers": len(gaps), "largest_gap": max(gaps, default=0.0)}


def circumstances(result: Mapping[str, Any]) -> Iterator[str]:
    """What stands above a table of a result with `rounds` and `load`."""
    load = f"Load of the machine's {result['machine']['cores']} cores before it began: {result['load']:.1f}."
    yield from (f"Rounds: {result['rounds']}. {load}", "")
