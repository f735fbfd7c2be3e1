"""Runs comparisons with the owner or reads their cached verdicts; refuses data axes where rows depend on each other.

Also for a module of the user's, by the rows of its first call.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import leaves_of, mapped
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.owner_check.comparisons import (
    ALONE,
    Comparison,
    Kind,
    compare,
    decided,
    without_dropout,
)
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.process_mesh import ROW_AXES
from hyper_parallel.shard.region_check import result_cache
from hyper_parallel.shard.region_check.check import (
    SKIP,
    agreed_verdict,
    checks,
    copy_modes,
    quiet,
    vocabulary_of,
)
from hyper_parallel.shard.region_check.outcome import TOLERANCE, Outcome, SeenCall, Spread
from hyper_parallel.shard.region_check.reduced_model import reduce
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
    """The comparisons of these kinds, cached; equal on all ranks that check together; the first one compares.

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
    model: nn.Module, strategy: Strategy, spread: Spread, together: tuple[int, ...] = ()
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
    # FSDP2 gives modules its own classes.
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


# Whether the rows of a call depend on each other, or on what it writes, in a module called as its user calls it.
#
# A second call is drawn in the same shapes, and both are computed one by one, and as one call of twice the rows. So
# each pass has as many rows as the user gives, or more: batch statistics of one row raise errors of their own.


def compare_rows(original: nn.Module, call: SeenCall, count: int | None) -> Comparison:
    """Compare the call's rows alone with the same beside others, on a copy with random values.

    `count`: the number of rows, where it is known; else it is the first dim of the first tensor.
    """
    first = next(
        (x for x in leaves_of((call.args, dict(call.kwargs))) if isinstance(x, Tensor) and x.dim()), None
    )
    if first is None:
        return Comparison("not applicable", "the call has no tensor with rows")
    count = first.size(0) if count is None else count
    if count not in first.shape:
        return Comparison("not applicable", f"no dim of the first tensor has the {count} rows of the batch")
    dim = first.shape.index(count)
    other = SeenCall.of(call.args, call.kwargs, seed=1)
    together = _joined(call, other, count, dim)
    with quiet():
        for small in reduce(original, make_plan(original, ALONE), ALONE):
            template = without_dropout(small.model)
            copy_modes(original, template)
            values = copy.deepcopy(template)
            found = decided(
                lambda precise, template=template: _outcomes(  # type: ignore[misc]
                    template.to(torch.float64) if precise else template, (call, other), together, dim
                )
            )
            if found.verdict == "right" and (name := _written_from_rows(values, (call, other, together))):
                return Comparison("differs", "it writes from its rows", written=name)
            return found
    return Comparison("not applicable", "no copy of it is small enough")


def _written_from_rows(template: nn.Module, calls: tuple[SeenCall, ...]) -> str:
    """The first weight or buffer that calls with other rows leave with other values; empty where there is none."""
    after: list[dict[str, Tensor]] = []
    for call in calls:
        module = copy.deepcopy(template)
        with torch.no_grad():
            module(*call.args, **dict(call.kwargs))
        after.append(dict([*module.named_parameters(), *module.named_buffers()]))
    first, *others = after
    for name, value in first.items():
        for other in others:
            # What grows with the rows is a table, no state.
            if name in other and other[name].shape == value.shape and not _close(value, other[name]):
                return name
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _joined(call: SeenCall, other: SeenCall, count: int, dim: int) -> SeenCall:
    """Both calls as one: every tensor that has the rows in this dim has those of both."""
    others = iter(leaves_of((other.args, dict(other.kwargs))))

    def both(leaf: Any) -> Any:
        second = next(others)
        if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.size(dim) == count:
            return torch.cat([leaf, second], dim)
        return leaf

    return SeenCall(*mapped(both, (call.args, dict(call.kwargs))))


def _outcomes(
    template: nn.Module, calls: tuple[SeenCall, SeenCall], together: SeenCall, dim: int
) -> tuple[Outcome, Outcome]:
    first, second = (_outputs(template, call) for call in calls)
    whole = _outputs(template, together)
    alone, beside = dict[str, Tensor](), dict[str, Tensor]()
    for at, (a, b, both) in enumerate(zip(first, second, whole, strict=True)):
        if a.dim() > dim and both.shape == torch.cat([a, b], dim).shape:
            alone[f"output {at}"], beside[f"output {at}"] = torch.cat([a, b], dim), both
    if not alone:
        # Losses: those of more rows are the mean of the losses, or their sum.
        for at, (a, b, both) in enumerate(zip(first, second, whole, strict=True)):
            if both.shape == a.shape:
                total = a + b
                nearer = float((total - both).abs().max()) < float((total / 2 - both).abs().max())
                alone[f"output {at}"], beside[f"output {at}"] = total if nearer else total / 2, both
    return Outcome(0.0, alone), Outcome(0.0, beside)


def _outputs(template: nn.Module, call: SeenCall) -> list[Tensor]:
    """The floating-point tensors that a fresh copy returns."""

    def wide(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.get_default_dtype()) if floating else leaf

    args, kwargs = mapped(wide, (call.args, dict(call.kwargs)))
    with torch.no_grad():
        output = copy.deepcopy(template)(*args, **kwargs)
    return [x for x in leaves_of(output) if isinstance(x, Tensor) and x.is_floating_point()]
