"""Weight transfer plans: every element arrives, with the fewest bytes, in messages of bounded size."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.weight_layouts import description_on, held, random_description, random_mesh
from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.rl.weights.description import ITEM_BYTES, Description, Parameter
from hyper_parallel.rl.weights.plan import Message, WeightPlan, plan_weights

DTYPES = ["float32", "bfloat16"]


def _shapes(draw: random.Random) -> dict[str, tuple[int, ...]]:
    return {
        f"p{i}": tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3)))
        for i in range(draw.randint(1, 4))
    }


def _plan(seed: int, *, colocated: bool) -> WeightPlan:
    draw = random.Random(seed)
    shapes = _shapes(draw)
    source = random_description(draw, "actor", shapes, DTYPES)
    mesh = source.parameters[0].layout.mesh
    target = (
        description_on(draw, "rollout", mesh, shapes, DTYPES)
        if colocated
        else random_description(draw, "rollout", shapes, DTYPES)
    )
    options = WeightsConfig(bucket_bytes=draw.choice([8, 40, 1000]), dtype=draw.choice([None, "bfloat16"]))
    return plan_weights(source, target, options, colocated=colocated)


def _run(plan: WeightPlan) -> dict[int, dict[str, np.ndarray]]:
    """The plan on arrays of global indices: what the target's ranks end with, -1 where nothing arrived."""
    source = {
        rank: {p.name: held(p, rank) for p in plan.source.parameters} for rank in range(plan.source.world)
    }
    target = {
        plan.target_rank(rank): {p.name: np.full_like(held(p, rank), -1) for p in plan.target.parameters}
        for rank in range(plan.target.world)
    }

    def deliver(message: Message, give: dict[int, dict[str, np.ndarray]], by: str) -> None:
        for part in message.parts:
            value = give[message.sender][getattr(part.parameter, by)][part.give]
            assert (value >= 0).all(), "sent before it had arrived"
            into = target[message.receiver][part.parameter.target]
            assert (into[part.take] == -1).all(), "received twice"
            into[part.take] = value

    for rank, parts in plan.local.items():
        deliver(Message(sender=rank, receiver=rank, parts=parts), source, "source")
    for one in plan.rounds:
        for message in one.cross:
            deliver(message, source, "source")
        for message in one.gather:
            deliver(message, target, "target")
    return target


@given(st.integers(0, 2**32), st.booleans())
def test_every_element_arrives_once_with_the_fewest_bytes(seed: int, colocated: bool) -> None:
    plan = _plan(seed, colocated=colocated)
    arrived = _run(plan)
    lacking = crossing = 0
    for planned, described, other in zip(
        plan.parameters, plan.source.parameters, plan.target.parameters, strict=True
    ):
        wanted: set[int] = set()
        for rank in range(plan.target.world):
            needed = held(other, rank)
            assert (arrived[plan.target_rank(rank)][planned.target] == needed).all()
            own = set(held(described, rank).reshape(-1).tolist()) if colocated else set()
            lacking += len(set(needed.reshape(-1).tolist()) - own) * planned.item_bytes
            wanted |= set(needed.reshape(-1).tolist())
        crossing += 0 if colocated else len(wanted) * planned.item_bytes
    assert plan.moved_bytes == lacking
    assert plan.crossing_bytes == crossing


@given(st.integers(0, 2**32))
def test_messages_are_bounded_and_aligned(seed: int) -> None:
    plan = _plan(seed, colocated=False)
    for message in plan.messages():
        assert message.bytes <= plan.options.bucket_bytes
        at = 0
        for part in message.parts:
            assert at % part.parameter.item_bytes == 0
            at += part.bytes
    receivers = {message.receiver for message in plan.messages()}
    assert receivers == {plan.target_rank(rank) for rank in range(plan.target.world)}


@given(st.integers(0, 2**32))
def test_descriptions_survive_json_and_give_the_same_plan(seed: int) -> None:
    plan = _plan(seed, colocated=False)
    source, target = (
        Description.from_json(json.loads(json.dumps(one.to_json()))) for one in (plan.source, plan.target)
    )
    assert (source, target) == (plan.source, plan.target)
    assert plan_weights(source, target, plan.options) == plan


def test_copies_of_the_source_share_the_sending() -> None:
    mesh = Mesh(("replicate", 2))
    source = _described("actor", mesh, [f"p{i}" for i in range(10)], (4, 4))
    target = _described("rollout", Mesh(), [f"p{i}" for i in range(10)], (4, 4))
    plan = plan_weights(source, target)
    sent = [sum(m.bytes for m in plan.messages() if m.sender == rank) for rank in range(2)]
    assert sent == [320, 320]


def test_what_two_ranks_need_crosses_once() -> None:
    source = _described("actor", Mesh(), ["p"], (4, 4))
    target = _described("rollout", Mesh(("replicate", 2)), ["p"], (4, 4))
    plan = plan_weights(source, target)
    assert (plan.crossing_bytes, plan.moved_bytes) == (64, 128)


