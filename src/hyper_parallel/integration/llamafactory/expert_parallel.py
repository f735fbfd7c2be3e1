"""Expert parallelism for LlamaFactory's main branch, which asks for it before the model is parallelized."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.llamafactory.arguments import strategy_from_arguments
from hyper_parallel.integration.parallel_run import strategy_of, world_size
from hyper_parallel.shard.plan import make_plan


def ep_prepare_model(model: nn.Module, accelerator: Any, hp_args: Any) -> nn.Module:
    """See whether the model's experts can be spread; `fsdp2_prepare_model`, called after it, spreads them.

    Returns the model. Raises IntegrationError or StrategyError, before anything is changed, where they cannot.
    """
    if int(hp_args.ep_size) > 1:
        given = strategy_from_arguments(hp_args, world_size())
        strategy = strategy_of(given, model, world=world_size(), batch=1, length=0).strategy
        if not make_plan(model, strategy).experts:
            raise IntegrationError(
                f"ep_size spreads experts, and {type(model).__name__} has none; set ep_size to 1"
            )
    return model
