"""Layers that a strategy recomputes: of each pipeline stage the first k (`memory.recompute_layers`), or all.

The first layers, as Megatron's `recompute_method: block` has it, and not the last or evenly spread ones: a backward
pass runs from the last layer to the first. When it comes to the recomputed layers, the others have freed what they kept
of this micro-batch, so that the tensors of one recomputed layer come in their place and not on top of them. To the
bytes of the micro-batches that wait it makes no difference which k layers of a stage are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.memory import Memory


def recomputes(memory: Memory) -> bool:
    """Whether layers are recomputed by the strategy itself, rather than by a budget's plan."""
    return memory.recompute in ("layer", "selective")


def recomputed_layers(memory: Memory, counts: Sequence[int]) -> list[int]:
    """The indices of the layers that are recomputed. `counts`: layers of each stage; one number without a pipeline.

    A stage with fewer layers than `recompute_layers` recomputes all of them. Raises StrategyError for more layers than
    any stage has, and for a list of another length than `counts`.

    >>> recomputed_layers(Memory(recompute="layer", recompute_layers=2), (3, 1))
    [0, 1, 3]
    """
    if not recomputes(memory):
        return []
    asked = memory.recompute_layers
    most = max(counts, default=0)
    if asked is None:
        asked = most
    if isinstance(asked, int):
        asked = [asked] * len(counts)
    if len(asked) != len(counts):
        raise StrategyError(
            f"memory.recompute_layers: {asked} has {len(asked)} numbers, and the run has {_stages(counts)}; give one "
            "number for each stage, or a single number for all of them"
        )
    if max(asked, default=0) > most:
        has = "the model has" if len(counts) == 1 else "the largest stage has"
        raise StrategyError(
            f"memory.recompute_layers: {max(asked)} is too large: {has} {most} layers; give at most {most}, or leave "
            "recompute_layers out to recompute every layer"
        )
    found: list[int] = []
    first = 0
    for count, again in zip(counts, asked, strict=True):
        found += range(first, first + min(count, again))
        first += count
    return found


def _stages(counts: Sequence[int]) -> str:
    return "1 stage (no pipeline)" if len(counts) == 1 else f"{len(counts)} stages"