def test_colocated_roles_of_the_same_layouts_send_nothing() -> None:
    mesh = Mesh(("shard", 2))
    parameter = Parameter(
        name="p", layout=Layout(mesh, (4, 4), (("shard",), ())), dtype="float32", groups=((0, 1),)
    )
    one = Description(role="actor", world=2, parameters=(parameter,))
    plan = plan_weights(one, replace(one, role="rollout"), colocated=True)
    assert not plan.rounds
    assert sorted(plan.local) == [0, 1]


def test_the_narrower_dtype_travels() -> None:
    source, target = _described("actor", Mesh(), ["p"], (4,)), _described("rollout", Mesh(), ["p"], (4,))
    half = replace(target, parameters=(replace(target.parameters[0], dtype="bfloat16"),))
    assert plan_weights(source, half).moved_bytes == 8
    assert plan_weights(half, target).moved_bytes == 8
    assert plan_weights(source, target).moved_bytes == 16
    assert plan_weights(source, target, WeightsConfig(dtype="bfloat16")).moved_bytes == 8


def test_stages_of_a_pipeline_send_their_own_parameters() -> None:
    mesh = Mesh(("shard", 2))
    layout = Layout(mesh, (4,), (("shard",),))
    source = Description(
        role="actor",
        world=4,
        parameters=(
            Parameter(name="a", layout=layout, dtype="float32", groups=((0, 1),)),
            Parameter(name="b", layout=layout, dtype="float32", groups=((2, 3),)),
        ),
    )
    plan = plan_weights(source, _described("rollout", Mesh(), ["a", "b"], (4,)))
    assert {(m.sender, m.receiver, m.named) for m in plan.messages()} == {
        (0, 4, "a"),
        (1, 4, "a"),
        (2, 4, "b"),
        (3, 4, "b"),
    }


def test_a_tied_parameter_travels_once() -> None:
    tied = {"head": "embedding"}
    source = replace(_described("actor", Mesh(), ["embedding"], (4,)), ties=tied)
    target = _described("rollout", Mesh(), ["embedding"], (4,))
    assert plan_weights(source, replace(target, ties=tied)).moved_bytes == 16
    apart = _described("rollout", Mesh(), ["embedding", "head"], (4,))
    assert [p.source for p in plan_weights(source, apart).parameters] == ["embedding", "embedding"]
    with pytest.raises(
        WeightsError, match="head is tied to embedding in rollout, but has values of its own in actor"
    ):
        plan_weights(replace(apart, role="actor"), replace(target, ties=tied))


def test_names_shapes_and_dtypes_must_fit() -> None:
    source = _described("actor", Mesh(), ["layer.weight"], (4,))
    with pytest.raises(
        WeightsError, match=r"rollout has a parameter layer.weigth .* did you mean 'layer.weight'"
    ):
        plan_weights(source, _described("rollout", Mesh(), ["layer.weigth"], (4,)))
    both = _described("actor", Mesh(), ["layer.weight", "other"], (4,))
    with pytest.raises(WeightsError, match="actor has a parameter other that rollout lacks"):
        plan_weights(both, replace(source, role="rollout"))
    with pytest.raises(WeightsError, match=r"the shape \[4\] in actor and \[5\] in rollout"):
        plan_weights(source, _described("rollout", Mesh(), ["layer.weight"], (5,)))
    whole = replace(source, role="rollout", parameters=(replace(source.parameters[0], dtype="int8"),))
    with pytest.raises(WeightsError, match="float32 in actor and int8 in rollout"):
        plan_weights(source, whole)
    with pytest.raises(WeightsError, match="colocated roles have the same"):
        plan_weights(source, replace(source, role="rollout", world=2), colocated=True)
    partial = replace(
        source,
        world=2,
        parameters=(
            replace(
                source.parameters[0],
                layout=Layout(Mesh(("tensor", 2)), (4,), ((),), partial=frozenset({"tensor"})),
                groups=((0, 1),),
            ),
        ),
    )
    with pytest.raises(WeightsError, match="is a pending sum in actor"):
        plan_weights(partial, replace(source, role="rollout"))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="float16"):
        WeightsConfig(dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes"):
        WeightsConfig(bucket_bytes=4)


def test_plans_that_differ_have_other_digests() -> None:
    mesh = random_mesh(random.Random(0))
    one = _described("actor", mesh, ["p"], (4,))
    other = _described("rollout", Mesh(), ["p"], (4,))
    digests = {
        plan_weights(one, other).digest,
        plan_weights(one, other, WeightsConfig(delta=True)).digest,
        plan_weights(replace(one, role="critic"), other).digest,
    }
    assert len(digests) == 3


def _described(role: str, mesh: Mesh, names: list[str], shape: tuple[int, ...]) -> Description:
    return Description(
        role=role,
        world=mesh.world,
        parameters=tuple(
            Parameter(
                name=name,
                layout=Layout.replicated(mesh, shape),
                dtype="float32",
                groups=(tuple(range(mesh.world)),),
            )
            for name in names
        ),
    )


def test_item_bytes_are_those_of_torch() -> None:
    import torch

    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
