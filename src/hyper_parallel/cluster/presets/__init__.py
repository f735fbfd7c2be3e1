"""Published machines by name."""

from hyper_parallel.cluster.presets.names import named, names, preset
from hyper_parallel.cluster.presets.peaks import peak_flops, preset_of

__all__ = ["named", "names", "peak_flops", "preset", "preset_of"]
