"""Fused operators are priced by the bytes that cross the border of their run, as a person counts them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture, costs
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.operator_costs import fused_costs
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.trace import Op
from hyper_parallel.workload.work import Work

ROWS, WIDTH = 64, 32
BYTES = ROWS * WIDTH * 2


def _captured() -> StepGraph:
    """A norm in float32, a product, an activation and a residual."""
    with fake_mode_with_symbols():
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        w = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)

        def body() -> dict[str, Tensor]:
            wide = x.float()
            normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
            made = normed @ w
            return {"result": functional.silu(made) * 2 + x}

        return capture(body, {"x": ("input", x), "w": ("parameter", w)})


def test_a_run_reads_what_it_is_given_and_writes_what_is_used_behind_it() -> None:
    step = _captured()
    plain = costs(step)
    fused = fused_costs(step, plain)
    works = [work for work in fused.values() if isinstance(work, Work) and work.kind != "view"]
    assert [work.kind for work in works] == ["reduce", "matmul", "elementwise"]
    norm, product, residual = works
    assert (norm.read, norm.written) == (BYTES, BYTES)
    assert (residual.read, residual.written) == (2 * BYTES, BYTES)
    alone = [work for work in plain.values() if isinstance(work, Work) and work.kind != "view"]
    assert product in alone
    assert sum(work.vector_flops for work in works) == sum(work.vector_flops for work in alone)
    assert sum(work.read for work in works) < sum(work.read for work in alone) / 2


def test_lowering_prices_fused_operators_only_where_asked() -> None:
    step = _captured()

    def priced(*, fused: bool) -> list[Work]:
        return [op.work for op in lowered(step, views=False, fused=fused).ops if op.work]

    assert len(priced(fused=True)) == 3 < len(priced(fused=False))
    held = [{one.storage for one in op.allocates} for op in lowered(step, views=False, fused=True).ops]
    plain = [{one.storage for one in op.allocates} for op in lowered(step, views=False).ops]
    assert set().union(*held) == set().union(*plain)


def test_a_fused_loss_takes_its_backward_pass_along_and_leaves_the_rest() -> None:
    with fake_mode_with_symbols():
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)

        def body() -> dict[str, Tensor]:
            hidden = functional.silu(x) * 2
            with replace(current_step(), phase="loss").installed():
                total = torch.logsumexp(hidden.float() * 3, -1).sum()
            with replace(current_step(), phase="backward").installed():
                (gradient,) = torch.autograd.grad(total, [x])
            return {"gradient": gradient}

        step = capture(body, {"x": ("parameter", x)})
    plain = lowered(step, views=False).ops
    with replace(current_step(), fused=frozenset({"loss"})).installed():
        fused = lowered(step, views=False).ops

    def kernels(ops: tuple[Op, ...], phase: str) -> int:
        return sum(op.work is not None and op.phase == phase for op in ops)

    assert kernels(fused, "forward") == kernels(plain, "forward") == 2
    assert kernels(fused, "loss") == 1 < kernels(plain, "loss")
    assert kernels(fused, "backward") == 1 < kernels(plain, "backward")
