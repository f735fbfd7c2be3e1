"""Text sampling from the model during training.

The inference engine (paged KV cache) computes each token once. What it cannot run (context parallelism, models that it
refuses, a text longer than the context) is computed without a cache: a forward pass over a window of fixed length for
each token, which any strategy that trains can do. Both give the same text up to rounding.

Where parts of the model are on several ranks, each token costs a forward pass through all of them, and beside images
one with these: `next_logits` computes it.

Ranks never decide how many passes to make by what they computed, so they cannot lose each other. Every rank draws the
same numbers, on the host in fp64, so that rounding in the logits hardly ever changes a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.data import Tokenizer
from hyper_parallel.data.multimodal import MediaPrompt
from hyper_parallel.shard.forward import inference
from hyper_parallel.shard.loss import logits_of

_STEP = 64
NextLogits = Callable[[Sequence[int], int], Tensor]
"""(ids of a window, a place in it) to the logits [V] of the token behind this place, the same on every rank."""


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
    next_logits: NextLogits | None = None,
    placeholders: Collection[int] = (),
) -> str:
    """The text of the ids `prompt` and of up to `tokens` more; it ends early before any of the ids `stops`, and where
    `ends` returned true, which is asked before each token and must be the same on every rank.

    `sequence` is the longest context in tokens; of a longer text the end is seen. Temperature 0 takes the most
    likely token; above it, token i is drawn with a number that is a function of (seed, i). `next_logits`: what computes
    a window; left out, the model is called. `placeholders`: ids of which neighbours are shown once: of media.
    """
    draws = torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = list(prompt) or [tokenizer.eos]
    start = len(ids)
    within = min(tokens, sequence - start + 1)
    stopped = False
    if within > 0 and next_logits is None and hasattr(model, "config"):
        # Here, since it imports Transformers, which training needs for Transformers' models alone.
        from hyper_parallel.train.cached_sample import add_cached

        stopped = add_cached(
            model, ids, within, lambda logits, i: _choose(logits, temperature, draws[i]), ends
        )
    # What the cache or the context had no room for.
    if not stopped:
        # A causal model's logits do not depend on what stands after a position, so the window is filled up.
        length = min(sequence, -(-(start + tokens) // _STEP) * _STEP)
        logits = next_logits or window_logits(model, device)
        with inference(model):
            for draw in draws[len(ids) - start :]:
                if ends():
                    break
                seen = ids[-length:]
                window = seen + [tokenizer.pad] * (length - len(seen))
                ids.append(_choose(logits(window, len(seen) - 1), temperature, draw))
    added = list(itertools.takewhile(lambda token: token not in stops, ids[start:]))
    shown = [
        one for at, one in enumerate(ids[:start]) if one not in placeholders or ids[at - 1 : at] != [one]
    ]
    return tokenizer.decode(shown + added)


def window_logits(model: nn.Module, device: torch.device, prompt: MediaPrompt | None = None) -> NextLogits:
    """A forward pass of the whole model over each window, with the media of `prompt`, which windows begin with."""

    def logits(window: Sequence[int], place: int) -> Tensor:
        if prompt is None:
            ids, positions = torch.tensor([window], device=device), torch.arange(len(window), device=device)
            return logits_of(model, ids, positions.unsqueeze(0))[0, place]
        # Of any length: steps on such rows are not captured.
        given = {name: one.to(device) for name, one in prompt.inputs(window[: place + 1]).items()}
        return logits_of(model, given.pop("input_ids"), None, **given)[0, place]

    return logits


def _choose(logits_V: Tensor, temperature: float, draw: Tensor) -> int:
    if temperature == 0:
        return int(logits_V.float().argmax())
    shares = (logits_V.double().cpu() / temperature).softmax(-1).cumsum(-1)
    # The last share may fall short of 1 by a rounding.
    return min(int(torch.searchsorted(shares, draw)), len(shares) - 1)
