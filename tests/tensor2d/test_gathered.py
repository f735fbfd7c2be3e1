"""What is gathered again is not kept, is gathered once for all that share it, and gives the same gradients."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.shard.tensor.apply_1d import GatheredInput, gather_again


def _doubling() -> tuple[list[int], object]:
    calls: list[int] = []

    def gather(shard: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.cat([shard, shard], 1)

    return calls, gather


def test_same_gradients_and_one_gather_for_products_that_share_it() -> None:
    shard = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    products = [nn.Linear(4, 5, dtype=torch.float64) for _ in range(3)]
    results = []
    for keeps in (True, False):
        calls, gather = _doubling()
        given = GatheredInput()
        whole = given.enter(shard, gather, keeps)  # type: ignore[arg-type]
        out = torch.stack([given.saved(product, whole).sin() for product in products])
        del whole
        loss = out.sum()
        assert len(calls) == 1
        parameters = [p for product in products for p in product.parameters()]
        results.append(torch.autograd.grad(loss, [shard, *parameters], retain_graph=True))
        assert len(calls) == (1 if keeps else 2)
        again = torch.autograd.grad(loss, [shard, *parameters])  # a second pass gathers once more
        assert len(calls) == (1 if keeps else 3)
        assert all(torch.equal(a, b) for a, b in zip(again, results[-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_gathered_tensor_is_let_go_of() -> None:
    for keeps in (True, False):
        shard = torch.randn(2, 3, 4, requires_grad=True)
        _, gather = _doubling()
        given, products = GatheredInput(), [nn.Linear(4, 5), nn.Linear(4, 5)]
        whole = given.enter(shard, gather, keeps)  # type: ignore[arg-type]
        out = [given.saved(product, whole) for product in products]
        given.leave()
        # A view that shares the storage lives as long as anything that autograd saved of it.
        memory = StorageWeakRef(whole.untyped_storage())
        del whole
        gc.collect()
        assert memory.expired() is not keeps
        sum(o.sum() for o in out).backward()


def test_without_gradients_nothing_is_saved() -> None:
    _, gather = _doubling()
    with torch.no_grad():
        whole, saving = gather_again(torch.zeros(1, 2, 3), gather)  # type: ignore[arg-type]
    assert whole.shape == (1, 4, 3)
    with saving():
        pass
