"""Bytes of state that an optimizer keeps of a trained parameter's element, with float32 moments.

| Optimizer | Bytes of an element of an m × n matrix | Exceptions |
|---|---|---|
| adamw | 8: two moments | |
| adamw_8bit | 2 + 8 / 256: two codes, and two float32 scales of a block of a row | embeddings 8 |
| lion | 4: a momentum | |
| adafactor | 4 (1 / m + 1 / n): means of rows and columns | |
| muon | 4: a momentum | embedding, head and routed experts, which are stacked, 8 |

`state_bytes` is the mean over what a workload trains. Vectors and small matrices, which some optimizers treat
otherwise, are too few to count. The optimizers themselves are in `step/optimizer`, and `inspect` counts their tensors.
"""

from __future__ import annotations

from hyper_parallel.workload.workload import Workload

ADAMW = 8.0
BLOCK = 256
"""Elements of a row with one scale, as `train.optimizer.block` is where a run does not say."""


def state_bytes(workload: Workload) -> float:
    """Mean bytes of state of an element that is trained."""
    shape, adapter = workload.shape, workload.adapter
    table = shape.vocabulary * shape.hidden
    total = workload.trained_parameters
    # The two matrices of an adapter have its rank as one side.
    side = shape.hidden if adapter is None else adapter.rank
    match workload.optimizer:
        case "adamw_8bit":
            if adapter is not None:
                return 2 + 4 / BLOCK + 4 / min(side, BLOCK)
            return _mean(2 + 8 / BLOCK, table, total)
        case "lion":
            return 4.0
        case "adafactor":
            return 4 / shape.hidden + 4 / side
        case "muon":
            one = shape.matrices * (shape.expert_hidden or shape.hidden) * shape.expert_ffn
            routed = shape.expert_layers * shape.experts * one if shape.experts else 0
            ends = table * (1 if shape.tied else 2)
            return 4.0 if adapter is not None else _mean(4.0, ends + routed, total)
    return ADAMW


def _mean(most: float, whole: float, total: float) -> float:
    """Where `whole` elements of `total` have AdamW's float32 moments, and the others `most` bytes."""
    share = whole / total
    return most * (1 - share) + ADAMW * share
