"""Layout: a mesh with named axes and, for each dim of a tensor, the axes that split it."""

from hyper_parallel.layout.layout import Box, Layout
from hyper_parallel.layout.mesh import DeviceGroup, Fold, Mesh

__all__ = ["Box", "DeviceGroup", "Fold", "Layout", "Mesh"]
