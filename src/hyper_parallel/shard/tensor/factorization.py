"""Factorization of an MLP's products over tensor_x and tensor_y by bytes moved, and the types of the 2D plan.

P = x · y ranks. The residual is [T/y, h/x] between blocks. A tensor of w features, spread over all ranks, is T·w/P
elements on each; gathering it over n ranks, or summing and scattering over them, makes each receive (n − 1)·T·w/P.
In units of T/P elements received by each device, forward, with e the features between the projections of an MLP (m
projections lead there: 2 with a gate, else 1):

| step | collective | cost |
|---|---|---|
| input of gate, up | all-gather over y′ | (y′ − 1)·h |
| gate, up | reduce-scatter over x′ | (x′ − 1)·m·e |
| input of down | all-gather over x″ | (x″ − 1)·e |
| output of down | reduce-scatter over y″ | (y″ − 1)·h |

The backward pass costs the same, and the two gathers once more where they are not kept. The attention's factorisation
is the declared one; docs/tensor2d.md has its costs. x′ divides x″, which divides x: then the
residual stays as it is and the gathers go over y and the digits of x that x′ leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from hyper_parallel.layout.mesh import Fold, Mesh
from hyper_parallel.shard.model_structure import Heads
from hyper_parallel.shard.tensor.norm import Formula

Gathered = Literal["keep", "mlp", "again"]
"""Which gathered inputs the backward pass finds kept: all, those of gate and up, or none."""


@dataclass(frozen=True)
class MlpShape:
    """The shape of one MLP: h and e in features, and how many projections lead to e."""

    hidden: int
    between: int
    leading: int = 2


@dataclass(frozen=True)
class MlpFactors:
    """x′ and x″; y′ = P / x′ and y″ = P / x″."""

    up: int
    down: int


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def mlp_cost(shape: MlpShape, x: int, y: int, factors: MlpFactors, gathered: Gathered = "keep") -> Fraction:
    """Elements that each device receives for one MLP, forward and backward, in units of T/P."""
    ranks, e = x * y, shape.between
    gather_in = Fraction((ranks // factors.up - 1) * shape.hidden)
    gather_between = Fraction((factors.down - 1) * e)
    scatters = (factors.up - 1) * shape.leading * e + (ranks // factors.down - 1) * shape.hidden
    again = (gather_in if gathered == "again" else 0) + (gather_between if gathered != "keep" else 0)
    return 2 * (gather_in + gather_between + scatters) + again


def choose_mlp(
    hidden: int, between: int, leading: int, x: int, y: int, gathered: Gathered = "keep"
) -> MlpFactors:
    """The cheapest x′ and x″; of equal ones the smallest, which moves fewer tensors.

    A factor other than 1 splits features further, so it must divide them; with x′ = x″ = 1 anything goes.
    """
    shape = MlpShape(hidden, between, leading)
    return min(
        (
            MlpFactors(up, down)
            for down in divisors(x)
            for up in divisors(down)
            if down == 1 or between % (x * y // up) == 0
        ),
        key=lambda factors: (mlp_cost(shape, x, y, factors, gathered), factors.down, factors.up),
    )


SEQUENCE, FEATURES = 1, -1
"""The split dims of activations [batch, sequence, features]."""


def digit(size: int, stride: int) -> str:
    """The name of a digit of tensor_x: the fold of `size` whose index is ``tensor_x // stride % size``."""
    return f"tensor_x_{size}_{stride}"


def with_digits(mesh: Mesh) -> Mesh:
    """The mesh with every digit that a factorisation may need; those of degree above 1 and below
    tensor_x. Without 2D none is needed."""
    if mesh.size("tensor_y") == 1:
        return mesh
    x = mesh.size("tensor_x")
    digits = {
        digit(size, stride): Fold(("tensor_x",), size, stride)
        for stride in range(1, x)
        for size in range(2, x)
        if x % (size * stride) == 0
    }
    return mesh.folded(**digits)


def part_of_x(mesh: Mesh, size: int, stride: int) -> str:
    """The axis or fold of tensor_x of this size and stride; one that is tensor_x itself has its name."""
    return "tensor_x" if size == mesh.size("tensor_x") else digit(size, stride)


@dataclass(frozen=True)
class Attention:
    """An attention whose heads lie over tensor_y (outer) and tensor_x, and whose input and output are [T/y, h/x]."""

    heads: Heads
    colwise: Mapping[str, tuple[int, ...]]
    """Projection to q, k, v, or all in one → the features of its parts on each rank of tensor_y, in order."""
    shares: Mapping[str, tuple[bool, ...]]
    """The same projections → whether ranks of tensor_x share a head of the part."""
    sharing: int
    """How many neighbouring ranks of tensor_x share a key-value head."""
    rowwise: str
    keeps: bool
    """Gathered inputs are kept for the backward pass."""


class MlpAxes(NamedTuple):
    """Names of the axes and folds that an MLP is split over; those of size 1 name nothing."""

    hidden_in: str
    """x′: the input features of the first weights."""
    k: str
    r: str
    features: str
    """y′: the features between."""
    features_in: str
    """y″: the input features of the last weight."""
    hidden_out: str
    """x″: the output features of the last weight."""


@dataclass(frozen=True)
class Mlp:
    """An MLP: its first products on (x′, y′), the last on (x″, y″). tensor_x has the digits x′, k, r, outer to inner,
    with x″ = x′·k; y′ = (y, r, k) and y″ = (y, r)."""

    factors: MlpFactors
    between: int
    """Features between the products, over all ranks."""
    colwise: tuple[str, ...]
    rowwise: str
    keeps: bool
    """The gathered input of the first products is kept for the backward pass."""
    keeps_between: bool
    """So is that of the last."""

    def axes(self, mesh: Mesh) -> MlpAxes:
        """The axes that split its weights and activations."""
        up, down = self.factors.up, self.factors.down
        rest = mesh.size("tensor_x") // down
        k, r = part_of_x(mesh, down // up, rest), part_of_x(mesh, rest, 1)
        return MlpAxes(
            hidden_in=part_of_x(mesh, up, mesh.size("tensor_x") // up),
            k=k,
            r=r,
            features=mesh.joint("tensor_y", r, k),
            features_in=mesh.joint("tensor_y", r),
            hidden_out=part_of_x(mesh, down, rest),
        )


@dataclass(frozen=True)
class Tensor2D:
    """The plan of 2D inside the layers. Names are those of ``named_modules``."""

    attentions: Mapping[str, Attention] = field(default_factory=dict)
    mlps: Mapping[str, Mlp] = field(default_factory=dict)
    norms: Mapping[str, Formula] = field(default_factory=dict)
    """Norms of the residual, whose features are split: name to how it is computed."""
    swapped: tuple[str, ...] = ()
    """Regions that 2D does not know: they are entered with the sequence split over all ranks."""
    hidden: int = 0
    """Features of the residual, over all ranks of tensor_x."""
