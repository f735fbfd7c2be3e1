"""Models small enough for a test, and loops of a person's own around them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from harness.observer import Observer
from hyper_parallel.errors import BudgetError

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "tied": {"model_type": "llama", "tie_word_embeddings": True, **_LLAMA},
    "gpt2": {  # with dropout
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def model_of(family: str, **changes: Any) -> nn.Module:
    """With the same values each time."""
    sizes = {**FAMILIES[family], **changes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def batch_of(rows: int = 4, length: int = 32, seed: int = 0, padded: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


@dataclass
class Trained:
    """What a loop came to."""

    losses: list[float] = field(default_factory=list)
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Of live bytes in each step's two passes."""
    random: torch.Tensor | None = None
    """The generator's state at the end."""


def trained(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]], observed: bool = False) -> Trained:
    """A loop of a person's own, with AdamW."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = Trained()
    for batch in batches:
        moments = [x for state in optimizer.state.values() for x in state.values()]
        there = [*model.parameters(), *model.buffers(), *moments]
        with Observer(there) if observed else contextlib.nullcontext() as observer:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        if observer is not None:
            found.peaks.append(observer.peak)
        found.losses.append(loss.item())
        found.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        del loss
    found.parameters = [p.detach().clone() for p in model.parameters()]
    found.random = torch.get_rng_state()
    return found


def same(one: Trained, other: Trained) -> bool:
    """To the bit."""
    gradients = zip(chain(*one.gradients), chain(*other.gradients), strict=True)
    return (
        one.losses == other.losses
        and all(a is b is None or torch.equal(a, b) for a, b in gradients)
        and all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))
        and torch.equal(one.random, other.random)
    )


def at_the_floor(
    make: Callable[[], nn.Module], run: Callable[[nn.Module], Any], **tiers: Any
) -> tuple[Any, int]:
    """What `run` comes to within 1% more than the smallest budget that there is; and that budget."""
    budget = 1
    for _ in range(5):
        model = hp.offload(make(), budget=budget, **tiers)
        try:
            return run(model), budget
        except BudgetError as error:
            [least] = re.findall(r"at least ([\d,]+) bytes", str(error))
            budget = int(1.01 * int(least.replace(",", "")))
        finally:
            hp.release(model)
    raise AssertionError("each budget that was said to do was refused")
