"""Matrix products by blocks: a row has the same bits in any number of rows, with several threads too."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hyper_parallel.compat.dispatch import products_by, unchanged_products
from hyper_parallel.inference.blocked_products import _SAME, blocked_products, column_major
from hyper_parallel.inference.paged_attention import RowViews


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
    with blocked_products(32):
        alone = layer(x[:, :32])
        assert torch.equal(layer(x)[:, :32], alone)
        assert torch.equal(layer(torch.cat([x[:, 64:], x[:, :32]], 1))[:, 32:], alone)
        assert torch.equal(layer(torch.cat([x[:, 7:32], x[:, :7]], 1))[:, 25:], alone[:, :7])
    torch.testing.assert_close(layer(x)[:, :32], alone)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("form", ["plain", "bias", "bias of each row", "batch", "batch and bias"])
def test_any_number_of_rows(form: str, merged: bool) -> None:
    """What is left of the last block is filled up."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(200, 1408), torch.randn(1408, 512), torch.randn(200, 512)

    def product(rows: slice) -> Tensor:
        if form == "plain":
            return x[rows] @ weight
        if form == "bias":
            return torch.addmm(bias[0], x[rows], weight)
        if form == "bias of each row":
            return torch.addmm(bias[rows], x[rows], weight)
        both = torch.stack([x[rows], -x[rows]])
        if form == "batch":
            return torch.bmm(both, torch.stack([weight, weight]))[1]
        return torch.baddbmm(bias[rows].expand(2, -1, -1), both, torch.stack([weight, weight]))[1]

    with blocked_products(16, merged=merged):
        block = product(slice(16))
        for rows in (16, 17, 24, 41, 72, 128, 200):
            found = product(slice(rows))
            assert found.shape == (rows, 512)
            assert torch.equal(found[:16], block)
            last = slice(rows - 16, rows)
            assert torch.equal(found[last], product(last))


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
    with blocked_products(16):
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
        odd_batch = torch.bmm(x[:, :17], batch)
    for one, other in zip(blocked, plain, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(out, flat @ weight)
    torch.testing.assert_close(scaled, torch.addmm(bias, flat, weight, beta=2))
    torch.testing.assert_close(odd, flat[:17] @ weight)
    torch.testing.assert_close(odd_batch, torch.bmm(x[:, :17], batch))
    assert odd_batch.is_contiguous(), "models view it"


def test_products_inside_other_operators() -> None:
    """einsum, attention's projections, and weights of 3 dimensions: whatever calls the library's product."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 48, 1408), torch.randn(1408, 512)
    attend = nn.MultiheadAttention(64, 4, batch_first=True).eval().requires_grad_(False)
    rows = torch.randn(1, 96, 64)
    plain = torch.einsum("btk,kn->btn", x, weight), attend(rows, rows, rows)[0]
    with torch.no_grad(), blocked_products(32, merged=False):
        alone = x[:1, :32] @ weight
        blocked = torch.einsum("btk,kn->btn", x, weight), attend(rows, rows, rows)[0]
    assert torch.equal(blocked[0][0, :32], alone[0])
    for one, other in zip(blocked, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(1408, 512), (256, 704), (64, 64), (3, 5), (512, 1)])
def test_blocks_at_once_have_the_bits_of_blocks(sizes: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(*sizes, bias=bias).requires_grad_(False), torch.randn(224, sizes[0])
    with blocked_products(32, merged=False):
        blocks = layer(x)
    with blocked_products(32):
        assert torch.equal(layer(x), blocks)


def test_where_sums_show_no_order_blocks_stay() -> None:
    """A product with zeros has the same bits in any order, and says nothing of other weights of its size."""
    _SAME.clear()
    with blocked_products(32):
        for weight in (torch.zeros(256, 64), torch.randn(2, 64)):
            torch.randn(64, len(weight)) @ weight
    assert list(_SAME.values()) == [False, False]


def test_blocks_at_once_of_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether MKL has such sizes depends on the processor; here it is made to have one, of 96 rows."""
    mm = torch.mm
    rows: list[int] = []

    def other(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None:
            rows.append(len(x))
        return mm(x, weight, out=out).add_(1e-3 if len(x) == 96 else 0)

    _SAME.clear()
    x, weight = torch.randn(160, 256), torch.randn(256, 64)
    plain = x @ weight
    monkeypatch.setattr(torch, "mm", other)
    with blocked_products(32):
        assert torch.equal(x[:96] @ weight, plain[:96])
        assert torch.equal(x @ weight, plain)
    _SAME.clear()
    assert rows == [64, 32, 128, 32]


def test_other_threads_and_blocks_are_left_alone() -> None:
    """The block of one thread is not another's, and ends with it; the innermost counts."""
    weight, x = torch.randn(1408, 512), torch.randn(96, 1408)
    plain = x @ weight
    found: list[Tensor] = []
    calls: list[str] = []

    def note(name: str) -> products_by:
        return products_by(lambda *_: calls.append(name))

    with note("outer"):
        with note("inner"):
            torch.equal(x @ weight, plain)
        thread = Thread(target=lambda: found.append(x @ weight))
        thread.start()
        thread.join()
        with unchanged_products():
            assert torch.equal(x @ weight, plain)
        assert calls == ["inner"]
        assert torch.equal(x @ weight, plain)
    assert calls == ["inner", "outer"]
    assert torch.equal(x @ weight, plain)
    assert torch.equal(found[0], plain)


def test_column_major_keeps_values_and_shared_weights() -> None:
    model = nn.Module()
    model.free, model.head, model.table = nn.Linear(64, 32), nn.Linear(64, 48), nn.Embedding(48, 64)
    model.head.weight = model.table.weight
    before = model.free.weight.detach().clone()
    column_major(model, 32)
    assert torch.equal(model.free.weight, before)
    assert model.free.weight.stride() == (1, 32)
    assert model.head.weight is model.table.weight
    assert model.table.weight.is_contiguous()


def test_column_major_changes_no_bits() -> None:
    """Sums over 1408 products are in another order for these; such weights stay as they are."""
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((64, 1408), (1408, 512), (512, 64))))
    x = torch.randn(64, 64)
    with torch.no_grad(), blocked_products(32):
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
