"""Text sampling with the inference engine's paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.decide import Decision
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.model_support import check_length, check_model, prove
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.running import Running

log = logging.getLogger(__name__)

_STOPPED = -1
"""In place of a token: the run was asked to stop."""


def add_cached(
    model: nn.Module,
    ids: list[int],
    tokens: int,
    choose: Callable[[Tensor, int], int],
    ends: Callable[[], bool],
) -> bool:
    """Add `tokens` tokens to `ids`; none where the engine refuses the model. Whether `ends` returned true before.

    `choose`: token i for float32 logits [V].
    """
    engine = _engine(model, len(ids) + tokens - 1)
    if engine is None:
        return False

    def decide(ready: Sequence[Running], logits: Tensor) -> list[Decision]:
        [one] = ready
        return [(_STOPPED if ends() else choose(logits[0], len(one.answer.tokens)), None)]

    engine.decide = decide
    settings = Inference(max_tokens=tokens, batch=1, prefix_cache=False)
    request = Request(ids=tuple(ids), sampling=settings.sampling())
    [(_, answer)] = engine.run([request], settings, lambda _: "")
    ids += answer.tokens
    return answer.finish == "stop"


def _engine(model: nn.Module, tokens: int) -> Engine | None:
    """An engine for texts of so many tokens; None where it refuses the model, on any rank."""
    found: Engine | None = None
    try:
        config = check_model(model)
        check_length(config, tokens)
        layers = int(config.num_hidden_layers)
        found = Engine(model, Inference().page, layers=layers, eos=frozenset({_STOPPED}))
        prove(found, config)
    except UnsupportedModelError as error:
        log.info("the sample is computed without a KV cache: %s", error)
        found = None
    refused = torch.tensor(float(found is None))
    if dist.is_initialized():
        dist.all_reduce(refused)
    return None if refused.item() else found
