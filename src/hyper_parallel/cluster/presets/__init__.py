"""Published machines by name."""

from hyper_parallel.cluster.presets.names import names, peak_flops, preset_of, with_devices

__all__ = ["names", "peak_flops", "preset_of", "with_devices"]
