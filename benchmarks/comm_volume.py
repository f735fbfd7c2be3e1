"""Bytes that collectives move for one transformer layer, forward and backward: 2D tensor parallelism against 1D.

    python benchmarks/comm_volume.py

Unmodified Transformers layers of real shapes are parallelized on a fake process group and run on the meta device, and
every collective is counted as it passes the dispatcher. One layer is the difference between a model of two layers and
one of one, which leaves out what is done once a model. All-gathers and reduce-scatters carry activations; they are
laid beside the closed forms (`harness.tensor_costs`) and must equal them. All-reduces carry the
norms' statistics and the gradients of weights that several ranks compute with, shown apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from commandline import run
from pages import Benchmark
from shapes import llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from harness.tensor_costs import Shape, attention_cost, choose_attention, one_axis_cost
from hyper_parallel.compat.collectives import counting
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.shard.tensor.factorization import Gathered, MlpFactors, choose_mlp, mlp_cost

BENCHMARK = Benchmark("comm_volume")
MODELS = {
    "Llama-3-70B": Shape(hidden=8192, query=64 * 128, kv=8 * 128, head=128, between=28672),
    "Llama-3.1-405B": Shape(hidden=16384, query=128 * 128, kv=8 * 128, head=128, between=53248),
}
DEGREES = (4, 8, 16, 32, 64)
TREATMENTS: tuple[Gathered, ...] = ("keep", "mlp", "again")
TOKENS = 8192
WIDTH = torch.bfloat16.itemsize


class LayoutCopies(TorchDispatchMode):
    """Counts operators that write a tensor anew in another order or place; casts are none."""

    OPERATORS = frozenset({"clone", "cat", "stack", "copy_", "_to_copy", "index_select"})

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.OPERATORS:
            source = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            if out.dtype == source.dtype:
                self.copies += 1
                self.elements += out.numel()
        return out


def step_of(shape: Shape, layers: int, strategy: hp.Strategy, rows: int, tokens: int) -> Callable[[], None]:
    """The forward and backward pass of parallelized decoder layers on [rows, tokens, h], on the meta device."""
    sizes = {"inner": shape.between, "kv": shape.kv // shape.head, "head_dim": shape.head}
    fields = llama(shape.hidden, layers, shape.query // shape.head, vocabulary=256, positions=2048, **sizes)
    config = LlamaConfig(**fields, attn_implementation="sdpa", dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    hp.parallelize(model, strategy, lowering="traceable")
    given = torch.zeros(rows, tokens, shape.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    positions = model.model.rotary_emb(given, torch.zeros(1, tokens, dtype=torch.int64, device="meta"))

    def step() -> None:
        out = given
        for layer in model.model.layers:
            out = layer(out, position_embeddings=positions, attention_mask=None)
        out.sum().backward()

    return step


def one_layer(count: Callable[[int], Mapping[str, int]]) -> dict[str, int]:
    """What one layer more adds to the counts of so many layers."""
    one, two = count(1), count(2)
    return {key: two[key] - one[key] for key in one}


def count_copies(shape: Shape, strategy: hp.Strategy, rows: int, layers: int) -> dict[str, int]:
    """Layout copies that layers make on a device, and their elements: the model's own ones included."""
    with fake_ranks(strategy.axes.world, 0):
        step = step_of(shape, layers, strategy, rows, TOKENS)
        with LayoutCopies() as mode:
            step()
    return {"copies": mode.copies, "elements": mode.elements}


def count_moved(shape: Shape, strategy: hp.Strategy, tokens: int, layers: int) -> dict[str, int]:
    """What layers move, the model's first split and last gather included."""
    with fake_ranks(strategy.axes.world, 0):
        step = step_of(shape, layers, strategy, 1, tokens)
        with counting() as counted:
            step()
    assert {c.kind for c in counted} <= {"all_reduce", "all_gather", "reduce_scatter"}
    # Statistics are summed over tensor_x, the innermost axis; weights' gradients over tensor_y, or over both.
    over_x = tuple(range(strategy.axes.tensor_x)) if strategy.axes.tensor_y > 1 else None
    reduced = [c for c in counted if c.kind == "all_reduce"]
    return {
        "activations": sum(c.bytes_received for c in counted if c.kind != "all_reduce"),
        "statistics": sum(c.bytes_received for c in reduced if c.ranks == over_x),
        "weight_gradients": sum(c.bytes_received for c in reduced if c.ranks != over_x),
    }


