"""Runs comparisons with the owner or reads their cached verdicts; refuses data axes where rows depend on each other."""

from __future__ import annotations

import json
import logging
import time
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hyper_parallel.compat.pytree import leaves_of
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.owner_check.comparisons import ALONE, Comparison, Kind, compare
from hyper_parallel.shard.owner_check.seen_rows import compare_rows
from hyper_parallel.shard.region_check import result_cache
from hyper_parallel.shard.region_check.check import SKIP, agreed_verdict, checks, vocabulary_of
from hyper_parallel.shard.region_check.outcome import Spread
from hyper_parallel.shard.region_check.sample_inputs import SeenCall
from hyper_parallel.shard.sharded_model import ROW_AXES
from hyper_parallel.strategy import Strategy

log = logging.getLogger(__name__)

_remembered: WeakKeyDictionary[nn.Module, dict[Kind, Comparison]] = WeakKeyDictionary()
"""What the check of a run found, by its model before it is parallelized."""


def verdicts(
    model: nn.Module,
    kinds: tuple[Kind, ...],
    spread: Spread,
    *,
    vocabulary: int | None = None,
    together: tuple[int, ...] = (),
) -> dict[Kind, Comparison]:
    """The comparisons of these kinds, cached; equal on all ranks that check together, of which the first one compares.

    `model` and `vocabulary` are as of `compare`. A collective.
    """

    def found() -> dict[str, Any]:
        digest = result_cache.digest(model, ALONE, None)
        texts = {kind: result_cache.cached_text(_key(digest, kind, vocabulary)) for kind in kinds}
        missing = tuple(kind for kind, text in texts.items() if text is None)
        if missing:
            begun = time.perf_counter()
            report = compare(model, kinds=missing, vocabulary=vocabulary, spread=spread).to_json()
            log.info("compared with the model's own code in %.1f s: %s", time.perf_counter() - begun, report)
            for kind in missing:
                texts[kind] = json.dumps(report["comparisons"][kind])
                result_cache.keep(_key(digest, kind, vocabulary), texts[kind] or "")
        return {kind: json.loads(text or "{}") for kind, text in texts.items()}

    return {kind: Comparison(**one) for kind, one in agreed_verdict(found, together).items()}


def remember(model: nn.Module, found: dict[Kind, Comparison]) -> None:
    """Keep verdicts with a model that does not change until it is parallelized."""
    _remembered[model] = found


def _key(digest: str, kind: str, vocabulary: int | None) -> str:
    return f"{digest}-{kind}" if vocabulary is None else f"{digest}-{kind}-{vocabulary}"


def check_rows(
    model: nn.Module,
    strategy: Strategy,
    spread: Spread,
    together: tuple[int, ...] = (),
) -> int | None:
    """Refuse data axes for a causal language model whose rows depend on each other. Returns the number of positions
    that rows may have without depending on each other; None for any. A collective.

    Raises StrategyError.
    """
    if not checks(strategy) or strategy.axes.data == 1 or vocabulary_of(model) is None:
        return None
    found = _remembered.get(model) or verdicts(model, ("rows", "length"), spread, together=together)
    refuse_dependent(model, found["rows"], strategy)
    return found["length"].positions


def refuse_dependent(model: nn.Module, rows: Comparison, strategy: Strategy, micro_batches: int = 1) -> None:
    """Raise StrategyError where rows depend on each other and are not all computed together."""
    if rows.right:
        return
    name = type(without_adapters(model)).__name__
    reason = f"the rows of a batch depend on each other in {name} (a row beside another: {rows.detail})"
    if strategy.axes.data > 1:
        raise StrategyError(
            f"{reason}, and {_data_axes(strategy)} gives each rank some of them; {_one_rank()}"
        )
    if micro_batches > 1:
        raise StrategyError(
            f"{reason}, and {micro_batches} micro-batches are computed one after the other; leave "
            f"train.micro_batch out, or make it train.batch ({SKIP})"
        )


def _data_axes(strategy: Strategy) -> str:
    return " and ".join(f"axes.{axis}" for axis in ROW_AXES if strategy.axes.degree(axis) > 1)


def _one_rank() -> str:
    return f"set axes.shard and axes.replicate to 1 ({SKIP})"


def check_rows_of_call(
    strategy: Strategy, together: tuple[int, ...], original: nn.Module, call: SeenCall
) -> None:
    """Refuse data axes for a module of the user's whose rows depend on each other, in a call. A collective.

    Raises StrategyError.
    """
    if not checks(strategy) or strategy.axes.data == 1:
        return
    draw = current_step().draw
    count = None if draw is None else draw.rows.numel()

    def found() -> dict[str, Any]:
        key = f"{result_cache.digest(original, ALONE, call)}-rows-{count}"
        text = result_cache.cached_text(key)
        if text is None:
            one = compare_rows(original, call, count)
            text = json.dumps(vars(one))
            result_cache.keep(key, text)
        verdict: dict[str, Any] = json.loads(text)
        return verdict

    verdict = Comparison(**agreed_verdict(found, together))
    if verdict.written:
        name = type(original).__name__
        raise StrategyError(
            f"the forward pass of {name} writes {verdict.written!r}, and what it writes depends on the rows that it is "
            f"given; {_data_axes(strategy)} gives each rank some of them; {_one_rank()}"
        )
    refuse_dependent(original, verdict, strategy)


def refuse_longer(model: nn.Module, strategy: Strategy, positions: int) -> None:
    """Let a model refuse rows of more than these positions, beside which others would be computed otherwise."""
    # FSDP2 gives modules classes of its own.
    name = type(without_adapters(model)).__name__.removeprefix("FSDP")

    def guard(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        tensors = (one for one in leaves_of((args, kwargs)) if isinstance(one, Tensor) and one.dim() == 2)
        length = max((one.size(1) for one in tensors), default=0)
        given = kwargs.get("position_ids")
        if length > positions and (given is None or int(given.max()) >= positions):
            raise StrategyError(
                f"a row has more than {positions} positions, and the rotary factors of {name} follow the longest row "
                f"that is computed with it, while {_data_axes(strategy)} gives each rank some of the rows; give rows "
                f"of at most {positions} positions, or {_one_rank()}"
            )
        return forward(*args, **kwargs)

    wrap(without_adapters(model), guard)


__all__ = ["check_rows", "check_rows_of_call", "refuse_dependent", "refuse_longer", "remember", "verdicts"]
