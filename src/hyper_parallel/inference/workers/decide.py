"""The next tokens of a pass: chosen by this process, or by one rank of a group for all of it.

Ranks that compute the same pass need the same tokens, or they would no longer run in lockstep. Logits may differ in
their last bits between kinds of processors, so that only one rank chooses, and the others get its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.inference.choose_token import choose, choose_plainly, draw_of
from hyper_parallel.inference.running import Running

Decision = tuple[int, float | None]
"""A token, and the natural logarithm of its probability where the request wants it."""


class Decide(Protocol):
    """Chooses the next token of each request."""

    def __call__(self, ready: Sequence[Running], logits: Tensor) -> list[Decision]:
        """For float32 logits [len(ready), V]."""


def decide(ready: Sequence[Running], logits: Tensor) -> list[Decision]:
    """The tokens that this process chooses."""
    greedy = logits.argmax(-1).tolist()
    wanted = any(one.request.sampling.logprobs for one in ready)
    shares = (logits / _temperatures(ready, logits.device)).log_softmax(-1) if wanted else None
    found = list[Decision]()
    drawn = _drawn_plainly(ready, logits)
    for place, one in enumerate(ready):
        sampling = one.request.sampling
        if sampling.temperature == 0 and sampling.repetition_penalty == 1:
            token = greedy[place]
        elif place in drawn:
            token = drawn[place]
        else:
            token = choose(logits[place].cpu(), sampling, one.tokens, _draw(one))
        found.append(
            (token, float(shares[place, token]) if shares is not None and sampling.logprobs else None)
        )
    return found


def _drawn_plainly(ready: Sequence[Running], logits: Tensor) -> dict[int, int]:
    """The tokens of requests that draw from all tokens without a penalty, at once; by their places."""
    plain = [
        place
        for place, one in enumerate(ready)
        if one.request.sampling.temperature > 0 and one.request.sampling.unfiltered
    ]
    if not plain:
        return {}
    temperatures = torch.tensor(
        [ready[place].request.sampling.temperature for place in plain], dtype=torch.float64
    )
    draws = torch.tensor([_draw(ready[place]) for place in plain], dtype=torch.float64)
    rows = logits if len(plain) == len(ready) else logits[plain]
    return dict(zip(plain, choose_plainly(rows.cpu(), temperatures, draws), strict=True))


def _draw(one: Running) -> float:
    """The number that decides a request's next token."""
    return draw_of(one.request.seed, one.request.row, one.request.sample, len(one.answer.tokens))


def _temperatures(ready: Sequence[Running], device: torch.device) -> Tensor:
    """At which log-probabilities are wanted, fp32 [len(ready), 1]."""
    own = [one.request.sampling for one in ready]
    return torch.tensor(
        [[one.temperature if one.logprobs == "drawn" and one.temperature > 0 else 1.0] for one in own],
        device=device,
    )


class DecideTogether:
    """The first rank of a group chooses for all."""

    def __init__(self, group: Any, chooses: bool) -> None:
        """`chooses`: whether this is the rank."""
        self._group, self._chooses = group, chooses

    def __call__(self, ready: Sequence[Running], logits: Tensor) -> list[Decision]:
        """A collective of the group."""
        wanted = [one.request.sampling.logprobs for one in ready]
        # The rank that chooses adds to zeros: in float64 tokens and logarithms come out as they went in.
        both = torch.zeros(len(ready), 2, dtype=torch.float64, device=logits.device)
        if self._chooses:
            own = decide(ready, logits)
            both.copy_(torch.tensor([(token, share or 0.0) for token, share in own], dtype=torch.float64))
        dist.all_reduce(both, group=self._group)
        return [
            (int(token), share if want else None)
            for (token, share), want in zip(both.tolist(), wanted, strict=True)
        ]
