"""Closed forms of what tensor parallelism moves in a layer: of its attention under 2D, and of 1D.

In units of T/P elements received by each device, forward and backward, with the names of
`hyper_parallel.shard.tensor.factorization`, and H and K the features of all query and all key-value heads:

| step | collective | cost, forward |
|---|---|---|
| input of q, k, v | all-gather over y | (y − 1)·h |
| q, k, v | reduce-scatter over x along heads | (x − 1)·(H + 2K), `shared_heads` where ranks share heads |
| input of o | all-gather over x | (x − 1)·H |
| output of o | reduce-scatter over y | (y − 1)·h |

One axis over all P with the sequence split (arXiv 2205.05198) costs 2(P − 1)·h a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hyper_parallel.shard.tensor.factorization import Gathered, MlpShape, choose_mlp, divisors, mlp_cost


@dataclass(frozen=True, kw_only=True)
class Shape(MlpShape):
    """Of one layer, in features: its MLP's, and H, K and one head."""

    query: int
    kv: int
    head: int


def shared_heads(shape: Shape, x: int, y: int) -> Fraction:
    """Cost of k and v together, in T/P elements: summed over x, then put together by the ranks that share a head."""
    here = max(shape.kv // shape.head // y, 1)
    sharing = x // here if x > here else 1
    together = Fraction(sharing - 1, sharing) * shape.head * x * y
    return 2 * ((x - 1) * y * here * shape.head + together)


def attention_cost(shape: Shape, x: int, y: int, gathered: Gathered = "keep") -> Fraction:
    """Elements that each device receives for one attention, forward and backward, in units of T/P."""
    gathers = Fraction((y - 1) * shape.hidden + (x - 1) * shape.query)
    scatters = (x - 1) * shape.query + shared_heads(shape, x, y) + (y - 1) * shape.hidden
    return 2 * (gathers + scatters) + (0 if gathered == "keep" else gathers)


def one_axis_cost(shape: MlpShape, ranks: int, gathered: Gathered = "keep") -> Fraction:
    """What one block (attention or MLP) costs with all ranks on one axis and the sequence split."""
    times = 4 if gathered == "keep" else 5
    return Fraction(times * (ranks - 1) * shape.hidden)


def choose_attention(shape: Shape, ranks: int, gathered: Gathered = "keep") -> tuple[int, int]:
    """(x, y) whose layer is cheapest, each MLP product with its own factors: what to declare for `ranks`.

    y is at most the number of key-value heads, so that no head is split over it.
    """

    def cost(x: int) -> tuple[Fraction, int]:
        y = ranks // x
        mlp = choose_mlp(shape.hidden, shape.between, shape.leading, x, y, gathered)
        return attention_cost(shape, x, y, gathered) + mlp_cost(shape, x, y, mlp, gathered), x

    heads = shape.kv // shape.head
    x = min((x for x in divisors(ranks) if ranks // x <= heads and heads % (ranks // x) == 0), key=cost)
    return x, ranks // x
