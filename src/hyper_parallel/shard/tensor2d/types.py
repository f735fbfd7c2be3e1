"""Types of the 2D plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.layout.mesh import Fold, Mesh
from hyper_parallel.shard.model_structure import Heads
from hyper_parallel.shard.tensor2d.factorization import MlpFactors
from hyper_parallel.shard.tensor2d.norm import Formula

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

    def digits(self, mesh: Mesh) -> tuple[str, str, str]:
        """Names of x′, k and r; those of size 1 name nothing."""
        x = mesh.size("tensor_x")
        k = self.factors.down // self.factors.up
        r = x // self.factors.down
        return (
            part_of_x(mesh, self.factors.up, k * r),
            part_of_x(mesh, k, r),
            part_of_x(mesh, r, 1),
        )

    def hidden_in(self, mesh: Mesh) -> str:
        """What splits the input features of the first weights: x′."""
        return self.digits(mesh)[0]

    def features(self, mesh: Mesh) -> str:
        """What splits the features between: y′."""
        _, k, r = self.digits(mesh)
        return mesh.joint("tensor_y", r, k)

    def features_in(self, mesh: Mesh) -> str:
        """What splits the input features of the last weight: y″."""
        _, _, r = self.digits(mesh)
        return mesh.joint("tensor_y", r)

    def hidden_out(self, mesh: Mesh) -> str:
        """What splits the output features of the last weight: x″."""
        return part_of_x(mesh, self.factors.down, mesh.size("tensor_x") // self.factors.down)


@dataclass(frozen=True)
class Tensor2D:
    """What 2D does inside the layers. Names are those of ``named_modules``."""

    attentions: Mapping[str, Attention] = field(default_factory=dict)
    mlps: Mapping[str, Mlp] = field(default_factory=dict)
    norms: Mapping[str, Formula] = field(default_factory=dict)
    """Norms of the residual, whose features are split: name to how it is computed."""
    swapped: tuple[str, ...] = ()
    """Regions that 2D does not know: they are entered with the sequence split over all ranks."""
    hidden: int = 0
    """Features of the residual, over all ranks of tensor_x."""
