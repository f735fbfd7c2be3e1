"""Layout: a mesh with named axes and, for each dim of a tensor, the axes that split it."""

from hyper_parallel.layout.device_group import DeviceGroup
from hyper_parallel.layout.layout import Box, Layout
from hyper_parallel.layout.mesh import Fold, Mesh

__all__ = ["Box", "DeviceGroup", "Fold", "Layout", "Mesh"]
