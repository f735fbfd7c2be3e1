"""Sampler: greedy choice, or a draw after the repetition penalty, temperature, top-k and top-p.

The steps and their order are Transformers' logits processors. Draws are in float64 on the host, from numbers that are a
function of (seed, row, sample, token), where `row` stands for the prompt, so that a request's tokens do not depend on
the requests beside it. Of ranks that compute the same pass one chooses for all (`DecideTogether`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.config.inference import Sampling
from hyper_parallel.inference.request import Running


def choose(logits_V: Tensor, sampling: Sampling, seen: Sequence[int], draw: float) -> int:
    """The next token for float32 logits on the host. `seen`: the prompt's and answer's tokens; `draw`: in [0, 1)."""
    if sampling.repetition_penalty != 1.0:
        logits_V = penalized(logits_V, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scores = filtered(_heated(logits_V, sampling.temperature), sampling)
    shares = scores.softmax(-1).cumsum(-1)
    place = int(torch.searchsorted(shares, draw * float(shares[-1]), right=True))
    # A token without probability is never taken, also where the sum falls short by a rounding.
    return min(place, int(scores.isfinite().nonzero()[-1]))


def choose_plainly(logits_NV: Tensor, temperatures_N: Tensor, draws_N: Tensor) -> list[int]:
    """What `choose` chooses for each row, without filters and penalty: float32 logits, float64 temperatures above 0 and
    draws, on the host."""
    scores_NV = _heated(logits_NV, temperatures_N[:, None])
    shares_NV = scores_NV.softmax(-1).cumsum(-1)
    wanted_N1 = draws_N[:, None] * shares_NV[:, -1:]
    places_N = torch.searchsorted(shares_NV, wanted_N1, right=True)[:, 0]
    possible_NV = scores_NV.isfinite()
    if bool(possible_NV[:, -1].all()):
        last_N = torch.full_like(places_N, logits_NV.size(-1) - 1)
    else:
        # The last token with any probability of each row.
        last_N = logits_NV.size(-1) - 1 - possible_NV.flip(-1).int().argmax(-1)
    found: list[int] = torch.minimum(places_N, last_N).tolist()
    return found


def _heated(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits divided by a temperature above 0, less the largest one first: the quotient by a tiny temperature is
    infinite (Python's floats go below 1e-300)."""
    logits = logits.double()
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def penalized(logits_V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Logits of tokens that were seen, divided by the penalty where positive, else multiplied by it."""
    tokens = torch.tensor(sorted(set(seen)), dtype=torch.int64)
    scores = logits_V[tokens]
    return logits_V.index_copy(0, tokens, torch.where(scores < 0, scores * penalty, scores / penalty))


def filtered(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """Scores with -inf where top-k or top-p leaves a token out. The most likely token always stays."""
    if sampling.top_k is not None and sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, places = scores_V.sort(descending=False, stable=True)
        # Tokens from the least likely on, as long as they add up to at most 1 - p, are left out.
        out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out[-1] = False
        scores_V = scores_V.masked_fill(torch.zeros_like(out).index_copy(0, places, out), float("-inf"))
    return scores_V


def draw_of(seed: int, row: int, sample: int, token: int) -> float:
    """A number in [0, 1) for one token of an answer: 53 bits of a hash of its place."""
    digest = hashlib.blake2b(f"{seed}:{row}:{sample}:{token}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


# The next tokens of a pass: chosen by this process, or by one rank of a group for all of it.
#
# Ranks that compute the same pass need the same tokens, or they would no longer run in lockstep. Logits may differ in
# their last bits between kinds of processors, so that only one rank chooses, and the others get its choice.

Decision = tuple[int, float | None]
"""A token, and the natural logarithm of its probability where the request wants it."""


class Decide(Protocol):
    """Chooses the next token of each request."""

    def __call__(self, ready: Sequence[Running], logits: Tensor) -> list[Decision]:
        """For float32 logits [len(ready), V]."""


def decide(ready: Sequence[Running], logits: Tensor) -> list[Decision]:
    """The tokens that this process chooses."""
    greedy = logits.argmax(-1).tolist()
    samplings = [one.request.sampling for one in ready]
    shares: Tensor | None = None
    if any(one.logprobs for one in samplings):
        # Log-probabilities are of the distribution that tokens were drawn from, or of the model's own.
        temperatures = [
            one.temperature if one.logprobs == "drawn" and one.temperature > 0 else 1.0 for one in samplings
        ]
        shares = (logits / torch.tensor(temperatures, device=logits.device)[:, None]).log_softmax(-1)
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
