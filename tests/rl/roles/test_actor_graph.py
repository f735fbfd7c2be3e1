"""An actor's captured update is the eager one of rows of the same length, bit for bit; padding changes no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_runs import rl_config, samples_of, whole_weights
from hyper_parallel.compat import inductor
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError, NonFiniteError
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import tokenizer_of
from hyper_parallel.rl.roles.policy_recipe import captured_policy, positions_of
from hyper_parallel.rl.sample import Sample

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "micro_batch": 4},
    "truncated": {"objective": "truncated", "kl": 0.1, "minibatches": 2, "temperature": 0.9},
    "rloo": {"algorithm": "rloo", "clip": 0.5, "micro_batch": 3},
}


def config_of(out: Any, engine: str, kind: str, **actor: Any) -> RLConfig:
    return rl_config(
        out,
        rl={"group": 4, "prompts": 4, "max_tokens": 6, **KINDS[kind]},
        roles={"actor": {"engine": engine, **actor}},
    )


def actor_of(config: RLConfig, *, padded: bool = True) -> Actor:
    """`padded`: rows have the lengths of graphs."""
    tokenizer = tokenizer_of(config)
    model, graphs = captured_policy(config, tokenizer, CPU)
    actor = Actor(config, model, tokenizer, CPU, graphs=graphs)
    actor._most = positions_of(model) if padded else None
    return actor


def batches_of(config: RLConfig) -> list[list[Sample]]:
    """Two batches of unlike lengths: the second one's rows are longer."""
    longer = replace_length(samples_of(config, seed=1))
    return [samples_of(config), longer, samples_of(config, seed=2)]


def replace_length(samples: list[Sample]) -> list[Sample]:
    return [replace(one, prompt=one.prompt * 4) for one in samples]


def trained(actor: Actor, config: RLConfig) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The weights after three batches, and the metrics of each."""
    found = []
    for samples in batches_of(config):
        reference = actor.logprobs(samples) if config.rl.kl else None
        found.append(actor.train(samples, reference))
    return whole_weights(actor.model), found


def both(rank: int, world: int, out: str, kind: str, actor: dict[str, Any]) -> None:
    found = {}
    for engine in ("eager", "graph"):
        config = config_of(out, engine, kind, **actor)
        one = actor_of(config)
        found[engine] = trained(one, config)
        if engine == "graph":
            assert one._graphs is not None
            assert one._graphs.refused is None
            lengths = {shape.micro_batches[0][1] for shape in one._graphs._captured}
            assert len(lengths) > 1
            assert lengths <= {8, 16, 32}
    same(*found["eager"], *found["graph"])


def same(
    weights: dict[str, Tensor],
    metrics: list[dict[str, float]],
    others: dict[str, Tensor],
    other_metrics: list[dict[str, float]],
) -> None:
    for one, other in zip(metrics, other_metrics, strict=True):
        assert list(one) == list(other)
        assert other == pytest.approx(one, rel=1e-5, abs=1e-7)
        assert one["grad_norm"] > 0
    for name, value in weights.items():
        assert torch.equal(others[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_update_is_the_eager_one(tmp_path: Any, kind: str) -> None:
    both(0, 1, str(tmp_path), kind, {})


@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_on_two_ranks(tmp_path: Any, axes: dict[str, int]) -> None:
    run_ranks(
        both, 2, str(tmp_path), "truncated", {"devices": "0-1", "strategy": {"axes": axes}}, timeout=280
    )


def test_padding_changes_no_gradient(tmp_path: Any) -> None:
    found = []
    for padded in (False, True):
        config = config_of(tmp_path, "eager", "grpo")
        actor = actor_of(config, padded=padded)
        kept: dict[str, Tensor] = {}

        def keep(scale: Any, kept: dict[str, Tensor] = kept, actor: Actor = actor) -> None:
            kept.update({one.name: one.grad.clone() for one in actor.handle.parameters()})

        actor.optimizer.step = keep  # type: ignore[method-assign]
        actor.train(samples_of(config))
        found.append(kept)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_an_update_that_is_not_finite_changes_nothing(tmp_path: Any) -> None:
    config = config_of(tmp_path, "graph", "grpo")
    actor = actor_of(config)
    before = whole_weights(actor.model)
    broken = [replace(one, logprobs=(float("nan"),) * len(one.tokens)) for one in samples_of(config)]
    with pytest.raises(NonFiniteError, match=r"update 0: .*lower rl\.optimizer\.lr"):
        actor.train(broken)
    assert actor.version == 0
    assert all(torch.equal(one, before[name]) for name, one in whole_weights(actor.model).items())
    assert actor.train(samples_of(config))["grad_norm"] > 0


@pytest.mark.skipif(inductor.missing() is not None, reason="no C++ compiler")
def test_a_compiled_update_has_the_same_gradients(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by an optimizer whose first update is g / (1 + |g|)."""
    monkeypatch.chdir(tmp_path)  # of the cache
    optimizer = {"name": "adamw", "lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
    found = {}
    for compiled in (False, True):
        config = rl_config(
            tmp_path,
            rl={"prompts": 4, "group": 4, "max_tokens": 6, "grad_clip": None, "optimizer": optimizer},
            roles={"actor": {"engine": "graph", "compile": compiled}},
        )
        actor = actor_of(config)
        before = whole_weights(actor.model)
        metrics = actor.train(samples_of(config))
        assert actor._graphs is not None
        assert actor._graphs.refused is None
        assert actor._graphs.uncompiled is None
        [graph] = actor._graphs.captured
        assert (graph.step is not graph.plain) == compiled
        found[compiled] = (
            {name: one - before[name] for name, one in whole_weights(actor.model).items()},
            metrics,
        )
    for name, change in found[False][0].items():
        assert change.abs().max() > 1e-4, name
        torch.testing.assert_close(found[True][0][name], change, atol=1e-6, rtol=1e-5, msg=name)
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-5, abs=1e-6)


def test_compiling_wants_graphs(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="set 'engine' to graph"):
        config_of(tmp_path, "eager", "grpo", compile=True)
