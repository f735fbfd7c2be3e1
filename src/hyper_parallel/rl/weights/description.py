"""Description of a role's parameters: names, layouts, element types and ranks, as plain data without torch.

A role's workers make it (`rl.weights.transfer`), the controller passes it on as JSON, and both sides plan with
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.layout import DeviceGroup, Fold, Layout, Mesh

FLOATING = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by dtype; these can become each other."""
WHOLE = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""As `FLOATING`; each only travels as itself."""
ITEM_BYTES = {**FLOATING, **WHOLE}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a role's model."""

    name: str
    layout: Layout
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    """The ranks of the role that hold it, in the order of the layout's mesh; several groups where stages of a pipeline
    share it."""

    def device_groups(self, role: str, first: int) -> tuple[DeviceGroup, ...]:
        """Its groups, where the role's rank 0 is the rank `first`."""
        return tuple(
            DeviceGroup(self.layout.mesh, tuple(first + rank for rank in ranks), role)
            for ranks in self.groups
        )


@dataclass(frozen=True, kw_only=True)
class Description:
    """All parameters of a role's model, each once."""

    role: str
    world: int
    """The role's ranks, 0 ≤ rank < world."""
    parameters: tuple[Parameter, ...]
    """In the model's order."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other names of parameters to the name in `parameters`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        meshes = list(dict.fromkeys(p.layout.mesh for p in self.parameters))
        number = {mesh: at for at, mesh in enumerate(meshes)}
        return {
            "role": self.role,
            "world": self.world,
            "meshes": [
                {
                    "axes": [list(axis) for axis in mesh.axes],
                    "folds": {name: [list(f.over), f.size, f.stride] for name, f in mesh.folds},
                }
                for mesh in meshes
            ],
            "parameters": [
                [p.name, str(p.layout), p.dtype, number[p.layout.mesh], [list(ranks) for ranks in p.groups]]
                for p in self.parameters
            ],
            "ties": dict(self.ties),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Description:
        """The inverse of `to_json`."""
        meshes = [
            Mesh(
                *((name, size) for name, size in one["axes"]),
                folds={
                    name: Fold(tuple(over), size, stride)
                    for name, (over, size, stride) in one["folds"].items()
                },
            )
            for one in data["meshes"]
        ]
        parameters = tuple(
            Parameter(
                name=name,
                layout=Layout.parse(layout, meshes[mesh]),
                dtype=dtype,
                groups=tuple(tuple(ranks) for ranks in groups),
            )
            for name, layout, dtype, mesh, groups in data["parameters"]
        )
        return cls(role=data["role"], world=data["world"], parameters=parameters, ties=dict(data["ties"]))
