"""Any elementwise optimizer of torch on local tensors: the values of one process, the memory of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spread_steps import backward, groups, spread, tiny, whole
from torch.distributed.tensor import DTensor

from harness import run_ranks
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.local_optimizer import elementwise, find_twins, on_local
from hyper_parallel.shard import ShardedModel

STEPS = 3
EPS = 1e-5
"""Above the gradients that rounding decides: of those AdamW and Adagrad would make whole steps."""
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"axes": {"shard": 2}}, "AdamW", {"lr": 0.01, "eps": EPS, "fused": True}),
    ({"axes": {"tensor": 2}}, "AdamW", {"lr": 0.01, "eps": EPS, "foreach": True}),
    ({"axes": {"shard": 2}, "memory": {"shard": "gradients"}}, "Adagrad", {"lr": 0.01, "eps": EPS}),
    ({"axes": {"replicate": 2}}, "SGD", {"lr": 0.1, "momentum": 0.9}),
]


def trained(handle: ShardedModel, kind: str, settings: dict[str, Any]) -> tuple[list[float], Any]:
    """Three steps with a schedule; the losses, and the optimizer."""
    optimizer = getattr(torch.optim, kind)(groups(handle.model), **settings)
    on_local(optimizer, handle)
    on_local(optimizer, handle)  # changes nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.2 * step)
    losses = []
    for step in range(STEPS):
        aliased(optimizer)
        losses.append(backward(handle, step, micro_batches=2))
        aliased(optimizer)
        optimizer.step()
        schedule.step()
        _, twins = find_twins(optimizer)
        assert twins is not None
        assert all(t.tensor.grad is None for t in twins if t.tensor is not t.parameter), (
            "gradients held by twins"
        )
        assert any(p.parameter.grad is not None for p in handle.parameters())
        optimizer.zero_grad()
        assert all(p.parameter.grad is None for p in handle.parameters())
    return losses, optimizer


def aliased(optimizer: Any) -> None:
    """Twins share the parameters' memory."""
    _, twins = find_twins(optimizer)
    assert twins is not None
    for twin in twins:
        local = twin.parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        assert twin.tensor.data_ptr() == local.data_ptr(), twin.name
        assert twin.tensor.shape == local.shape, twin.name
        assert not isinstance(twin.tensor, DTensor), twin.name


def one_rank(rank: int, world: int) -> list[tuple[list[float], dict[str, torch.Tensor], list[float]]]:
    found = []
    for declared, kind, settings in CASES:
        handle = spread(declared)
        losses, optimizer = trained(handle, kind, settings)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        found.append((losses, whole(handle), [group["lr"] for group in state["param_groups"]]))
    return found


def test_two_workers_update_as_one_process_does() -> None:
    by_rank = run_ranks(one_rank, 2)
    for index, (_, kind, settings) in enumerate(CASES):
        alone = spread({})
        expected, _ = trained(alone, kind, settings)
        values = whole(alone)
        for rank in range(2):
            losses, got, rates = by_rank[rank][index]
            assert losses == pytest.approx(expected, abs=1e-5)
            assert rates == pytest.approx([settings["lr"] * 0.4] * 2)
            for name, value in values.items():
                torch.testing.assert_close(
                    got[name], value, rtol=1e-4, atol=2e-5, msg=f"{CASES[index]}: {name}"
                )


class Whole(torch.optim.SGD):
    """Of another origin: it may look at anything."""


def refusals(rank: int, world: int) -> list[str]:
    said = []
    handle = spread({"axes": {"shard": 2}})
    matrices = [p for p in handle.model.parameters() if p.dim() == 2]
    for optimizer in (torch.optim.Muon(matrices, lr=0.1), Whole(matrices, lr=0.1)):
        with pytest.raises(IntegrationError) as error:
            on_local(optimizer, handle)
        said.append(str(error.value))
    with pytest.raises(IntegrationError) as error:
        on_local(torch.optim.SGD(tiny().parameters(), lr=0.1), handle)
    said.append(str(error.value))
    declared = elementwise(type("Declared", (torch.optim.SGD,), {}))(matrices, lr=0.1)
    on_local(declared, handle)
    with pytest.raises(IntegrationError, match="closure"):
        declared.step(lambda: 0.0)
    copies = spread({"axes": {"replicate": 2}})
    on_local(torch.optim.Muon([p for p in copies.model.parameters() if p.dim() == 2], lr=0.1), copies)
    return said


def test_what_looks_at_more_than_one_element_is_refused_by_name_where_a_matrix_is_split() -> None:
    muon, other, before = run_ranks(refusals, 2)[0]
    assert "Muon" in muon
    assert "'model.embed_tokens.weight' is split over shard" in muon
    assert "elementwise(Whole)" in other
    assert "after the model was spread" in before


def moved(rank: int, world: int) -> tuple[set[str], set[str]]:
    """What is trained, and what one step changed."""
    handle = spread({"axes": {"shard": 2}})
    for parameter in handle.model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(groups(handle.model), lr=0.1)
    on_local(optimizer, handle)
    _, twins = find_twins(optimizer)
    assert twins is not None
    handle.model.to(torch.float64)  # other memory, as `model.to(device)` gives
    handle.model.to(torch.float32)
    before = whole(handle)
    backward(handle, 0)
    optimizer.step()
    aliased(optimizer)
    changed = {name for name, value in whole(handle).items() if not torch.equal(value, before[name])}
    return {twin.name for twin in twins}, changed


def test_frozen_parameters_have_no_twins_and_memory_that_moved_is_found_again() -> None:
    for trained_names, changed in run_ranks(moved, 2):
        assert trained_names == changed
        assert changed == {n for n, _ in tiny().named_parameters() if not n.startswith("model.layers.0.")}


def cut_by_mesh(rank: int, world: int) -> list[int]:
    """The numbers of parameters in groups that Transformers cut up, before and after."""
    handle = spread({"axes": {"shard": 2, "expert": 2}}, tiny(experts=True))
    cut = []
    for group in groups(handle.model):
        by_mesh: dict[Any, list[Any]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        cut += [{**group, "params": some} for some in by_mesh.values()]
    optimizer = torch.optim.AdamW(cut, lr=0.1)
    before = [len(group["params"]) for group in optimizer.param_groups]
    on_local(optimizer, handle)
    backward(handle, 0)
    optimizer.step()
    return [*before, 0, *(len(group["params"]) for group in optimizer.param_groups)]


def test_groups_are_the_same_whatever_meshes_their_parameters_lie_on() -> None:
    assert run_ranks(cut_by_mesh, 2) == [[12, 4, 5, 0, 16, 5]] * 2
