"""Conversion of a DeepSpeed JSON into a fragment of a run file. No torch, no DeepSpeed.

`convert` gives a `Conversion`: the settings, each with the keys that it comes from, and the keys that were not
converted, each with the reason. Every key of the JSON is in one of the two.
"""

from hyper_parallel.config.from_deepspeed.convert import convert
from hyper_parallel.config.from_deepspeed.source import Conversion, Setting, Unconverted, read

__all__ = ["Conversion", "Setting", "Unconverted", "convert", "read"]
