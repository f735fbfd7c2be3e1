"""Runs the region check, or reads its cached result; one rank decides for all that have its strategy."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.compat import fake_tensors, process_groups
from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.compat.local_tensor import is_simulated
from hyper_parallel.errors import FollowsError, HyperParallelError, SimulationError, StrategyError
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import is_transformers, text_config
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.region_check import diagnosis, result_cache
from hyper_parallel.shard.region_check.diagnosis import unrepeatable
from hyper_parallel.shard.region_check.outcome import (
    Mismatch,
    NothingToCompare,
    SampleCall,
    SeenCall,
    Spread,
    TokenCall,
    compared,
    in_one_line,
    run,
)
from hyper_parallel.shard.region_check.reduced_model import Reduced, reduce
from hyper_parallel.shard.weights_written_in_forward import WRITTEN_UNDER_TENSOR
from hyper_parallel.strategy import Strategy, recomputes

log = logging.getLogger(__name__)

_BEFORE_CALL = "_hyper_parallel_before_call"
"""The attribute of a model that holds what its first call checks."""
_CHECKED = "_hyper_parallel_checked"
"""The attribute of a model that holds the strategy which was checked on it."""
SKIP = "strategy.check: false trains without the check"
LENGTH = 24
"""Positions of a check's rows, or the next number that the strategy can split."""

_asked = Counter[tuple[int, ...]]()
"""How often the ranks that check together did so: others may have done so without this one."""


@dataclass(frozen=True)
class Unchecked:
    """Why nothing could be compared."""

    why: str

    def __str__(self) -> str:
        return self.why


def check_before_training(
    model: nn.Module,
    strategy: Strategy,
    plan: Plan,
    spread: Spread,
    vocabulary: int | None = None,
    together: tuple[int, ...] = (),
) -> bool:
    """Check a causal language model on random tokens. Returns False where its calls are not known yet.

    `model`: as it is before any strategy; it is not changed. `vocabulary`: of a model that is not Transformers'.
    `together`: the ranks with this strategy; the first one checks. All by default. A collective of them.
    Raises StrategyError on every one when the strategy is wrong.
    """
    if not needed(model, strategy):
        return True
    size = vocabulary_of(model) or vocabulary
    if size is None:
        return False
    _decided(model, strategy, plan, _token_calls(size), spread, together)
    model.__dict__[_CHECKED] = strategy
    return True


def refusal_before_training(
    model: nn.Module, strategy: Strategy, plan: Plan, spread: Spread, vocabulary: int
) -> str | None:
    """Why `check_before_training` refuses the strategy on a model of `vocabulary` token ids; None where it does not.
    Each rank checks by itself."""
    if not checks(strategy) or strategy.axes.world == 1:
        return None
    size = vocabulary_of(model) or vocabulary
    return _refusal(model, strategy, plan, _token_calls(size), spread)


def _token_calls(vocabulary: int) -> list[SampleCall]:
    return [TokenCall(vocabulary, 0, 0), TokenCall(vocabulary, 0, 0, positions=False)]


def check_on_first_call(
    model: nn.Module,
    original: nn.Module,
    strategy: Strategy,
    plan: Plan,
    spread: Spread,
    together: tuple[int, ...] = (),
    also: Callable[[nn.Module, SeenCall], None] = lambda original, call: None,
) -> None:
    """Check a parallelized model when it is first called with gradients: until then nobody knows how.

    `original`: the model as it was, without values. `also`: checks the original and the call too. What is wrong raises
    StrategyError in that call, on every rank, before anything was updated.
    """

    def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ready = torch.is_grad_enabled() and model.training and not any(is_fake(leaf) for leaf in given)
        if ready and needed(model, strategy):
            model.__dict__[_CHECKED] = strategy
            values = dict(model.named_buffers())
            for name, buffer in [*original.named_buffers()]:
                owner, _, own = name.rpartition(".")
                if name in values and buffer.is_meta:
                    original.get_submodule(owner)._buffers[own] = values[name].detach().cpu().clone()
            call = SeenCall.of(args, kwargs)
            _decided(original, strategy, plan, [call], spread, together)
            copy_modes(model, original)
            also(original, call)

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        return forward(*args, **kwargs)

    model.__dict__[_BEFORE_CALL] = before
    wrap(model, wrapper)


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check a captured call as the first call of a parallelized model is checked. Raises StrategyError."""
    before = model.__dict__.get(_BEFORE_CALL)
    if before is not None:
        before(args, kwargs)


def copy_modes(model: nn.Module, copy: nn.Module) -> None:
    """Give each module of a copy the mode of the model's: statistics of the batch may be frozen."""
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in copy.named_modules():
        module.training = modes.get(name, module.training)


