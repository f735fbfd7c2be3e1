"""What context parallelism cannot do is refused with the reason; which method is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers import masking_utils as hf

from harness.families import FAMILIES, SHAPE
from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import one_device, per_rank, simulated_ranks
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.context.mask import read_mask
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy

TWO = Strategy(axes={"context": 2}, context={"method": "ring"})


def model_of(model_type: str, **fields: Any) -> nn.Module:
    config = AutoConfig.for_model(model_type, **fields)
    with one_device(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own module": (lambda: nn.Linear(2, 2), "Transformers models only"),
    "attention dropout": (
        lambda: model_of("llama", attention_dropout=0.1, **SHAPE),
        "attention_dropout is 0.1",
    ),
    "gpt2 attention dropout": (lambda: model_of("gpt2", n_embd=32, n_head=4, n_layer=2), "attn_pdrop is 0.1"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_models_that_cannot_be_split_are_refused_by_name(what: str) -> None:
    build, message = UNFIT[what]
    with pytest.raises(StrategyError, match=message) as error:
        make_plan(build(), TWO)
    assert "set" in str(error.value)


@pytest.mark.parametrize(
    ("context", "tensor", "section", "method", "ulysses"),
    [
        (2, 1, {}, "ulysses", 2),
        (4, 1, {}, "hybrid", 2),
        (2, 2, {}, "ring", 1),
        (4, 4, {}, "ring", 1),
        (4, 1, {"method": "ulysses"}, "ulysses", 4),
        (4, 1, {"method": "ring"}, "ring", 1),
        (8, 1, {"method": "hybrid"}, "hybrid", 2),
        (8, 1, {"method": "hybrid", "ulysses": 4}, "hybrid", 4),
    ],
)
def test_the_method_goes_by_the_heads_of_a_rank(
    context: int, tensor: int, section: dict[str, Any], method: str, ulysses: int
) -> None:
    strategy = Strategy(axes={"context": context, "tensor": tensor}, context=section)
    plan = make_plan(model_of("llama", **SHAPE), strategy).context
    assert plan is not None
    assert (plan.method, plan.ulysses, plan.ring) == (method, ulysses, context // ulysses)


def test_more_ulysses_ranks_than_query_heads_are_refused() -> None:
    strategy = Strategy(axes={"context": 8}, context={"method": "ulysses"})
    with pytest.raises(
        StrategyError, match="a multiple of 8 query heads, and a rank has 4; use method: ring"
    ):
        make_plan(model_of("llama", **SHAPE), strategy)
    with pytest.raises(StrategyError, match="3, which does not divide axes"):
        make_plan(
            model_of("llama", **SHAPE),
            Strategy(axes={"context": 8}, context={"method": "hybrid", "ulysses": 3}),
        )


def test_a_degree_of_ulysses_is_for_hybrid() -> None:
    with pytest.raises(ValidationError, match="set method: hybrid"):
        Strategy(context={"method": "ring", "ulysses": 2})


# Masks.


def packed(function: Any) -> Any:
    # Its name of before Transformers 5.18.
    made = getattr(hf, "packed_sequence_compatibility_function", None)
    if made is None:
        return hf.and_masks(function, hf.packed_sequence_mask_function(torch.zeros(1, 4)))
    return made(function, torch.arange(4)[None], torch.zeros(1, 4))


KNOWN = {
    "causal": (hf.causal_mask_function, (True, None, False)),
    "window": (hf.sliding_window_causal_mask_function(7), (True, 7, False)),
    "packed": (packed(hf.causal_mask_function), (True, None, True)),
    "packed window": (packed(hf.sliding_window_causal_mask_function(7)), (True, 7, True)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_masks_are_read_off_their_closures(name: str) -> None:
    function, wanted = KNOWN[name]
    assert read_mask(function) == wanted


def causal_mask_function(*_: Any) -> bool:
    """A stranger with a known name."""
    return True


STRANGE = {
    "or_masks": hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function),
    "blockwise_overlay": hf.and_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.zeros(1, 4))),
    "chunked_overlay": hf.chunked_causal_mask_function(4, torch.zeros(1)),
    "bidirectional_mask_function": hf.bidirectional_mask_function,
    "test_context_refusals.causal_mask_function": causal_mask_function,
    "padding_mask_function": hf.and_masks(
        hf.causal_mask_function, hf.padding_mask_function(torch.ones(1, 4))
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_mask_that_is_not_understood_is_refused_by_name(name: str) -> None:
    with pytest.raises(StrategyError, match=f"is made with {name}, which"):
        read_mask(STRANGE[name])


# Calls.

IDS = torch.arange(32).view(2, 16)
LEFT = torch.ones(2, 16, dtype=torch.int64)
LEFT[0, :3] = 0

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"input_ids": IDS[:, :14]}, "14 positions cannot be split .* a multiple of 4"),
    "cache": ({"input_ids": IDS, "use_cache": True}, "use_cache=False"),
    "past": ({"input_ids": IDS, "past_key_values": DynamicCache()}, "without past_key_values"),
    "left padding": ({"input_ids": IDS, "attention_mask": LEFT}, "pad rows on the right"),
    "4D mask": ({"input_ids": IDS, "attention_mask": torch.zeros(2, 1, 16, 16)}, r"\[2, 1, 16, 16\]"),
    "attentions": ({"input_ids": IDS, "output_attentions": True}, "output_attentions is not supported"),
    "tuples": ({"input_ids": IDS, "return_dict": False}, "leave return_dict out"),
    "packed with a cache": (
        {"input_ids": IDS, "position_ids": torch.arange(8).repeat(2, 2)},
        "keeps apart only when no cache",
    ),
    "nothing": ({"position_ids": torch.arange(16)[None]}, "neither input_ids nor inputs_embeds"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_mean_something_else_after_the_cut_are_refused(name: str) -> None:
    arguments, message = CALLS[name]
    with simulated_ranks(2):
        model = model_of("llama", **SHAPE)
        shard.parallelize(model, TWO, lowering="traceable")
        shard.init_weights(model, seed=1)
        mine = {
            key: per_rank(lambda rank, x=x: x) if isinstance(x, torch.Tensor) else x
            for key, x in arguments.items()
        }
        with pytest.raises(StrategyError, match=message):
            model(**mine)


def test_a_layer_that_does_not_attend_through_the_interface_is_found_out() -> None:
    with simulated_ranks(2):
        model = model_of("llama", **SHAPE)
        shard.parallelize(model, TWO, lowering="traceable")
        shard.init_weights(model, seed=1)
        attention: Any = model.model.layers[1].self_attn
        attention.forward = lambda hidden_states, **_: (hidden_states, None)
        with pytest.raises(StrategyError, match="of 2 attention modules only 1 computed attention"):
            model(input_ids=per_rank(lambda rank: IDS))


def test_attention_masks_of_other_making_are_refused() -> None:
    with simulated_ranks(2):
        model = model_of(**FAMILIES["qwen2"])
        shard.parallelize(model, TWO, lowering="traceable")
        shard.init_weights(model, seed=1)
        layer: Any = model.model.layers[0]
        hidden = per_rank(lambda rank: torch.zeros(1, 4, SHAPE["hidden_size"]))
        turns = per_rank(lambda rank: torch.zeros(1, 4, 8))
        with pytest.raises(StrategyError, match="not made by Transformers' mask functions"):
            layer(hidden, attention_mask=None, position_embeddings=(turns, turns))
