"""Token choice: greedy, or drawn after the repetition penalty, temperature, top-k and top-p.

The steps and their order are Transformers' logits processors. Draws are in float64 on the host, from numbers that are a
function of (seed, row, sample, token), where `row` stands for the prompt, so that a request's tokens do not depend on
what runs beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hyper_parallel.config.inference import Sampling


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
    """Logits divided by a temperature above 0, less the largest one first: the quotient by a tiny temperature, of which
    Python's floats have some below 1e-300, is infinite."""
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
