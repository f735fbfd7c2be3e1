"""Text sampling with the inference engine's paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.model_support import check_length, offered_engine
from hyper_parallel.inference.request import Request, Running, no_text
from hyper_parallel.inference.sampler import Decision

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
    [(_, answer)] = engine.run([request], settings, no_text)
    ids += answer.tokens
    return answer.finish == "stop"


def _engine(model: nn.Module, tokens: int) -> Engine | None:
    """An engine for texts of `tokens` tokens; None where it refuses them."""
    engine = offered_engine(model, "the sample is computed", frozenset({_STOPPED}))
    if engine is not None:
        try:
            check_length(engine.model.config.get_text_config(decoder=True), tokens)
        except UnsupportedModelError:
            return None
    return engine