def needed(model: nn.Module, strategy: Strategy) -> bool:
    """Whether there is anything to check: several ranks, real ones, and nobody said no."""
    return strategy.axes.world > 1 and checks(strategy) and model.__dict__.get(_CHECKED) != strategy


def checks(strategy: Strategy) -> bool:
    """Whether models are checked before they are trained: on real devices, unless somebody said no."""
    return strategy.check and not is_simulated() and not fake_tensors.is_simulation()


_FAILED = {"failed": True}
"""In the place of a verdict, when the rank that decides was stopped or failed before it had one."""


def _decided(
    model: nn.Module,
    strategy: Strategy,
    plan: Plan,
    calls: list[SampleCall],
    spread: Spread,
    together: tuple[int, ...],
) -> None:
    """The verdict of the first rank on every rank."""
    refusal = agreed_verdict(lambda: _refusal(model, strategy, plan, calls, spread), together)
    if refusal:
        raise StrategyError(refusal)


def agreed_verdict(check: Callable[[], Any], together: tuple[int, ...] = ()) -> Any:
    """The verdict that `check` returns on the first of the ranks that check together, JSON-able, on every one of
    them."""
    _asked[together] += 1
    decides = together[0] if together else 0
    key, verdict = f"hyper-parallel/check/{','.join(map(str, together))}/{_asked[together]}", None
    mine = not dist.is_initialized() or dist.get_rank() == decides
    if mine:
        try:
            verdict = check()
        except BaseException:
            # The others wait for a word.
            if dist.is_initialized():
                process_groups.broadcast_text(key, json.dumps(_FAILED))
            raise
    if dist.is_initialized():
        verdict = json.loads(process_groups.broadcast_text(key, json.dumps(verdict) if mine else None))
        if verdict == _FAILED:
            raise FollowsError(f"rank {decides} did not finish the check of the strategy; it says why")
    return verdict


def _refusal(
    model: nn.Module, strategy: Strategy, plan: Plan, calls: list[SampleCall], spread: Spread
) -> str | None:
    """Why the strategy is refused for this model; None where it is right, or cannot be checked, which is logged."""
    key = result_cache.digest(model, strategy, calls[0])
    if result_cache.passed(key):
        return None
    log.info("checking the strategy on random numbers, once for this model")
    begun = time.perf_counter()
    with quiet():
        found = _on_a_copy(model, strategy, plan, calls, spread)
    seconds = time.perf_counter() - begun
    if isinstance(found, str):
        return found
    if isinstance(found, Unchecked):
        log.warning(
            "the strategy was not checked on this model: %s; `hyper-parallel verify` compares a whole step",
            found,
        )
        return None
    text = (
        f"checked on random numbers in {seconds:.1f} s: the strategy gives the gradients of one device "
        f"({found.layers or 'no'} distinct layers, widths divided by {found.factor}, {found.strategy.axes.world} ranks)"
    )
    log.info("%s", text)
    result_cache.keep(key, text)
    return None


