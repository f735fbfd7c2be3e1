"""Storages that sleep come back with their bits, in any order of turns; a worker's roles hold what their turn needs."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.rl_runs import rl_config, samples_of
from hyper_parallel.compat import backend
from hyper_parallel.compat.memory import present
from hyper_parallel.config.rl_roles import SleepConfig
from hyper_parallel.errors import TierError
from hyper_parallel.launch.worker import Worker
from hyper_parallel.rl.controller.workers import groups_of, launch_of
from hyper_parallel.rl.roles.host import RoleHost
from hyper_parallel.rl.roles.sleep import RoleMemory
from hyper_parallel.rl.sample import Prompted

CPU = torch.device("cpu")
TURNS = ("generate", "score", "train", "send")
SIZES = st.lists(st.integers(1, 40000), min_size=1, max_size=4)
LARGE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def nbytes(tensors: Any) -> int:
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=3, max_size=3),
    turns=st.lists(st.sampled_from(TURNS), max_size=8),
    data=st.data(),
)
def test_any_turns(sizes: list[list[int]], turns: list[Any], data: st.DataObject) -> None:
    """Values are those of tensors that never leave, also after they are written to, in a turn or from outside."""
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.rand(size, generator=generator) for size in part] for part in sizes]
    tensors[0].append(tensors[0][0][:1])  # a view: its storage moves once
    expected = [[one.clone() for one in part] for part in tensors]
    needed = {"updates": ("train",), "reference": ("score",), "own": ("generate",)}
    leaves = {"updates": ("generate",), "reference": ("generate", "train"), "own": ("train", "score", "send")}
    with tempfile.TemporaryDirectory() as folder:
        memory = RoleMemory(SleepConfig(host=data.draw(st.sampled_from([4096, 2**16])), flash=folder), CPU)
        for part, name in zip(tensors, needed, strict=True):
            memory.add(
                name,
                lambda part=part: part,
                needed=needed[name],
                leaves=leaves[name],
                replaced=name == "own",
                constant=name == "reference",
            )
        for turn in turns:
            memory.turn(turn)
            for name, part, own in zip(needed, tensors, expected, strict=True):
                large = [one for one in part if one.numel() * 4 >= 4096]
                if turn in leaves[name]:
                    assert nbytes(large) == 0
                if name == "own" and turn == "generate":
                    for one, value in zip(part, own, strict=True):
                        one.copy_(value)
                    memory.changed(name)
                    memory.check(name)
                if turn in needed[name]:
                    assert all(torch.equal(*pair) for pair in zip(part, own, strict=True))
                if name == "updates" and turn == "train":
                    for one in {id(x): x for x in (*part[:-1], *own[:-1])}.values():
                        one += 1
                    own[-1].copy_(own[0][:1])
        for one, value in zip(tensors[0][:-1], expected[0], strict=False):
            with present(one, changed=True):
                assert torch.equal(one, value)
                one *= 2
        memory.turn("train")
        for one, value in zip(tensors[0][:-1], expected[0], strict=False):
            assert torch.equal(one, value * 2)
        memory.close()


@pytest.fixture
def host_of(tmp_path: Path) -> Iterator[Any]:
    made = []

    def make(sleep: Any, **sections: Any) -> RoleHost:
        roles = {"rollout": {"page": 32, "batch": 32}, "sleep": sleep, **sections.pop("roles", {})}
        config = rl_config(tmp_path / "run", roles=roles, **sections)
        (plan,) = groups_of(config)
        worker = Worker(0, 0, 1, 1, CPU, backend("cpu"))
        made.append(RoleHost(launch_of(config, plan, 1), worker))
        return made[-1]

    yield make
    for one in made:
        one.close()


def live() -> int:
    """Bytes of all floating-point tensors of this process, found among Python's objects: no registry is asked."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
    return nbytes(one for one in found if one.is_floating_point() and one.device == CPU)


def test_what_is_live_in_each_turn(host_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured among all tensors of the process, with sleep and without."""
    sections: dict[str, Any] = {
        "model": {"config": LARGE},
        "rl": {"kl": 0.1, "algorithm": "ppo", "max_tokens": 16},
    }
    prompts = [Prompted(ticket=row, place=0, row=row, prompt=f"{row:03d}=") for row in range(32)]
    seen: dict[str, dict[str, int]] = {}
    metrics: dict[str, dict[str, float]] = {}
    for name, sleep in (("without", None), ("with", {"flash": str(tmp_path / "flash")})):
        before = live()
        host = host_of(sleep, **sections)
        actor = host._actor
        assert actor is not None
        seen[name] = at = {}
        train = actor.train

        def watched(*given: Any, at: dict[str, int] = at, train: Any = train, before: int = before) -> Any:
            at["train"] = live() - before
            return train(*given)

        monkeypatch.setattr(actor, "train", watched)
        host.generate(prompts, 2)
        at["generate"] = live() - before
        cache = host._rollout.cache_bytes
        samples = samples_of(host._config)
        host.train(samples, host.score(samples))
        host.renewed(1)
        host.generate([], 2)
        at["again"] = live() - before
        policy = nbytes(actor.model.parameters())
        metrics[name] = host.train(samples, host.score(samples))
        monkeypatch.undo()
        del host, actor, train, watched
    # Two moments of the policy and of the critic, the critic, and the reference, which is as large as the policy: six
    # times the policy, about.
    small = 0.03 * policy
    for turn in ("generate", "again"):
        assert seen["without"][turn] - seen["with"][turn] >= 6 * policy - small
    assert seen["without"]["train"] - seen["with"]["train"] >= cache + policy - small
    assert cache > 10 * small
    # What the metrics say is what lives, but for buffers and norms.
    told = metrics["with"]["resident_bytes_generate"]
    assert told == pytest.approx(seen["with"]["again"], abs=small)
    assert metrics["without"]["resident_bytes_train"] > metrics["with"]["resident_bytes_train"]
    assert metrics["with"]["offloaded_bytes"] > 0
    assert metrics["with"]["offload_s"] > 0
    assert "offloaded_bytes" not in metrics["without"]


def test_no_room_is_one_line(host_of: Any, tmp_path: Path) -> None:
    needs = r"room for \(host 4.0 KiB\); raise roles.sleep.host, or set roles.sleep.flash"
    with pytest.raises(TierError, match=needs) as caught:
        host_of({"host": 4096})
    assert "\n" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"no folder can be made .* set roles.sleep.flash to one") as caught:
        host_of({"flash": str(tmp_path / "file" / "folder")})
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_is_one_line(
    host_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    host = host_of({"flash": str(tmp_path / "flash")}, rl={"kl": 0.1})
    samples = samples_of(host._config)
    host.train(samples, host.score(samples))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TierError, match=r"No space left.*roles.sleep.flash") as caught:
        host.generate([], 1)
    assert "\n" not in str(caught.value)
