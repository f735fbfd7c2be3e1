"""A mesh of ranks with named axes, and device groups, global ranks that form a mesh of their own: arithmetic only, no
process group and no torch.

Wherever an axis name is accepted, so are two other kinds of names: a **joint** ``"tensor_y*tensor_x"`` is several axes
taken as one, the first outermost; a **fold** is a named part of a joint, defined in the mesh.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy import EXPERT_SPANS, Strategy

Coordinate = Mapping[str, int]


@dataclass(frozen=True)
class Fold:
    """A part of the joint of the axes `over`: of index ``(joint index // stride) % size``.

    >>> Mesh(("shard", 4), ("tensor", 2), folds={"expert": Fold(("shard", "tensor"), 4)}).index("expert", {"shard": 3})
    2
    """

    over: tuple[str, ...]
    size: int
    stride: int = 1


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, outer to inner; rank r has the mixed-radix digits of r as its coordinate.

    >>> mesh = Mesh(("shard", 2), ("tensor", 4))
    >>> mesh.coordinate(5)
    {'shard': 1, 'tensor': 1}
    """

    axes: tuple[tuple[str, int], ...]
    folds: tuple[tuple[str, Fold], ...] = ()
    if TYPE_CHECKING:
        _fold: ClassVar[dict[str, Fold]]
        _size: ClassVar[dict[str, int]]

    def __init__(self, *axes: tuple[str, int], folds: Mapping[str, Fold] | None = None) -> None:
        names = [name for name, _ in axes]
        assert len(set(names)) == len(names), f"an axis stands twice in {names}"
        object.__setattr__(self, "axes", tuple((str(name), int(size)) for name, size in axes))
        object.__setattr__(self, "folds", tuple((folds or {}).items()))
        # Looked up far more often than a mesh is made; no part of its equality.
        object.__setattr__(self, "_fold", dict(self.folds))
        object.__setattr__(self, "_size", dict(self.axes) | {name: fold.size for name, fold in self.folds})
        for name, fold in self.folds:
            assert name not in names, f"the fold {name} has an axis's name"
            assert set(fold.over) <= set(names), f"the fold {name} over {fold.over}"
            whole = math.prod(self.size(axis) for axis in fold.over)
            assert whole % (fold.size * fold.stride) == 0, f"the fold {name}: {fold} of {whole}"

    @classmethod
    def of(cls, strategy: Strategy) -> Mesh:
        """The mesh that a Strategy declares, in its declared order; axes of degree 1 are kept.

        `expert` is the innermost part of shard · context · tensor, `expert_shard` the rest of it; of shard · context
        where a rule splits the experts' features over tensor. Raises StrategyError when it does not divide that.
        """
        axes = strategy.axes
        by_features = axes.expert > 1 and "expert_tensor" in strategy.rules.values()
        spans = ("shard", "context") if by_features else EXPERT_SPANS
        over = tuple(axis for axis in axes.order if axis in spans)
        whole = math.prod(axes.degree(axis) for axis in over)
        if whole % axes.expert:
            raise StrategyError(
                f"axes.expert is {axes.expert}, which does not divide shard · context = {whole}; with the rule "
                "expert_tensor the tensor axes split features, and experts are spread over the other two"
            )
        rest = whole // axes.expert
        folds = {"expert": Fold(over, axes.expert), "expert_shard": Fold(over, rest, axes.expert)}
        return cls(*((axis, axes.degree(axis)) for axis in axes.order), folds=folds)

    def folded(self, **folds: Fold) -> Mesh:
        """This mesh with additional or replaced folds."""
        return Mesh(*self.axes, folds={**dict(self.folds), **folds})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outer to inner."""
        return tuple(name for name, _ in self.axes)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    # Axes, joints and folds.

    def joint(self, *names: str) -> str:
        """The name of several axes taken as one, the first outermost; those of degree 1 are left out.

        >>> Mesh(("shard", 2), ("context", 2), ("tensor", 1)).joint("shard", "context", "tensor")
        'shard*context'
        """
        return "*".join(name for name in names if self.size(name) > 1) or names[-1]

    @property
    def storage(self) -> str:
        """The axes over which the storage of parameters is split, as one: shard and context, in rank order."""
        return self.joint(*(name for name in self.names if name in ("shard", "context")))

    @property
    def tensor(self) -> str:
        """The tensor axes as one, y outermost."""
        return self.joint("tensor_y", "tensor_x")

    def size(self, name: str) -> int:
        """The degree of an axis, joint or fold; 1 for an axis that the mesh does not have."""
        return self._size.get(name, 1) if "*" not in name else math.prod(map(self.size, name.split("*")))

    def index(self, name: str, coordinate: Coordinate) -> int:
        """The index along an axis, joint or fold at a coordinate, whose missing axes count as 0."""
        if "*" in name:
            return self._mixed(name.split("*"), coordinate)
        fold = self._fold.get(name)
        if fold is None:
            return coordinate.get(name, 0)
        return self._mixed(fold.over, coordinate) // fold.stride % fold.size

    def _mixed(self, names: tuple[str, ...] | list[str], coordinate: Coordinate) -> int:
        index = 0
        for name in names:
            index = index * self.size(name) + self.index(name, coordinate)
        return index

    def atoms(self, name: str) -> tuple[str, ...]:
        """The atomic axes of an axis, joint or fold."""
        if "*" in name:
            return tuple(atom for part in name.split("*") for atom in self.atoms(part))
        fold = self._fold.get(name)
        return fold.over if fold else (name,)

    # Ranks.

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name to index for one rank, 0 ≤ rank < world. On a mesh of one rank every process is that rank."""
        if self.world == 1:
            return dict.fromkeys(self.names, 0)
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        coordinate: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        return dict(reversed(coordinate.items()))

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate; axes that it leaves out count as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def peers(self, rank: int, axes: tuple[str, ...]) -> Iterator[int]:
        """The ranks that differ from `rank` along `axes` only, itself included, in order of those axes."""
        here = self.coordinate(rank)
        for indices in itertools.product(*(range(self.size(axis)) for axis in axes)):
            yield self.rank({**here, **dict(zip(axes, indices, strict=True))})

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that an axis, joint or fold makes, each in ascending order of rank.

        >>> Mesh(("shard", 2), ("tensor", 2)).groups("shard")
        ((0, 2), (1, 3))
        """
        return _groups(self, name)

    def __hash__(self) -> int:
        return hash((self.axes, self.folds))


@functools.lru_cache(maxsize=256)
def _groups(mesh: Mesh, name: str) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ only in the index along `name` form a group."""
    atoms = mesh.atoms(name)
    fold = mesh._fold.get(name)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        here = mesh.coordinate(rank)
        key = [index for axis, index in here.items() if axis not in atoms]
        if fold is not None:
            joint = mesh._mixed(fold.over, here)
            key += [joint % fold.stride, joint // (fold.stride * fold.size)]
        elif "*" in name:
            # The parts of a joint may be folds of the same axes: the remaining indices distinguish groups.
            key += _left(mesh, name, here)
        groups.setdefault(tuple(key), []).append(rank)
    return tuple(tuple(ranks) for ranks in sorted(groups.values()))


def _left(mesh: Mesh, name: str, here: Coordinate) -> list[int]:
    left: list[int] = []
    by_over: dict[tuple[str, ...], list[Fold]] = {}
    for part in name.split("*"):
        fold = mesh._fold.get(part)
        if fold is not None:
            by_over.setdefault(fold.over, []).append(fold)
    for over, folds in by_over.items():
        joint, at = mesh._mixed(over, here), 1
        for fold in sorted(folds, key=lambda fold: fold.stride):
            left.append(joint // at % (fold.stride // at))
            at = fold.stride * fold.size
        left.append(joint // at)
    return left


# A device group: global ranks that form a mesh of their own.
#
# Coordinates are local to the group: the rank at place p of `ranks` is at the coordinate of p in `mesh`. Training with
# one mesh has one group, of all ranks, in which place and rank are the same number. Stages of a pipeline are groups.


@dataclass(frozen=True)
class DeviceGroup:
    """Global ranks and their mesh.

    >>> DeviceGroup(Mesh(("shard", 2), ("tensor_x", 2)), range(4, 8), "stage 1").groups("shard")
    ((4, 6), (5, 7))
    """

    mesh: Mesh
    ranks: Sequence[int]
    """Global ranks, one for each place of the mesh."""
    name: str = "all ranks"

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks):
            raise StrategyError(f"device group {self.name!r} names a rank twice: {tuple(self.ranks)}")
        if len(self.ranks) != self.mesh.world:
            raise StrategyError(
                f"device group {self.name!r} has {len(self.ranks)} ranks, and its axes multiply to {self.mesh.world}"
            )

    @classmethod
    def of_all_ranks(cls, mesh: Mesh) -> DeviceGroup:
        """The group of a run that has one mesh."""
        return cls(mesh, range(mesh.world))

    @classmethod
    def of_pipeline(cls, strategy: Strategy) -> tuple[DeviceGroup, ...]:
        """The device groups of a strategy's pipeline, in its order, each with the mesh of one stage.

        >>> DeviceGroup.of_pipeline(Strategy(axes={"pipeline": 2, "shard": 2}))[1].ranks
        (2, 3)
        """
        axes, mesh = strategy.axes, Mesh.of(strategy)
        order = [(axis, axes.degree(axis)) for axis in axes.order]
        order.insert(axes.outside, ("pipeline", axes.pipeline))
        found: list[list[int]] = [[] for _ in range(axes.pipeline)]
        for rank in range(axes.world):
            found[Mesh(*order).coordinate(rank)["pipeline"]].append(rank)
        return tuple(cls(mesh, tuple(ranks), f"pipeline rank {place}") for place, ranks in enumerate(found))

    @classmethod
    def of_submodels(cls, strategies: Mapping[str, Strategy]) -> tuple[DeviceGroup, ...]:
        """The device groups of submodels, by name, one after the other; of one with a pipeline a group for each of its
        places.

        >>> DeviceGroup.of_submodels({"vision": Strategy(), "language": Strategy(axes={"tensor": 2})})[1].ranks
        (1, 2)
        """
        found, first = list[DeviceGroup](), 0
        for name, strategy in strategies.items():
            groups = cls.of_pipeline(strategy)
            for place, group in enumerate(groups):
                ranks = tuple(first + rank for rank in group.ranks)
                found.append(cls(group.mesh, ranks, f"{name} {place}" if len(groups) > 1 else name))
            first += strategy.axes.world
        return tuple(found)

    def place(self, rank: int) -> int:
        """The place of a global rank in the mesh. In a group of one every process is that rank."""
        if self.mesh.world == 1:
            return 0
        assert rank in self.ranks, f"rank {rank} is not one of {tuple(self.ranks)}"
        return self.ranks.index(rank)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name to index of a global rank of the group."""
        return self.mesh.coordinate(self.place(rank))

    def index(self, name: str, rank: int) -> int:
        """The index of a global rank along an axis, joint or fold."""
        return self.mesh.index(name, self.coordinate(rank))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The sets of global ranks that an axis, joint or fold makes, each in the order of the mesh."""
        return tuple(tuple(self.ranks[place] for place in places) for places in self.mesh.groups(name))
