"""Model FLOPs and MFU of estimated steps.

    flops = 6 N + 12 L H Q K(S)            a token                       `flops_per_token`
    MFU   = batch · S · flops / (seconds · devices · peak)               `mfu`

The convention is that of `workload.flops`: N counts the elements of the matrices that a token is multiplied with (the
head also when it is tied, of experts those that are chosen, and the router), attention counts the keys that the mask
keeps, and recomputation is not counted. In latent attention Q is the mean of a head's dims of keys and of values.
Products of other mixers' recurrences are those of `workload.mixers`. Where a model is frozen the gradients of its
weights are not computed: 4 N, and 6 for each element of the adapters. Each module that predicts one token more counts
as a layer and a head. The peak is that of the precision of the linear layers; in float32 it is the 16-bit one, since a
table has no other.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.planner.cost_model.dims import in_eight_bits, in_four_bits, keys_seen
from hyper_parallel.planner.cost_model.parameters import adapters, layer_matrices, module_matrices
from hyper_parallel.planner.table import Array, Table


def flops_per_token(t: Table) -> Array:
    """Model FLOPs of training on one token, forward and backward, of [n] or [1]."""
    matrices = t.layers * layer_matrices(t) + t.vocabulary * t.hidden
    size = np.where(t.key_rank > 0, (t.plain + t.rotary + t.value) / 2, t.head_dim)
    one_more = module_matrices(t) + 2 * t.hidden * t.hidden + t.vocabulary * t.hidden
    matrices = matrices + t.prediction_modules * one_more
    times = 6 - 2 * t.frozen
    mixed = 12 * t.attention_layers * t.heads * size * keys_seen(t) + 3 * t.mixer_layers * t.mixer_scanned
    return times * matrices + 6 * t.layers * adapters(t) + mixed


def peak(t: Table) -> Array:
    """FLOP/s of a device in the precision of its linear layers."""
    return np.where(in_four_bits(t), t.peak4, np.where(in_eight_bits(t), t.peak8, t.peak16))


def tokens_per_second(t: Table, seconds: Array) -> Array:
    """Tokens/s of each device, for steps of `seconds`."""
    return t.batch * t.sequence / (seconds * t.devices)


def mfu(t: Table, seconds: Array) -> Array:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B), 0 to 1, for steps of `seconds`."""
    return tokens_per_second(t, seconds) * flops_per_token(t) / peak(t)
