"""An update's samples as this rank computes them: its share, in micro-batches of equal length on all data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.rl.roles.rows import SampleRows, answers_of, length_of, rows_of
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.row_length import length_multiple
from hyper_parallel.step.batches import rows_beside, share_of


@dataclass(frozen=True)
class MicroRows:
    """One micro-batch of this rank."""

    places: list[int]
    """Of its samples in the update."""
    samples: list[Sample]
    rows: SampleRows


def micro_batches(
    samples: Sequence[Sample], handle: ShardedModel, micro: int | None, device: torch.device
) -> list[MicroRows]:
    """Of an update, the same samples on every rank; replicate · shard divides their number."""
    share = share_of(handle, len(samples))
    size = share.stop - share.start
    micro, multiple = min(micro or size, size), length_multiple(handle.plan)
    found = []
    for at in range(share.start, share.stop, micro):
        count = min(micro, share.stop - at)
        beside = rows_beside(handle, len(samples), at, count)
        length = length_of([samples[place] for place in beside], multiple)
        own = list(samples[at : at + count])
        found.append(MicroRows(list(range(at, at + count)), own, rows_of(own, length, device)))
    return found


def on_all_ranks(
    values: Sequence[tuple[MicroRows, Tensor]], samples: Sequence[Sample], handle: ShardedModel
) -> list[list[float]]:
    """For each sample of an update the values [B, S] of its answer's tokens, from the rank that computed them."""
    longest = max(len(one.tokens) for one in samples)
    whole = torch.zeros(len(samples), longest, dtype=torch.float32, device=handle.device)
    for micro, computed in values:
        for place, one in zip(micro.places, answers_of(computed, micro.samples), strict=True):
            whole[place, : len(one)] = torch.tensor(one, device=handle.device)
    whole = handle.all_reduce(whole, ("replicate", "shard"))
    host = whole.cpu()
    return [host[place, : len(one.tokens)].tolist() for place, one in enumerate(samples)]
