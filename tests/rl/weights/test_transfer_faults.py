"""A rank that is killed, stopped or damages a byte in the middle of a transfer: the others end by their deadline, and
their weights are as before."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
import torch

from harness.weight_models import connected, small_model, whole
from harness.weight_roles import run_roles
from hyper_parallel.compat.process_groups import Pending, StandaloneGroup
from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.transfer import WeightTransfer

SECONDS = 12.0
"""The deadline, except where a rank is stopped: only the deadline ends a transfer from or to that."""
STOPPED = 3.0
SLACK = 3.0
"""Of a machine with more processes than cores."""
OPTIONS = WeightsConfig(bucket_bytes=600)


class _Faulty(StandaloneGroup):
    """A group whose n-th transfer of payloads goes wrong."""

    def __init__(self, group: StandaloneGroup, fault: str, place: int) -> None:
        super().__init__(group._group)  # type: ignore[arg-type]
        self._fault, self._left = fault, place

    def _due(self) -> bool:
        self._left -= 1
        return self._left == 0

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        if self._fault != "receive" and self._due():
            self._happens(tensor)
        return super().send(tensor, to)

    def receive(self, tensor: torch.Tensor, sender: int) -> Pending:
        if self._fault == "receive" and self._due():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive(tensor, sender)

    def _happens(self, tensor: torch.Tensor) -> None:
        if self._fault == "damage":
            tensor[-1] ^= 1
        elif self._fault == "damage header":
            tensor[20] ^= 1
        elif self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            later = f"sleep {STOPPED + SLACK + 1:g}; kill -9 {os.getpid()}"  # which ends the test
            subprocess.Popen(["sh", "-c", later])
            os.kill(os.getpid(), signal.SIGSTOP)


def _with_fault(link: WeightTransfer, fault: str, place: int) -> WeightTransfer:
    faulty = WeightTransfer(
        type(link._link)(
            plan=link.plan, rank=link.rank, group=_Faulty(link._link.group, fault, place), epoch=0
        ),
        source=link._source,
        target=link._target,
        seconds=link.seconds,
    )
    link._link = link._exchange = None  # type: ignore[assignment]
    return faulty


def _failure(run: Any) -> tuple[str, float]:
    began = time.monotonic()
    try:
        run()
    except WeightsError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def _actor(rank: int, world: int, port: int, faulty: str, fault: str, place: int) -> tuple[str, float]:
    model = small_model(1, {"shard": 2})
    link = connected(model, "actor", rank, world, port, options=OPTIONS, seconds=20)
    if faulty == f"actor {rank}":
        link = _with_fault(link, fault, place)
    link.seconds = STOPPED if fault == "stop" else SECONDS
    return _failure(lambda: link.send(3))


def _rollout(
    rank: int, world: int, port: int, faulty: str, fault: str, place: int
) -> tuple[str, float, bool, str]:
    model = small_model(2, {"replicate": 2})
    link = connected(model, "rollout", rank, world, port, options=OPTIONS, seconds=20)
    if faulty == f"rollout {rank}":
        link = _with_fault(link, fault, place)
    link.seconds = STOPPED if fault == "stop" else SECONDS
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    failed, took = _failure(lambda: link.receive(3))
    refused, _ = _failure(lambda: link.install(3))
    kept = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return failed, took, kept, refused


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_lost_actor_ends_the_transfer_on_the_rollout(fault: str) -> None:
    _, rollouts = run_roles(_actor, 2, _rollout, 2, "actor 1", fault, 8)
    assert isinstance(rollouts, list)
    for rank, (failed, took, kept, refused) in enumerate(rollouts):
        assert failed.startswith(f"rollout rank {rank}: receive weights, version 3, "), failed
        assert "\n" not in failed
        # A rank that is gone is noticed at once, and so is one whose transfer has failed.
        assert took < (STOPPED + SLACK if fault == "stop" else SECONDS)
        assert kept
        assert "the link has failed; the weights are still those of version -1" in refused
    assert any("from actor rank 1: it failed after " in failed for failed, *_ in rollouts)


def test_a_lost_rollout_ends_the_transfer_on_the_actor() -> None:
    actors, _ = run_roles(_actor, 2, _rollout, 2, "rollout 0", "receive", 8)
    assert isinstance(actors, list)
    for rank, (failed, took) in enumerate(actors):
        assert failed.startswith(f"actor rank {rank}: send weights, version 3, to rollout rank "), failed
        assert took < SECONDS


def test_a_damaged_byte_is_found() -> None:
    _, rollouts = run_roles(_actor, 2, _rollout, 2, "actor 1", "damage", 2)
    assert isinstance(rollouts, list)
    for _, took, kept, refused in rollouts:
        assert kept
        assert refused
        assert took < SECONDS
    found = [failed for failed, *_ in rollouts if "checksum" in failed]
    assert len(found) == 1
    assert "from actor rank 1: the checksum of " in found[0]
    assert " with model." in found[0]


def test_a_damaged_header_is_found() -> None:
    _, rollouts = run_roles(_actor, 2, _rollout, 2, "actor 1", "damage header", 2)
    assert isinstance(rollouts, list)
    assert any("from actor rank 1: the header of a message is damaged" in failed for failed, *_ in rollouts)
    assert all(kept for _, _, kept, _ in rollouts)


def _restarting(rank: int, world: int, port: int) -> None:
    model = small_model(1)
    connected(model, "actor", rank, world, port).send(1)
    connected(model, "actor", rank, world, port, epoch=1).send(2)


def _restarted(rank: int, world: int, port: int) -> bool:
    model = small_model(2)
    link = connected(model, "rollout", rank, world, port)
    link.receive()
    link.close()
    link = connected(model, "rollout", rank, world, port, epoch=1)
    link.install(link.receive())
    wanted = whole(small_model(1))
    return all(torch.equal(value, wanted[name]) for name, value in whole(model).items())


def test_a_link_is_made_again_with_the_next_epoch() -> None:
    assert run_roles(_restarting, 1, _restarted, 1) == ([None], [True])
