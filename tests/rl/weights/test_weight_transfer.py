"""Weights between two groups of processes that share no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from harness.weight_models import connected, small_model, whole
from harness.weight_roles import run_roles
from hyper_parallel.compat.process_groups import serve_store
from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.plan import plan_weights
from hyper_parallel.rl.weights.transfer import Meeting, connect, describe, local_tensors

Axes = dict[str, int] | None
SMALL = WeightsConfig(bucket_bytes=600)
"""Many messages, and parameters that do not fit into one."""


def _actor(rank: int, world: int, port: int, pairs: list[tuple[Axes, Axes]]) -> None:
    for epoch, (axes, _) in enumerate(pairs):
        model = small_model(1, axes)
        link = connected(model, "actor", rank, world, port, epoch=epoch, options=SMALL)
        with torch.no_grad():  # a score pass, after which FSDP2 may keep whole parameters
            model(torch.arange(8).view(2, 4))
        link.send(1)
        link.close()


def _rollout(rank: int, world: int, port: int, pairs: list[tuple[Axes, Axes]]) -> list[bool]:
    equal = []
    for epoch, (_, axes) in enumerate(pairs):
        model = small_model(2, axes)
        link = connected(model, "rollout", rank, world, port, epoch=epoch, options=SMALL)
        version = link.receive()
        before = whole(model)
        link.install(version)
        after, wanted = whole(model), whole(small_model(1))
        link.close()
        assert version == link.version == 1
        assert not torch.equal(before["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"])
        equal.append(all(torch.equal(after[name], value) for name, value in wanted.items()))
    return equal


@pytest.mark.parametrize(
    ("rollouts", "targets"), [(1, [None]), (2, [{"tensor": 2}, {"replicate": 2}, {"shard": 2}, None])]
)
def test_parameters_arrive_bit_for_bit(rollouts: int, targets: list[Axes]) -> None:
    pairs = [(source, target) for source in ({"shard": 2}, {"tensor": 2}) for target in targets]
    sent, equal = run_roles(_actor, 2, _rollout, rollouts, pairs)
    assert sent == [None, None]
    assert equal == [[True] * len(pairs)] * rollouts


def _trains(rank: int, world: int, port: int, options: WeightsConfig) -> list[int]:
    model = small_model(1)
    link = connected(model, "actor", rank, world, port, options=options)
    sent, buffers = [], []
    for version in range(3):
        link.begin_send(version)
        with torch.no_grad():  # the copy is taken at `begin_send`
            for p in model.parameters():
                p.view(-1)[version].add_(1)
        link.finish_send()
        sent.append(link.sent_bytes)
        buffers.append(len(link._exchange._pool))
    assert buffers[1] == buffers[2], "buffers are lost from version to version"
    return sent


def _generates(rank: int, world: int, port: int, options: WeightsConfig) -> list[bool]:
    model, expected = small_model(2), small_model(1)
    link = connected(model, "rollout", rank, world, port, options=options)
    equal, buffers = [], []
    for version in range(3):
        before = whole(model)
        link.begin_receive()
        while link.under_way:  # passes under the old weights
            with torch.inference_mode():
                model(torch.arange(5)[None])
        same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
        link.install(link.finish_receive())
        wanted = {
            name: value.to(torch.bfloat16).float() if options.dtype else value
            for name, value in whole(expected).items()
        }
        equal.append(same and all(torch.equal(value, wanted[name]) for name, value in whole(model).items()))
        with torch.no_grad():
            for p in expected.parameters():
                p.view(-1)[version].add_(1)
        buffers.append(len(link._exchange._pool))
    assert buffers[1] == buffers[2], "buffers are lost from version to version"
    return equal


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("delta", [False, True])
def test_versions_one_after_the_other(dtype: Any, delta: bool) -> None:
    options = WeightsConfig(bucket_bytes=4096, dtype=dtype, delta=delta)
    sent, equal = run_roles(_trains, 1, _generates, 1, options)
    assert equal == [[True] * 3]
    assert isinstance(sent, list)
    ((first, second, third),) = sent
    if delta:
        assert third - second == second - first < first / 4
    else:
        assert third - second == second - first == first


def _colocated(rank: int, world: int, port: int, axes: list[tuple[Axes, Axes]]) -> list[tuple[bool, int]]:
    found = []
    for epoch, (source, target) in enumerate(axes):
        actor, rollout = small_model(1, source), small_model(2, target)
        plan = plan_weights(
            describe(actor, "actor", world), describe(rollout, "rollout", world), colocated=True
        )
        link = connect(
            plan,
            rank,
            Meeting(host="127.0.0.1", port=port, epoch=epoch),
            source=lambda: local_tensors(actor),  # noqa: B023
            target=lambda: local_tensors(rollout),  # noqa: B023
        )
        link.install(link.exchange(1))
        wanted = whole(small_model(1))
        found.append(
            (all(torch.equal(value, wanted[name]) for name, value in whole(rollout).items()), link.sent_bytes)
        )
        dist.barrier()
        link.close()
    return found


def test_colocated_roles() -> None:
    served = serve_store("127.0.0.1")
    pairs: list[tuple[Axes, Axes]] = [
        ({"shard": 2}, {"tensor": 2}),
        ({"shard": 2}, None),
        (None, {"tensor": 2}),
    ]
    same: list[tuple[Axes, Axes]] = [({"tensor": 2}, {"tensor": 2}), (None, None)]
    for found in run_ranks(_colocated, 2, served.port, pairs + same):
        assert [equal for equal, _ in found] == [True] * 5
        assert [sent for _, sent in found][2:] == [0, 0, 0]


def test_an_unknown_or_stale_version_is_refused() -> None:
    assert run_roles(_sends_stale, 1, _installs_stale, 1) == ([None], [None])


def _sends_stale(rank: int, world: int, port: int) -> None:
    link = connected(small_model(1), "actor", rank, world, port)
    link.send(5)
    with pytest.raises(
        WeightsError, match="actor rank 0: version 5 is stale: version 5 was transferred before"
    ):
        link.begin_send(5)
    # A sender that forgot what it sent is found by the receiver.
    link._transferred = -1
    with pytest.raises(WeightsError):
        link.send(4)


def _installs_stale(rank: int, world: int, port: int) -> None:
    model = small_model(2)
    link = connected(model, "rollout", rank, world, port, seconds=5)
    link.receive()
    with pytest.raises(WeightsError, match="install weights, version 4: the last version received is 5"):
        link.install(4)
    link.install(5)
    before = whole(model)
    with pytest.raises(
        WeightsError, match="receive weights, version 4, from actor rank 0: version 4 is stale"
    ):
        link.receive()
    with pytest.raises(WeightsError, match="connect again with the next epoch"):
        link.begin_receive()
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    assert link.version == 5


def _sends_other(rank: int, world: int, port: int) -> str:
    link = connected(small_model(1, {"shard": 2}), "actor", rank, world, port, seconds=5)
    try:
        link.send(rank)
    except WeightsError as error:
        return str(error)
    return ""


def _receives_mixed(rank: int, world: int, port: int) -> str:
    link = connected(small_model(2), "rollout", rank, world, port, seconds=5)
    with pytest.raises(WeightsError) as error:
        link.receive()
    return str(error.value)


def test_mixed_versions_are_refused() -> None:
    _, refused = run_roles(_sends_other, 2, _receives_mixed, 1)
    assert isinstance(refused, list)
    assert "it sends version" in refused[0]
    assert "all ranks must send the same version" in refused[0]


def test_ranks_that_do_not_come_are_named() -> None:
    served = serve_store("127.0.0.1")
    model = small_model(1)
    plan = plan_weights(describe(model, "actor"), describe(model, "rollout"))
    with pytest.raises(WeightsError, match=r"actor rank 0: connect for weights .* have not met within 0.5 s"):
        connect(
            plan,
            0,
            Meeting(host="127.0.0.1", port=served.port),
            source=lambda: local_tensors(model),
            seconds=0.5,
        )


def test_parameters_that_have_changed_their_shape_are_refused() -> None:
    served = serve_store("127.0.0.1")
    model = small_model(1)
    plan = plan_weights(describe(model, "actor"), describe(model, "rollout"), colocated=True)
    tensors = dict(local_tensors(model))
    copies = {name: value.clone() for name, value in tensors.items()}
    link = connect(
        plan,
        0,
        Meeting(host="127.0.0.1", port=served.port),
        source=lambda: tensors,
        target=lambda: copies,
        seconds=5,
    )
    link.exchange(1)
    copies["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(
        WeightsError, match=r"model\.norm\.weight is torch\.float32 \[3\] here, and float32 \[16\]"
    ):
        link.install(1)
    tensors.pop("model.norm.weight")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is nothing here"):
        link.exchange(2)
