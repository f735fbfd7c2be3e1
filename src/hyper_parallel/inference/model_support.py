"""Models that generate through the engine: refusals by name, and a proof on the model itself.

What a config says that paged attention cannot do is refused before anything runs. Whatever a config does not say is
found by `prove`: the engine's logits for random prompts, in company, must be those of the model's own forward pass.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import HyperParallelError, UnsupportedModelError, one_line
from hyper_parallel.inference.blocked_products import experts_by
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.weights.weight_stand_in import ReadElsewhere
from hyper_parallel.shard.forward import inference, parameters_of
from hyper_parallel.shard.sharded_model import is_sharded, sharded
from hyper_parallel.units import round_up

log = logging.getLogger(__name__)

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary frequencies that depend on the longest position of the batch."""
_CAP = re.compile(r"att(n|ention)_.*(softcap|soft_cap|logit_cap)")
"""Names under which configs have the cap of attention's scores."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of logits, as a share of the largest logit of the row; half precision rounds every product, in the
pieces of `page` tokens otherwise than in one pass."""


def check_model(model: nn.Module) -> Any:
    """The config of the text model. Raises UnsupportedModelError for what generation cannot do, with the reason."""
    name = type(model).__name__
    whole: Any = getattr(model, "config", None)
    if whole is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedModelError(f"{name} is not a Transformers model; generation runs those")
    if is_sharded(model):
        axes = sharded(model).strategy.axes
        if refused := [axis for axis in ("context", "pipeline") if getattr(axes, axis) > 1]:
            raise UnsupportedModelError(
                f"the model is parallelized over axes.{refused[0]}, which generation does not use; use tensor, shard, "
                "expert or replicate"
            )
    exchangeable = getattr(model, "_can_set_attn_implementation", None)
    if exchangeable is not None and not exchangeable():
        raise UnsupportedModelError(
            f"{name} does not use Transformers' attention interface, which generation needs"
        )
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder and a decoder; generation runs decoders only")
    config = whole.get_text_config(decoder=True)
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    if other or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a state beside keys and values "
            f"({', '.join(other) or 'recurrent layers'}), which no page holds"
        )
    return config


def check_length(config: Any, tokens: int) -> None:
    """Raise UnsupportedModelError if a request of `tokens`, prompt and answer, is longer than the model reads."""
    most = longest_text(config)
    if most is not None and tokens > most:
        raise UnsupportedModelError(
            f"a prompt and its answer have {tokens} tokens, and the model has {most} positions; lower "
            "inference.max_tokens or shorten the prompt"
        )
    for settings in _rotary_settings(config):
        kind = settings.get("rope_type", settings.get("type"))
        original = settings.get("original_max_position_embeddings") or most
        if kind in _BY_LENGTH and original is not None and tokens > original:
            raise UnsupportedModelError(
                f"{kind} rotary positions depend on the longest request of a batch beyond {original} tokens, and a "
                f"prompt and its answer have {tokens}; lower inference.max_tokens or shorten the prompt"
            )


def longest_text(config: Any) -> int | None:
    """The longest text that the model reads; None if its config names none."""
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    nested = [part for part in found.values() if isinstance(part, dict)]
    return nested or [found]


def prove(engine: Engine, config: Any, seed: int = 0) -> None:
    """Compare the engine's logits with the model's own, for random prompts of several pages, in company.

    Raises UnsupportedModelError if they differ, or if the model's code does not run on a ragged row.
    """
    model: Any = engine.model
    name = type(model).__name__
    page = engine.page
    positions = longest_text(config) or 4 * page
    lengths = [length for length in (page + page // 2, 3, 2 * page + 1) if length + 3 <= positions]
    if not lengths:
        raise UnsupportedModelError(f"{name} has {positions} positions, too few to compare it with itself")
    draws = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(config.vocab_size, (length + 3,), generator=draws).tolist() for length in lengths
    ]
    try:
        together = engine.replayed(prompts, answer=3)
        alone = engine.replayed(prompts[:1], answer=3)
        with inference(model), _capped(model, config), _one_by_one(model):
            plain = [_plain(model, prompt, engine.device, 4).float() for prompt in prompts]
    except (HyperParallelError, ReadElsewhere):
        raise
    # Of any kind: the model's own code was not written for such a batch.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{name} does not run with a paged cache: {type(error).__name__}: {one_line(error)}"
        ) from error
    dtype: torch.dtype = next(model.parameters()).dtype
    if is_sharded(model):
        dtype = getattr(torch, sharded(model).strategy.precision.compute)
    problems = [_difference(own, expected, dtype) for own, expected in zip(together, plain, strict=True)]
    if found := next((problem for problem in problems if problem), None):
        raise UnsupportedModelError(
            f"{name} computes other logits with a paged cache than without one ({found}); generation would be wrong, "
            "so it is refused"
        )
    if not torch.equal(together[0], alone[0]):
        log.warning(
            "%s rounds otherwise in other batches on this device: a request's tokens may depend on what else runs",
            name,
        )


@contextmanager
def _capped(model: Any, config: Any) -> Iterator[None]:
    """Inside, attention caps its scores where the config says so; afterwards it is as it was.

    Transformers' eager attention does; others may leave the cap out (SDPA of Gemma 2 in Transformers 5.17).
    """
    given = model.config._attn_implementation
    if given == "eager" or not any(_CAP.match(name) and value for name, value in vars(config).items()):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(given)


@contextmanager
def _one_by_one(model: Any) -> Iterator[None]:
    """Inside, experts are computed by the model's own code, one by one; other implementations read all of a stack, of
    which a byte budget has only those that are chosen."""
    given = getattr(model.config, "_experts_implementation", None)
    if given in (None, "eager") or is_sharded(model):
        yield
        return
    with experts_by(model, "eager"):
        yield


def _plain(model: Any, prompt: list[int], device: torch.device, last: int) -> Tensor:
    """Logits [last, V] of the last tokens. The row is filled up, as a pass's is, since some strategies split it."""
    length = len(prompt)
    row = prompt + [0] * (round_up(length, 16) - length)
    kept: dict[str, Any] = {}
    if "logits_to_keep" in parameters_of(type(model).forward):
        kept["logits_to_keep"] = torch.arange(length - last, length, device=device)
    logits: Tensor = model(input_ids=torch.tensor([row], device=device), use_cache=False, **kept).logits[0]
    return logits if kept else logits[length - last : length]


def _difference(own: Tensor, plain: Tensor, dtype: torch.dtype) -> str | None:
    scale = plain.abs().amax(-1).clamp_min(1e-6)
    far = ((own - plain).abs().amax(-1) / scale).max()
    if bool(far.isfinite()) and float(far) <= TOLERANCE.get(dtype, 1e-4):
        return None
    return f"{float(far):.2g} of the largest logit"


def offered_engine(model: nn.Module, what: str, eos: frozenset[int]) -> Engine | None:
    """An engine, proved on the model; None where it refuses the model on any rank. A collective of all ranks.

    `what`: is done without the engine then, for the log.
    """
    found: Engine | None = None
    try:
        config = check_model(model)
        found = Engine(model, Inference().page, layers=int(config.num_hidden_layers), eos=eos)
        prove(found, config)
    except UnsupportedModelError as error:
        log.info("%s without the inference engine: %s", what, error)
        found = None
    refused = torch.tensor(float(found is None), device=next(model.parameters()).device)
    if dist.is_initialized():
        dist.all_reduce(refused)
    return None if refused.item() else found
