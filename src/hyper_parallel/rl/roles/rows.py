"""Samples as rows of tensors: one row for each, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard.loss import IGNORED


@dataclass(frozen=True)
class SampleRows:
    """Rows [B, S] of B samples: a position's label is the token behind it, where the policy drew that one."""

    input_ids: Tensor
    labels: Tensor
    """int64; -100 where the policy did not draw the next token."""
    position_ids: Tensor
    behaviour: Tensor
    """fp32: the log-probabilities that the rollout recorded; 0 where there is no label."""

    @property
    def drawn(self) -> Tensor:
        """bool [B, S]: whether a position has a label."""
        return self.labels != IGNORED

    def placed(self, values: Sequence[Sequence[float]], samples: Sequence[Sample]) -> Tensor:
        """fp32 [B, S] of a value for each token of each answer, at the positions of the labels."""
        placed = torch.zeros(self.labels.shape)
        for row, (one, given) in enumerate(zip(samples, values, strict=True)):
            first = len(one.prompt) - 1
            placed[row, first : first + len(given)] = torch.tensor(given)
        return placed.to(self.labels.device).masked_fill(~self.drawn, 0)


def length_of(samples: Sequence[Sample], multiple: int) -> int:
    """Positions that the longest needs, a multiple of `multiple`."""
    longest = max(len(one.prompt) + len(one.tokens) - 1 for one in samples)
    return -(-longest // multiple) * multiple


def rows_of(samples: Sequence[Sample], length: int, device: torch.device) -> SampleRows:
    """Rows of `length` positions."""
    count = len(samples)
    ids = torch.zeros(count, length, dtype=torch.int64)
    labels = torch.full((count, length), IGNORED, dtype=torch.int64)
    behaviour = torch.zeros(count, length)
    for row, one in enumerate(samples):
        tokens = [*one.prompt, *one.tokens]
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        first = len(one.prompt) - 1
        answer = torch.tensor(one.tokens)
        drawn = torch.tensor(one.drawn)
        labels[row, first : first + len(answer)] = torch.where(drawn, answer, IGNORED)
        behaviour[row, first : first + len(answer)] = torch.tensor(one.logprobs) * drawn
    positions = torch.arange(length).expand(count, length).contiguous()
    return SampleRows(*(one.to(device) for one in (ids, labels, positions, behaviour)))


def answers_of(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    """The values [B, S] at the positions of each answer's tokens: what `SampleRows.placed` takes."""
    host = values.cpu()
    return [
        host[row, len(one.prompt) - 1 : len(one.prompt) - 1 + len(one.tokens)].tolist()
        for row, one in enumerate(samples)
    ]
