"""A sample of what the model writes, with every rank in step: the most likely token each time.

There is no cache: each token costs a forward pass over a window of fixed length, which any strategy that trains
can do. Ranks never decide how many passes to make by what they computed, so they cannot lose each other.
"""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.data import Tokenizer
from hyper_parallel.train.forward import inference, logits_of

_STEP = 64


def sample(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, tokens: int, sequence: int, device: torch.device
) -> str:
    """`prompt` and up to `tokens` more tokens, greedily; it ends early at the end-of-text token.

    `sequence` is the longest context in tokens; of a longer text the end is seen.
    """
    ids = tokenizer.encode(prompt) or [tokenizer.eos]
    start = len(ids)
    # A causal model's logits do not depend on what stands after a position, so the window is filled up.
    length = min(sequence, -(-(start + tokens) // _STEP) * _STEP)
    positions = torch.arange(length, device=device).unsqueeze(0)
    with inference(model):
        for _ in range(tokens):
            seen = ids[-length:]
            window = torch.tensor([seen + [tokenizer.pad] * (length - len(seen))], device=device)
            logits = logits_of(model, window, positions)
            ids.append(int(logits[0, len(seen) - 1].float().argmax()))
    added = ids[start:]
    if tokenizer.eos in added:
        added = added[: added.index(tokenizer.eos)]
    return tokenizer.decode(ids[:start] + added)
