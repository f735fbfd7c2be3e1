"""FLOPs against PyTorch's own counter, bytes against what a person counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import CollectiveGroup, StepGraph, capture, costs
from hyper_parallel.workload.work import Work


def _graph(step: Callable[..., Tensor | None], *given: Tensor) -> StepGraph:
    """A function of tensors as a graph."""
    mode = fake_mode_with_symbols()
    with mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)
            for x in given
        ]

        def body() -> dict[str, Tensor]:
            result = step(*fakes)
            return {} if result is None else {"result": result}

        return capture(body, {f"x{i}": ("input", x) for i, x in enumerate(fakes)})


def _works(step: Callable[..., Tensor | None], *given: Tensor) -> list[Work]:
    """Of all nodes that are no views."""
    found = [work for work in costs(_graph(step, *given)).values() if isinstance(work, Work)]
    return [work for work in found if work.kind != "view"]


def _work(step: Callable[..., Tensor | None], *given: Tensor) -> Work:
    (work,) = _works(step, *given)
    return work


SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaForCausalLM(
            LlamaConfig(**SMALL, hidden_size=32, intermediate_size=48, num_key_value_heads=2)
        ),
        lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=32, n_positions=64)),
    ],
    ids=["llama", "gpt2"],
)
def test_matrix_flops_are_those_of_pytorchs_counter(make: Callable[[], torch.nn.Module]) -> None:
    model = make()
    ids = torch.zeros(2, 16, dtype=torch.int64)

    def step() -> dict[str, Tensor]:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return {str(at): gradient for at, gradient in enumerate(gradients)}

    with FlopCounterMode(display=False) as counter:
        step()
    expected = sum(
        count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operator)
    )
    mode = fake_mode_with_symbols()
    with mode, torch.device("cpu"):
        model, ids = make(), torch.zeros(2, 16, dtype=torch.int64)
    with mode:
        tensors = {name: ("parameter", tensor) for name, tensor in model.named_parameters()}
        tensors |= {name: ("buffer", tensor) for name, tensor in model.named_buffers()}
        graph = capture(step, {**tensors, "ids": ("input", ids)}, model)
    found = [work for work in costs(graph).values() if isinstance(work, Work)]
    assert sum(work.flops for work in found if work.kind == "matmul") == expected
    # Attention is seen whichever way it is computed.
    assert {work.shape[-1] for work in found if work.kind == "attention"} <= {8}


def test_the_two_products_of_a_linear_layer_and_how_their_matrices_lie() -> None:
    x, w = torch.empty(5, 4), torch.empty(3, 4)
    forward = _work(lambda x, w: functional.linear(x, w), x, w)
    assert (forward.shape, forward.flops, forward.layout) == ((1, 5, 3, 4), 120.0, "nt")
    assert (forward.read, forward.written, forward.fresh) == (4 * (20 + 12), 4 * 15, 4 * 15)
    weight = _work(lambda g, x: g.t() @ x, torch.empty(5, 3), x)
    assert (weight.shape, weight.layout) == ((1, 3, 4, 5), "tn")


def test_causal_attention_does_half_of_the_work_and_its_backward_pass_five_halves_more() -> None:
    q = torch.empty(2, 4, 16, 8, requires_grad=True)

    def attend(q: Tensor, causal: bool) -> Tensor:
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
        return torch.autograd.grad(out, q, torch.empty_like(out))[0]

    full, half = (
        [work for work in _works(lambda q, causal=causal: attend(q, causal), q) if work.kind == "attention"]
        for causal in (False, True)
    )
    assert [work.flops for work in full] == [4 * 2 * 4 * 16 * 16 * 8, 10 * 2 * 4 * 16 * 16 * 8]
    assert [work.flops for work in half] == [work.flops / 2 for work in full]
    assert [work.layout for work in half] == ["forward causal", "backward causal"]


def test_bytes() -> None:
    x, table = torch.empty(8, 6), torch.empty(1000, 6)
    rows = torch.zeros(5, dtype=torch.int64)
    added = _work(lambda x: x + x, x)
    assert (added.read, added.written) == (192, 192)
    scaled = _work(lambda x: x.mul_(2.0), x)
    assert (scaled.read, scaled.written, scaled.fresh) == (192, 192, 0)
    broadcast = _work(lambda x, row: x + row.expand(8, 6), x, torch.empty(6))
    assert (broadcast.read, broadcast.written) == (192 + 24, 192)
    looked_up = _work(lambda t, i: functional.embedding(i, t), table, rows)
    assert (looked_up.kind, looked_up.read, looked_up.written) == ("copy", 40 + 120, 120)
    put = _work(lambda t, i, v: t.index_add_(0, i, v), table, rows, torch.empty(5, 6))
    assert (put.read, put.written) == (40 + 120 + 120, 120)
    made = _work(lambda x: torch.zeros_like(x), x)
    assert (made.read, made.written) == (0, 192)
    copied = _work(lambda a, b: a.copy_(b), x, x.half())
    assert (copied.read, copied.written) == (96, 192)
    joined = _work(lambda a, b: torch.cat([a, b]), x, x)
    assert (joined.kind, joined.read, joined.written) == ("copy", 384, 384)


def test_views_cost_nothing_and_are_told_apart_from_copies() -> None:
    found = costs(
        _graph(lambda x: x.t().reshape(2, -1, 4).transpose(0, 1)[0].contiguous(), torch.empty(8, 6))
    )
    kinds = [work.kind for work in found.values() if isinstance(work, Work)]
    assert kinds.count("copy") == 1 + 1  # the reshape of a transposed tensor, and `contiguous`
    assert all(work.read == work.written == 0 for work in found.values() if work.kind == "view")


def test_what_jumps_through_memory_is_strided() -> None:
    x = torch.empty(64, 64)
    assert _work(lambda x: x.t().contiguous(), x).layout == "strided"
    assert _work(lambda x: x.clone(), x).layout == ""
    assert _work(lambda x: x.sum(0), x).layout == "strided"
    assert _work(lambda x: x.sum(1), x).layout == ""
    # Whole rows of another tensor are as good as a tensor of their own.
    assert _work(lambda x: x[:, :32] * 2, x).layout == ""
    assert _work(lambda x: x[:, :8] * 2, x).layout == "strided"


def test_a_function_computed_in_another_way_is_told_apart() -> None:
    x = torch.empty(64, 64)
    assert _work(lambda x: functional.gelu(x, approximate="tanh"), x).layout == "tanh"
    assert _work(lambda x: functional.gelu(x), x).layout == ""


def test_the_update_reads_four_tensors_and_writes_three() -> None:
    p, g, m, v = (torch.empty(10) for _ in range(4))
    count = torch.zeros(())
    options = {"amsgrad": False, "maximize": False, "lr": 0.1, "eps": 1e-8, "weight_decay": 0.0}
    work = _work(
        lambda *x: torch._fused_adamw_(*([t] for t in x[:4]), [], [x[4]], beta1=0.9, beta2=0.99, **options),
        p,
        g,
        m,
        v,
        count,
    )
    assert (work.kind, work.read, work.written) == ("optimizer", 160 + 4, 120)


def test_sizes_that_the_data_decide_are_given() -> None:
    def step(n: Tensor) -> Tensor:
        return torch.ones(n.item(), 4) * 2

    graph = _graph(step, torch.zeros((), dtype=torch.int64))
    with pytest.raises(KeyError):
        costs(graph)
    found = [work for work in costs(graph, dict.fromkeys(graph.sizes, 3)).values() if isinstance(work, Work)]
    assert [work.written for work in found if work.kind == "elementwise"] == [3 * 4 * 4]


def test_a_collective_gives_its_input_to_the_ranks_of_its_group() -> None:
    from hyper_parallel.compat import collectives
    from hyper_parallel.compat.fake_tensors import fake_ranks

    with fake_ranks(4, 0):
        name = torch.distributed.group.WORLD.group_name
        graph = _graph(lambda x: collectives.all_gather(x, name, 4), torch.empty(8, 6))
    with pytest.raises(CaptureError, match="was not told"):
        costs(graph)
    graph.groups = {name: CollectiveGroup(name, "shard", (0, 1, 2, 3))}
    (call,) = costs(graph).values()
    assert (call.kind, call.ranks, call.bytes, call.axis) == ("all_gather", (0, 1, 2, 3), 192, "shard")


def test_what_is_priced_once_for_all_alike_is_what_each_costs_alone() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        # Equal numbers of other types, other shapes, strides and dtypes, and memory that is the same or is not.
        parts = [
            x + x,
            x + y,
            x + x.clone(),
            x.t() + y.t(),
            x.bfloat16() * 2,
            x * 2,
            x * 2.0,
            x[:2] * 2,
            x.mul_(y),
        ]
        return sum((part.float().sum() for part in parts), x @ y + y @ x.t()).sum()

    graph = _graph(step, torch.randn(4, 4), torch.randn(4, 4))
    together = costs(graph)
    assert together == {node: cost for node in graph.nodes for cost in costs(graph, nodes=[node]).values()}
    adds = [work for work in together.values() if isinstance(work, Work) and "add" in work.op]
    assert len({work.read for work in adds}) > 1
