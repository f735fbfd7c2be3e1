"""Matrix products by blocks: a row has the same bits in any number of rows, with several threads too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hyper_parallel.inference.blocked_products import BlockedProducts, column_major
from hyper_parallel.inference.row_views import RowViews


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_have_the_same_bits_in_any_number(by_column: bool, bias: bool) -> None:
    """MKL's two threads share the sums of this size, in other ways for 32 and for 64 rows."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(1408, 512, bias=bias)).requires_grad_(False)
    if by_column:
        layer[0].weight.data = layer[0].weight.data.t().contiguous().t()
    x = torch.randn(1, 96, 1408)
    with BlockedProducts(32):
        alone = layer(x[:, :32])
        assert torch.equal(layer(x)[:, :32], alone)
        assert torch.equal(layer(torch.cat([x[:, 64:], x[:, :32]], 1))[:, 32:], alone)
        assert torch.equal(layer(torch.cat([x[:, 7:32], x[:, :7]], 1))[:, 25:], alone[:, :7])
    torch.testing.assert_close(layer(x)[:, :32], alone)


def test_products_of_all_forms() -> None:
    x, weight, bias = torch.randn(2, 32, 24), torch.randn(24, 40), torch.randn(40)
    flat, batch = x.view(64, 24), torch.randn(2, 24, 40)
    plain = (
        linear(x, weight.t(), bias),
        x @ weight,
        torch.matmul(flat, weight),
        flat.mm(weight),
        torch.addmm(bias, flat, weight),
        torch.bmm(x, batch),
        x @ batch,
    )
    with BlockedProducts(16):
        blocked = (
            linear(x, weight.t(), bias),
            x @ weight,
            torch.matmul(flat, weight),
            torch.mm(flat, weight),
            torch.addmm(bias, flat, weight),
            torch.bmm(x, batch),
            x @ batch,
        )
        out = torch.empty(64, 40)
        torch.matmul(flat, weight, out=out)
        scaled = torch.addmm(bias, flat, weight, beta=2)
        odd = flat[:17] @ weight
    for one, other in zip(blocked, plain, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(out, flat @ weight)
    torch.testing.assert_close(scaled, torch.addmm(bias, flat, weight, beta=2))
    torch.testing.assert_close(odd, flat[:17] @ weight)


def test_column_major_keeps_values_and_shared_weights() -> None:
    model = nn.Module()
    model.free, model.head, model.table = nn.Linear(8, 4), nn.Linear(8, 6), nn.Embedding(6, 8)
    model.head.weight = model.table.weight
    before = model.free.weight.detach().clone()
    column_major(model, 32)
    assert torch.equal(model.free.weight, before)
    assert model.free.weight.stride() == (1, 4)
    assert model.head.weight is model.table.weight
    assert model.table.weight.is_contiguous()


def test_column_major_changes_no_bits() -> None:
    """Sums over 1408 products are in another order for these; such weights stay as they are."""
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((64, 1408), (1408, 512), (512, 64))))
    x = torch.randn(64, 64)
    with torch.no_grad(), BlockedProducts(32):
        before = model(x)
        column_major(model, 32)
        assert torch.equal(model(x), before)
    turned = [layer.weight.stride(0) == 1 for layer in model]  # type: ignore[union-attr, operator]
    assert turned[0]
    assert turned[2]


def _rows(x: Tensor | None) -> list[int] | None:
    return None if x is None else x.flatten().tolist()


def test_views_of_rows() -> None:
    """In the order of the slices, not of the memory; of two that overlap the later one has none."""
    x = torch.arange(12).view(1, 12)
    views = RowViews([slice(8, 10), None, slice(0, 3), slice(2, 5), slice(3, 4)]).of(x, 1)
    assert [_rows(view) for view in views] == [[8, 9], None, [0, 1, 2], None, [3]]
    assert all(view is None or view._base is x._base for view in views)
    assert [_rows(view) for view in RowViews([slice(0, 12)]).of(x, 1)] == [x.flatten().tolist()]
