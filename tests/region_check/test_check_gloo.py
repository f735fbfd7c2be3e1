"""The check on real workers: every rank refuses, process groups are not lost, what passed is remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from harness.modules import BROKEN, RIGHT, RULES, WIDTH, Model
from hyper_parallel import shard
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.region_check import check
from hyper_parallel.strategy import Strategy


def _called(rank: int, world: int, cache: str, between: str) -> tuple[str, float]:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    torch.manual_seed(0)
    right = between in RIGHT
    model = Model((RIGHT if right else BROKEN)[between])
    shard.parallelize(model, Strategy(axes={"tensor": 2}, rules=RULES))
    refused = ""
    try:
        model(torch.randn(2, 6, WIDTH)).square().sum().backward()
    except StrategyError as error:
        refused = str(error)
    # Groups that were there before work as they did, by object and by name.
    total = torch.ones(())
    dist.all_reduce(total)
    handle = shard.sharded(model)
    return refused, float(handle.all_reduce(total, ("tensor_x",)))


def test_every_rank_refuses_in_the_first_call(tmp_path: Path) -> None:
    for refused, total in run_ranks(_called, 2, str(tmp_path), "softmax"):
        assert "gives other gradients than one device" in refused
        assert total == 4.0


def test_what_is_right_runs_and_is_remembered(tmp_path: Path) -> None:
    assert run_ranks(_called, 2, str(tmp_path), "relu") == [("", 4.0)] * 2
    (passed,) = (tmp_path / "hyper-parallel" / "checks").iterdir()
    assert "the strategy gives the gradients of one device" in passed.read_text()
    before = passed.stat().st_mtime_ns
    assert run_ranks(_called, 2, str(tmp_path), "relu") == [("", 4.0)] * 2
    assert passed.stat().st_mtime_ns == before


def _language_model(rank: int, world: int, cache: str, checked: bool) -> Any:
    import os

    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    os.environ["XDG_CACHE_HOME"] = cache
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    right = modeling_llama.LlamaMLP.forward

    def softmax_between(self: Any, x: torch.Tensor) -> torch.Tensor:
        # It looks at a weight, so that it cannot be tried apart from its projections, as the planner would.
        wide = (self.gate_proj(x) * self.up_proj(x)).softmax(-1) * self.gate_proj.weight.ndim
        out: torch.Tensor = self.down_proj(wide)
        return out

    modeling_llama.LlamaMLP.forward = softmax_between
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        shard.parallelize(model, Strategy(axes={"tensor": 2}, check=checked))
    except StrategyError as error:
        return str(error)
    finally:
        modeling_llama.LlamaMLP.forward = right
    return None


def test_a_language_model_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    for refused in run_ranks(_language_model, 2, str(tmp_path), True):
        assert "strategy.rules: {model.layers.*.mlp." in refused
        assert "model.layers.*.self_attn" not in refused.partition("strategy.rules")[2]
    assert run_ranks(_language_model, 2, str(tmp_path), False) == [None] * 2


@pytest.mark.parametrize("ending", ["ZeroDivisionError", "KeyboardInterrupt"])
def test_a_rank_0_that_does_not_finish_does_not_leave_the_others_waiting(ending: str) -> None:
    assert run_ranks(_failing, 2, ending) == [ending, "FollowsError"]


def _failing(rank: int, world: int, ending: str) -> str:
    import builtins
    from unittest import mock

    model = Model(RIGHT["relu"])
    shard.parallelize(model, Strategy(axes={"tensor": 2}, rules=RULES))
    with mock.patch.object(check, "_refusal", side_effect=getattr(builtins, ending)):
        try:
            model(torch.randn(2, 6, WIDTH))
        except BaseException as error:
            return type(error).__name__
    return "nothing"
