"""Text sampling from the model during training.

The inference engine (paged KV cache) computes each token once. What it cannot run (context parallelism, models that it
refuses, a text longer than the context) is computed without a cache: a forward pass over a window of fixed length for
each token, which any strategy that trains can do. Both give the same text up to rounding.

Ranks never decide how many passes to make by what they computed, so they cannot lose each other. Every rank draws the
same numbers, on the host in fp64, so that rounding in the logits hardly ever changes a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.data import Tokenizer
from hyper_parallel.shard.forward import inference
from hyper_parallel.shard.loss import logits_of

_STEP = 64


def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: int,
    *,
    stops: Collection[int],
    sequence: int,
    device: torch.device,
    temperature: float = 0.0,
    seed: int = 0,
    ends: Callable[[], bool] = lambda: False,
) -> str:
    """The text of the ids `prompt` and of up to `tokens` more; it ends early before any of the ids `stops`, and where
    `ends` returned true, which is asked before each token and must be the same on every rank.

    `sequence` is the longest context in tokens; of a longer text the end is seen. Temperature 0 takes the most
    likely token; above it, token i is drawn with a number that is a function of (seed, i).
    """
    draws = torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = list(prompt) or [tokenizer.eos]
    start = len(ids)
    within = min(tokens, sequence - start + 1)
    stopped = False
    if within > 0 and hasattr(model, "config"):
        # Here, since it imports Transformers, which training needs for Transformers' models alone.
        from hyper_parallel.train.cached_sample import add_cached

        stopped = add_cached(
            model, ids, within, lambda logits, i: _choose(logits, temperature, draws[i]), ends
        )
    # What the cache or the context had no room for.
    if not stopped:
        # A causal model's logits do not depend on what stands after a position, so the window is filled up.
        length = min(sequence, -(-(start + tokens) // _STEP) * _STEP)
        _with_windows(model, ids, draws[len(ids) - start :], temperature, ends, length, tokenizer.pad, device)
    added = list(itertools.takewhile(lambda token: token not in stops, ids[start:]))
    return tokenizer.decode(ids[:start] + added)


def _with_windows(
    model: nn.Module,
    ids: list[int],
    draws: Tensor,
    temperature: float,
    ends: Callable[[], bool],
    length: int,
    pad: int,
    device: torch.device,
) -> None:
    """Add a token to `ids` for each draw, until `ends` returns true."""
    positions = torch.arange(length, device=device).unsqueeze(0)
    with inference(model):
        for draw in draws:
            if ends():
                return
            seen = ids[-length:]
            window = torch.tensor([seen + [pad] * (length - len(seen))], device=device)
            logits = logits_of(model, window, positions)
            ids.append(_choose(logits[0, len(seen) - 1], temperature, draw))


def _choose(logits_V: Tensor, temperature: float, draw: Tensor) -> int:
    if temperature == 0:
        return int(logits_V.float().argmax())
    shares = (logits_V.double().cpu() / temperature).softmax(-1).cumsum(-1)
    # The last share may fall short of 1 by a rounding.
    return min(int(torch.searchsorted(shares, draw)), len(shares) - 1)
