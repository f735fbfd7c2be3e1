"""Attention by blocks of keys against PyTorch's own attention, in fp64, with the kernel and by plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hyper_parallel.shard.context import block_attention
from hyper_parallel.shard.context.block_attention import Runs, attend, attend_backward


@pytest.fixture(params=["kernel", "plain"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(block_attention, "kernel_for", lambda *_, **__: None)
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(
        dtype
    )


@pytest.mark.parametrize("values", [8, 5])
@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_blocks_merged_are_attention_to_all_keys(arithmetic: str, pairs: int, values: int) -> None:
    q, k, v = draw(2, 4, 6, 8), draw(2, pairs, 10, 8), draw(2, pairs, 10, values)
    gradient = draw(2, 4, 6, values)
    mask = torch.rand(2, 1, 6, 10, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = True
    mask[0, 0, 2, 4:] = False  # the second block hides everything from this query
    for x in (q, k, v):
        x.requires_grad_()
    wanted = scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    wanted.backward(gradient)
    with torch.no_grad():
        parts = [(slice(0, 4)), (slice(4, 10))]
        runs = Runs(q, values)
        for part in parts:
            runs.add((0, 6), *attend(q, k[:, :, part], v[:, :, part], mask[..., part], False, 0.3))
        out, lse = runs.together(q.dtype)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
        dq = torch.zeros_like(q)
        for part in parts:
            one, dk, dv = attend_backward(
                gradient, q, k[:, :, part], v[:, :, part], out, lse, mask[..., part], False, 0.3
            )
            dq += one
            torch.testing.assert_close(dk, k.grad[:, :, part], rtol=0, atol=1e-13)
            torch.testing.assert_close(dv, v.grad[:, :, part], rtol=0, atol=1e-13)
        torch.testing.assert_close(dq, q.grad, rtol=0, atol=1e-13)


def test_a_causal_block_is_causal_attention(arithmetic: str) -> None:
    q, k, v = draw(1, 4, 7, 8), draw(1, 2, 7, 8), draw(1, 2, 7, 8)
    out, _ = attend(q, k, v, None, True, 0.5)
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)


def test_a_query_that_sees_nothing_gets_nothing_and_gives_nothing(arithmetic: str) -> None:
    q, k, v = draw(1, 2, 3, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 4)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[0, 0, 1] = False
    out, lse = attend(q, k, v, mask, False, 0.5)
    assert not out[:, :, 1].any()
    assert bool((lse[:, :, 1] == float("-inf")).all())
    runs = Runs(q, 4)
    for _ in range(2):
        runs.add((0, 3), out, lse)
    merged, both = runs.together(q.dtype)
    assert not merged.isnan().any()
    dq, dk, dv = attend_backward(torch.ones_like(out), q, k, v, merged, both, mask, False, 0.5)
    assert not dq[:, :, 1].any()
    assert not any(x.isnan().any() for x in (dq, dk, dv))


@pytest.mark.usefixtures("half_attention")
def test_half_precision_is_merged_in_fp32(arithmetic: str) -> None:
    q, k, v = (draw(1, 2, 64, 16, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attend(q, k, v, None, True, 0.25)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact = (q.float() @ k.float().transpose(-1, -2) * 0.25).masked_fill(
        ~torch.ones(64, 64, dtype=torch.bool).tril(), float("-inf")
    )
    torch.testing.assert_close(lse, exact.logsumexp(-1), rtol=0, atol=2e-2)
