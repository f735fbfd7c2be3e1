"""Model FLOPs and MFU of estimated steps.

    flops = 6 N + 12 L H Q K(S)            a token                       `flops_per_token`
    MFU   = batch · S · flops / (seconds · devices · peak)               `mfu`

The convention is that of `workload.flops`: N counts the elements of the matrices that a token is multiplied with (the
head also when it is tied, of experts those that are chosen, and the router), attention counts the keys that the mask
keeps, and recomputation is not counted. In latent attention Q is the mean of a head's dims of keys and of values. The
peak is that of the precision of the linear layers; in float32 it is the 16-bit one, since a table has no other.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.planner.cost_model.dims import in_eight_bits, in_four_bits, keys_seen, routed_share
from hyper_parallel.planner.cost_model.parameters import attention_parameters
from hyper_parallel.planner.table import Array, Table


def flops_per_token(t: Table) -> Array:
    """Model FLOPs of training on one token, forward and backward, of [n] or [1]."""
    wide = (2 + t.gated) * t.hidden
    sparse = wide * (t.chosen * t.expert_ffn + t.shared_ffn) + t.hidden * t.experts
    routed = routed_share(t) * t.layers
    matrices = t.layers * attention_parameters(t) + routed * sparse + (t.layers - routed) * wide * t.ffn
    matrices = matrices + t.vocabulary * t.hidden
    size = np.where(t.key_rank > 0, (t.plain + t.rotary + t.value) / 2, t.head_dim)
    return 6 * matrices + 12 * t.layers * t.heads * size * keys_seen(t)


def peak(t: Table) -> Array:
    """FLOP/s of a device in the precision of its linear layers."""
    return np.where(in_four_bits(t), t.peak4, np.where(in_eight_bits(t), t.peak8, t.peak16))


def tokens_per_second(t: Table, seconds: Array) -> Array:
    """Tokens/s of each device, for steps of `seconds`."""
    return t.batch * t.sequence / (seconds * t.devices)


def mfu(t: Table, seconds: Array) -> Array:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B), 0 to 1, for steps of `seconds`."""
    return tokens_per_second(t, seconds) * flops_per_token(t) / peak(t)