def _on_a_copy(
    model: nn.Module, strategy: Strategy, plan: Plan, calls: list[SampleCall], spread: Spread
) -> Reduced | str | Unchecked:
    """The copy on which the strategy is right, why it is refused, or why no copy could be run on one device."""
    why = "no copy of it is small enough and has the same plan"
    for small in reduce(model, plan, strategy):
        for call in calls:
            fitted = _fitted(call, small)
            try:
                alone = run(small.model, Strategy(check=False), fitted, spread)
            except NothingToCompare as error:
                return Unchecked(str(error))
            except HyperParallelError as refusal:
                return str(refusal)
            # A copy may have sizes that the model's own code cannot do.
            except Exception as error:
                why = f"a copy does not run on one device: {in_one_line(error)}"
                continue
            drawn = unrepeatable(small.model, fitted, spread)
            if drawn is not None:
                return (
                    f"{drawn} draws random numbers that would not be the same under this strategy as on one device; "
                    f"use nn.Dropout or torch.nn.functional.dropout, or set the rate to 0 ({SKIP})"
                )
            if strategy.axes.tensor > 1 and (written := alone.written_weight(small.model)):
                name = type(without_adapters(small.model)).__name__
                return f"the forward pass of {name} writes the weight {written!r}, {WRITTEN_UNDER_TENSOR} ({SKIP})"
            if not _changes(strategy):
                return small
            return _compared(small, fitted, spread) or small
    return Unchecked(why)


def _compared(small: Reduced, call: SampleCall, spread: Spread) -> str | Unchecked | None:
    try:
        wrong: Mismatch | str | None = compared(small.model, small.strategy, call, spread)
    except SimulationError as error:
        return Unchecked(str(error).partition(";")[0])
    except HyperParallelError as refusal:
        return str(refusal)
    # The strategy's code, or the model's on a part of its tensors.
    except Exception as error:
        log.debug("the split copy does not run", exc_info=True)
        wrong = f"fails with {in_one_line(error)}"
    if wrong is None:
        return None
    what = wrong if isinstance(wrong, str) else f"gives other gradients than one device: {wrong}"
    if diagnosis.right_without_recompute(small.model, small.strategy, call, spread):
        mend = "right, and checked, with memory.recompute: none"
    elif rules := diagnosis.rules_that_pass(small.model, small.strategy, small.plan, call, spread):
        written = ", ".join(f"{pattern}: {rule}" for pattern, rule in rules.items())
        mend = f"right, and checked, with strategy.rules: {{{written}}}"
    else:
        axes = list(diagnosis.without_axes(small.model, small.strategy, call, spread))
        mend = (
            f"right, and checked, without axes.{axes[0]}"
            if axes
            else "no rules were found that make it right"
        )
    name = type(without_adapters(small.model)).__name__
    return f"this strategy on {name} {what}; {mend} ({SKIP})"


def _fitted(call: SampleCall, small: Reduced) -> SampleCall:
    """Tokens of a number that the copy's strategy can split."""
    if not isinstance(call, TokenCall):
        return call
    axes = small.strategy.axes
    multiple = 2 * axes.context * axes.tensor
    length = -(-LENGTH // multiple) * multiple
    size = min(call.vocabulary, vocabulary_of(small.model) or call.vocabulary)
    return TokenCall(size, 2 * axes.data, length, call.positions)


def vocabulary_of(model: nn.Module) -> int | None:
    """Token ids that a causal language model of Transformers knows; None for another model."""
    if not is_transformers(model):
        return None
    core: Any = without_adapters(model)
    if getattr(core.config, "is_encoder_decoder", False) or not getattr(
        core, "_is_causal_lm", _is_causal(core)
    ):
        return None
    found = getattr(text_config(model), "vocab_size", None)
    if not isinstance(found, int):
        return None
    # A decoder of a translation model may have a table of another size (Marian).
    table = core.get_input_embeddings()
    return min(found, table.num_embeddings) if isinstance(table, nn.Embedding) else found


def _is_causal(core: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = next(
        (c.__name__ for c in type(core).__mro__ if c.__module__.startswith("transformers.models")), ""
    )
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or (
        name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
        and core.get_output_embeddings() is not None
    )


def _changes(strategy: Strategy) -> bool:
    """Whether the strategy changes what a layer does: its tensors are split, or its forward pass runs twice."""
    axes = strategy.axes
    return axes.tensor > 1 or axes.context > 1 or axes.expert > 1 or recomputes(strategy.memory)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """On the CPU, without autocast, gradients on, generators as they were; no notes of the runs of copies."""
    before = log.manager.disable
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        torch.enable_grad(),
    ):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
