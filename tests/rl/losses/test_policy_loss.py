"""The clipped policy objective: its pieces add up, and its gradient is that of finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.policy import PolicyObjective, policy_loss
from hyper_parallel.rl.losses.reductions import LossSum, loss_count, metric_means

OBJECTIVES: list[dict[str, Any]] = [
    {"objective": "behaviour", "clip_high": 0.28},
    {"objective": "behaviour", "dual_clip": 1.5},
    {"objective": "behaviour", "ratio": "sequence_mean"},
    {"objective": "behaviour", "ratio": "sequence_product"},
    {"objective": "decoupled"},
    {"objective": "decoupled", "weight_cap": 1.2},
    {"objective": "decoupled", "ratio": "sequence_mean"},
    {"objective": "truncated", "weight_cap": 1.1},
    {"objective": "behaviour", "kl": 0.05, "entropy": 0.01},
    {"objective": "decoupled", "kl": 0.05, "kl_estimator": "k2"},
]
COUNTS: list[tuple[str, dict[str, int]]] = [
    ("grpo", {}),
    ("bnpo", {}),
    ("dr_grpo", {"max_length": 9}),
    ("dapo", {"updates": 2}),
]
Batch = dict[str, Tensor]


def _batch(seed: int, rows: int = 6, length: int = 5, dtype: torch.dtype = torch.float64) -> Batch:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    logprobs = -normal(rows, length).abs()
    mask = torch.rand(rows, length, generator=draw) < 0.7
    mask[0] = True
    return {
        "logprobs": logprobs,
        "behaviour": logprobs + 0.3 * normal(rows, length),
        "proximal": logprobs + 0.3 * normal(rows, length),
        "reference": logprobs + 0.3 * normal(rows, length),
        "entropy": normal(rows, length).abs(),
        "advantages": normal(rows),
        "mask": mask,
    }


def _loss(batch: Batch, count: float | Tensor = 1.0, **chosen: Any) -> LossSum:
    others = {name: value for name, value in batch.items() if name != "logprobs"}
    return policy_loss(batch["logprobs"], count=count, settings=PolicyObjective(**chosen), **others)


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=str)
@pytest.mark.parametrize("normalization", ["grpo", "bnpo"])
def test_gradient_is_that_of_finite_differences(chosen: dict[str, Any], normalization: str) -> None:
    batch = _batch(3)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return _loss(
            {**batch, "logprobs": logprobs, "entropy": entropy}, 3.0, normalization=normalization, **chosen
        ).loss

    inputs = (batch["logprobs"].requires_grad_(), batch["entropy"].requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=str)
@pytest.mark.parametrize(("normalization", "counted"), COUNTS)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
@settings(max_examples=5)
def test_micro_batches_add_up_to_the_whole_batch(
    chosen: dict[str, Any], normalization: str, counted: dict[str, int], seed: int, cut: int
) -> None:
    batch = _batch(seed)
    parts = [
        {name: value[rows] for name, value in batch.items()} for rows in (slice(0, cut), slice(cut, None))
    ]
    counts = [loss_count(normalization, part["mask"], **counted) for part in parts]
    total = sum(counts, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(total, loss_count(normalization, batch["mask"], **counted))
    whole = _loss(batch, total, normalization=normalization, **chosen)
    pieces = [_loss(part, total, normalization=normalization, **chosen) for part in parts]
    torch.testing.assert_close(sum(piece.loss for piece in pieces), whole.loss)
    together, alone = metric_means(pieces), metric_means([whole])
    assert together.keys() == alone.keys()
    assert all(math.isclose(together[name], alone[name], abs_tol=1e-9) for name in alone)


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=str)
def test_what_is_not_trained_changes_nothing_even_as_nan(chosen: dict[str, Any]) -> None:
    batch = _batch(5, dtype=torch.float32)
    garbled = {
        name: torch.where(batch["mask"], value, torch.nan) if value.shape == batch["mask"].shape else value
        for name, value in batch.items()
    } | {"mask": batch["mask"]}
    found = []
    for one in (batch, garbled):
        logprobs = one["logprobs"].clone().requires_grad_()
        part = _loss({**one, "logprobs": logprobs}, 4.0, **chosen)
        (gradient,) = torch.autograd.grad(part.loss, logprobs)
        assert not gradient[~batch["mask"]].any()
        assert gradient[batch["mask"]].any()
        found.append((part.loss.detach(), gradient, metric_means([part])))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("objective", ["decoupled", "truncated"])
def test_objectives_are_one_when_the_policy_is_that_of_the_rollout(objective: str) -> None:
    """Then every weight is 1 and every ratio that of PPO."""
    batch = _batch(7)
    batch["proximal"] = batch["behaviour"]
    cap = {"weight_cap": 2.0} if objective == "truncated" else {}
    expected = _loss(batch, 5.0, objective="behaviour").loss
    torch.testing.assert_close(_loss(batch, 5.0, objective=objective, **cap).loss, expected)


def test_decoupled_weights_what_truncated_limits_and_the_cap_drops() -> None:
    """One token, π = π_old, A = 1: the loss is minus the weight π_old / μ = e."""
    one = torch.zeros(1, 1)
    batch = {
        "logprobs": one,
        "behaviour": one - 1,
        "proximal": one,
        "advantages": one[0] + 1,
        "mask": one == 0,
    }
    assert float(_loss(batch, objective="decoupled").loss) == pytest.approx(-math.e)
    assert float(_loss(batch, objective="truncated", weight_cap=2.0).loss) == -2.0
    assert float(_loss(batch, objective="decoupled", weight_cap=2.0).loss) == 0.0
    # PPO on the recorded log-probabilities clips the ratio e at 1.2 instead.
    assert float(_loss(batch, objective="behaviour").loss) == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "expected"),
    [
        (2.0, 1.0, None, -1.28),
        (2.0, -1.0, None, 2.0),
        (9.0, -1.0, 3.0, 3.0),
        (0.5, 1.0, None, -0.5),
        (0.5, -1.0, None, 0.8),
        (math.exp(30), -1.0, None, math.exp(20)),
    ],
)
def test_clip_of_one_token(ratio: float, advantage: float, dual: float | None, expected: float) -> None:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    batch = {
        "logprobs": zero + math.log(ratio),
        "behaviour": zero,
        "advantages": zero + advantage,
        "mask": zero == 0,
    }
    part = _loss(batch, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    assert float(part.loss) == pytest.approx(expected)
    means = metric_means([part])
    assert means["clipped_high"] == float(ratio > 1.28 and advantage > 0)
    assert means["clipped_low"] == float(ratio < 0.8 and advantage < 0)
    assert means["behaviour_gap"] == pytest.approx(abs(math.log(ratio)))


def test_half_precision_is_computed_in_float32() -> None:
    batch = _batch(9, dtype=torch.float32)
    halves = {name: value if value.dtype == torch.bool else value.bfloat16() for name, value in batch.items()}
    floats = {name: value if value.dtype == torch.bool else value.float() for name, value in halves.items()}
    assert torch.equal(_loss(halves, 3.0).loss, _loss(floats, 3.0).loss)
    assert _loss(halves, 3.0).loss.dtype == torch.float32


def test_a_step_that_trains_nothing_has_loss_0() -> None:
    batch = _batch(1)
    batch["mask"] = torch.zeros_like(batch["mask"])
    count = loss_count("bnpo", batch["mask"])
    part = _loss(batch, count, normalization="bnpo")
    assert float(part.loss) == 0
    assert set(metric_means([part]).values()) == {0.0}


@pytest.mark.parametrize(
    ("chosen", "needed"),
    [
        ({"objective": "naive"}, "one of behaviour, decoupled, truncated"),
        ({"ratio": "sequence"}, "one of token, sequence_mean"),
        ({"normalization": "mean"}, "one of grpo"),
        ({"clip_low": 1.5}, "clip_low from 0 to 1"),
        ({"dual_clip": 1.1}, r"more than 1 \+ clip_high"),
        ({"objective": "truncated"}, "truncated needs one"),
        ({"objective": "behaviour", "weight_cap": 2.0}, "behaviour has no weights"),
        ({"objective": "truncated", "weight_cap": 0.0}, "above 0"),
        ({"kl": -1.0}, "0 or more"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "take k2 or k3"),
    ],
)
def test_settings_that_cannot_be_are_refused(chosen: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        PolicyObjective(**chosen)


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [
        ("proximal", {"objective": "decoupled"}),
        ("reference", {"kl": 0.1}),
        ("entropy", {"entropy": 0.1}),
    ],
)
def test_a_tensor_that_the_objective_needs(missing: str, chosen: dict[str, Any]) -> None:
    batch = _batch(1)
    del batch[missing]
    with pytest.raises(ConfigError, match="needs"):
        _loss(batch, **chosen)


def test_shapes_are_not_broadcast() -> None:
    batch = _batch(1)
    with pytest.raises(ConfigError, match="behaviour log-probabilities of shape"):
        _loss({**batch, "behaviour": batch["behaviour"][:, :1]})
    with pytest.raises(ConfigError, match="advantages of shape"):
        _loss({**batch, "advantages": batch["advantages"][:, None]})
    with pytest.raises(ConfigError, match=r"a mask of torch\.float32"):
        _loss({**batch, "mask": batch["mask"].float()})


def test_counts_refuse_what_they_would_ignore() -> None:
    mask = torch.ones(2, 3)
    mask = mask.bool()
    assert float(loss_count("dr_grpo", mask, max_length=7)) == 14
    assert float(loss_count("dapo", mask, updates=4)) == 1.5
    for name, others in (("grpo", {"max_length": 7}), ("dr_grpo", {}), ("bnpo", {"updates": 2}), ("sum", {})):
        with pytest.raises(ConfigError):
            loss_count(name, mask, **others)
