"""An actor recomputes activations where its strategy says so, with the same update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.rl_runs import rl_config, samples_of, whole_weights
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import tokenizer_of, trained_policy

CPU = torch.device("cpu")


def trained(tmp_path: Any, memory: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after an update, and forward passes of the policy's MLPs in it."""
    config = rl_config(tmp_path, roles={"actor": {"strategy": {"memory": memory}}}, rl={"algorithm": "ppo"})
    tokenizer = tokenizer_of(config)
    model = trained_policy(config, tokenizer, config.roles.actor.strategy, CPU)
    actor = Actor(config, model, tokenizer, CPU, critic=True)
    passes = 0

    def counted(*_: Any) -> None:
        nonlocal passes
        passes += 1

    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(counted)  # the second pass ends where nothing more is needed
    actor.train(samples_of(config))
    return whole_weights(model), passes


@pytest.mark.parametrize(
    ("memory", "passes"), [({"recompute": "layer"}, 4), ({"recompute_layers": 1, "recompute": "layer"}, 3)]
)
def test_layers_are_computed_again(tmp_path: Any, memory: dict[str, Any], passes: int) -> None:
    plain, once = trained(tmp_path, {})
    again, counted = trained(tmp_path, memory)
    assert (once, counted) == (2, passes)
    assert all(torch.equal(again[name], value) for name, value in plain.items())
