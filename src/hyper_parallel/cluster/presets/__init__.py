"""Published machines by name."""

from hyper_parallel.cluster.presets.names import named, names, peak_flops, preset, preset_of

__all__ = ["named", "names", "peak_flops", "preset", "preset_of"]
