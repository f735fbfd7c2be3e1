"""Axes that may split token mixers beside attention, and what a search leaves out because of them.

Megatron-Core splits the heads of Mamba-2 and of delta rules over tensor ranks, where these divide the groups that share
keys, and exchanges heads for positions over context ranks (`megatron/core/ssm`). A ring does not serve: a recurrence
hands its state from position to position. `train` splits none of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.workload.mixers import Mixer

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def tensor_divides(mixer: Mixer, tensor: Array, runnable: bool) -> Mask:
    """Which tensor degrees split a mixer."""
    if runnable or not mixer.splits:
        return np.asarray(tensor == 1, dtype=np.bool_)
    return np.asarray(mixer.splits % tensor == 0, dtype=np.bool_)


def context_divides(mixer: Mixer, context: Array, tensor: Array, runnable: bool) -> Mask:
    """Which context degrees split the heads that tensor leaves to a rank, by Ulysses."""
    if runnable or not mixer.splits:
        return np.asarray(context == 1, dtype=np.bool_)
    return np.asarray(mixer.heads / tensor % context == 0, dtype=np.bool_)


def left_out(mixer: Mixer | None, runnable: bool) -> list[str]:
    """What a space leaves out because of the model's mixer, each with the reason."""
    if mixer is None:
        return []
    name = mixer.kind.replace("_", " ")
    if runnable:
        return [f"tensor and context axes: train splits no {name} layers"]
    if not mixer.splits:
        return [f"tensor and context axes: no framework splits {name} layers, whose channels a product mixes"]
    return [
        f"tensor degrees that do not divide the {mixer.splits} groups of a {name} layer",
        f"context by a ring: a {name} layer hands its state from position to position; Ulysses is searched",
    ]
