"""What to say when a loss or a gradient is not finite: the step, the batch and the worst parameter."""

from __future__ import annotations

import torch

from hyper_parallel.errors import NonFiniteError
from hyper_parallel.shard import ShardedModel


def non_finite(handle: ShardedModel, step: int, rows: list[int], loss: float, norm: float) -> NonFiniteError:
    """The error for `step`, counted from 0. A collective: every rank calls it, and gets the same text."""
    return not_finite(step, rows, loss, norm, f"{_worst(handle)}; ")


def not_finite(step: int, rows: list[int], loss: float, norm: float, worst: str = "") -> NonFiniteError:
    """The same where nobody can say which gradient is the `worst`."""
    return NonFiniteError(
        f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; {worst}the batch is rows "
        f"{shorten(rows)}. Nothing was updated: resume from the last checkpoint, for example with a smaller "
        "train.optimizer.lr, a longer train.schedule.warmup or a smaller train.clip"
    )


def shorten(rows: list[int]) -> str:
    """The first rows of a batch and how many more there are."""
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    return ", ".join(map(str, rows[:8])) + more


def _worst(handle: ShardedModel) -> str:
    """The parameter with the largest share of gradient elements that are not finite, over all ranks."""
    parameters = handle.parameters()
    counts = []
    for parameter in parameters:
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter.local)
        bad = (~grad.isfinite()).sum().float()
        squares = grad.nan_to_num(0.0, 0.0, 0.0).float().square().sum()
        counts.append(torch.stack([bad, torch.full_like(bad, grad.numel()), squares]))
    table = handle.all_reduce(torch.stack(counts), handle.mesh.names).tolist()
    shares = [(bad / max(held, 1.0), -index) for index, (bad, held, _) in enumerate(table)]
    share, index = max(shares)
    if share == 0:
        # Every element is finite and the norm overflowed: the largest gradient is the culprit.
        largest = max(range(len(table)), key=lambda i: table[i][2])
        return f"every gradient is finite, the largest is that of {parameters[largest].name!r}"
    affected = sum(bad > 0 for bad, *_ in table)
    return (
        f"the worst gradient is that of {parameters[-index].name!r}, {100 * share:.3g}% of it not finite, and "
        f"{affected} of {len(parameters)} parameters have such elements"
    )