def strategy_of(ranks: int, gathered: Gathered, y: int = 1) -> hp.Strategy:
    """1D with the sequence split for y = 1, else 2D."""
    axes = {"tensor_y": y, "tensor_x": ranks // y}
    return hp.Strategy(
        axes=axes,
        sequence=True,
        memory={"gathered": gathered},
        precision={"param": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"},
    )


def in_bytes(cost: Fraction, ranks: int, tokens: int) -> int:
    """A closed form, which counts elements in units of T / P, in bytes."""
    exact = cost * tokens * WIDTH / ranks
    assert exact.denominator == 1, exact
    return int(exact)


def kept(shape: Shape, x: int, y: int, factors: MlpFactors, gathered: Gathered) -> float:
    """Elements that the backward pass finds gathered beyond the shards that any treatment saves, in units of T·h."""
    ranks, h, e = x * y, shape.hidden, shape.between
    attention = (y - 1) * h + (x - 1) * shape.query
    up, down = (ranks // factors.up - 1) * h, (factors.down - 1) * e
    elements = {"keep": attention + up + down, "mlp": up, "again": 0}[gathered]
    return elements / (ranks * h)


def row(model: str, ranks: int, gathered: Gathered, tokens: int = TOKENS) -> dict[str, Any]:
    """One model at one degree, with one treatment of gathered inputs in both 1D and 2D: what is measured, which must
    equal the closed forms for activations, what the backward pass finds gathered beyond the shards, in T·h elements a
    layer, and 2D over 1D, less 1, with the same treatment and where 1D gathers again."""
    shape = MODELS[model]
    x, y = choose_attention(shape, ranks, gathered)
    factors = choose_mlp(shape.hidden, shape.between, shape.leading, x, y, gathered)
    one, two = (
        one_layer(partial(count_moved, shape, strategy_of(ranks, gathered, degree), tokens))
        for degree in (1, y)
    )
    # In 1D `mlp` keeps the MLP's input and gathers the attention's again.
    attention: Gathered = "keep" if gathered == "keep" else "again"
    mlp: Gathered = "again" if gathered == "again" else "keep"
    of_one = one_axis_cost(shape, ranks, attention) + one_axis_cost(shape, ranks, mlp)
    of_two = attention_cost(shape, x, y, gathered) + mlp_cost(shape, x, y, factors, gathered)
    again = in_bytes(2 * one_axis_cost(shape, ranks, "again"), ranks, tokens)
    return {
        "model": model,
        "ranks": ranks,
        "gathered": gathered,
        "y": y,
        "x": x,
        "x_up": factors.up,
        "x_down": factors.down,
        "one": one,
        "one_closed": in_bytes(of_one, ranks, tokens),
        "two": two,
        "two_closed": in_bytes(of_two, ranks, tokens),
        "two_kept_elements": kept(shape, x, y, factors, gathered),
        "against_equal": two["activations"] / one["activations"] - 1,
        "against_again": two["activations"] / again - 1,
    }


def copies_of(model: str, ranks: int, rows: int) -> dict[str, Any]:
    """Layout copies of one layer, 1D and 2D, gathered inputs kept."""
    shape = MODELS[model]
    _, y = choose_attention(shape, ranks)
    return {
        "model": model,
        "ranks": ranks,
        "rows": rows,
        "one": one_layer(partial(count_copies, shape, strategy_of(ranks, "keep"), rows)),
        "two": one_layer(partial(count_copies, shape, strategy_of(ranks, "keep", y), rows)),
    }


def main() -> None:
    rows = [row(model, ranks, gathered) for model in MODELS for ranks in DEGREES for gathered in TREATMENTS]
    copies = [copies_of("Llama-3-70B", ranks, batch) for ranks in DEGREES for batch in (1, 2)]
    print(*rows, *copies, sep="\n")
    BENCHMARK.keep(
        {
            "unit": "bytes received by each device for one layer, forward and backward",
            "tokens": TOKENS,
            "dtype": "bfloat16",
            "measured_on": "a fake process group and the meta device: collectives counted, nothing sent",
            "rows": rows,
            "layout_copies": copies,
        }
    )
    for r in rows:
        assert r["one"]["activations"] == r["one_closed"], r
        assert r["two"]["activations"] == r["two_closed"], r


if __name__ == "__main__":
    run(main)
