"""The model that a rollout generates with."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.inference.blocked_products import column_major
from hyper_parallel.inference.ragged_pass import BLOCK
from hyper_parallel.rl.roles.policy_model import fill, plain_policy, policy_on_meta
from hyper_parallel.shard import parallelize
from hyper_parallel.strategy import Memory, Precision, Strategy


def rollout_model(config: RLConfig, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    """In the dtype in which the actor computes, parallelized over the ranks of one copy. Raises what building does."""
    given, one = config.roles.rollouts.spread, config.roles.actor.strategy.precision.compute
    dtype = getattr(torch, one)
    if given.world == 1:
        model = plain_policy(config, tokenizer, dtype, device)
        column_major(model, BLOCK)
        return model.eval()
    model = policy_on_meta(config, tokenizer, dtype)
    strategy = Strategy(axes=given.axes, placement=given.placement, rules=given.rules).model_copy(
        update={"precision": Precision(param=one, compute=one, reduce=one), "memory": Memory()}
    )
    parallelize(model, strategy)
    fill(model, config, device)
    return model.eval()
