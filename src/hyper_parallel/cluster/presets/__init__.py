"""Published machines by name."""

from hyper_parallel.cluster.presets.names import named, names, preset

__all__ = ["named", "names", "preset"]
