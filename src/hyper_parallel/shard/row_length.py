"""Row lengths that a sharding plan can deal: the positions of a row are split over context and tensor."""

from __future__ import annotations

import math

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.context.position_split import length_multiple as multiple_over_context
from hyper_parallel.shard.plan.types import Plan


def length_multiple(plan: Plan) -> int:
    """What the number of positions of a row must be a multiple of."""
    multiple = (
        multiple_over_context(plan.context.ring, plan.context.ulysses) if plan.context is not None else 1
    )
    if plan.sequence:
        multiple = math.lcm(multiple, plan.mesh.size("context") * plan.mesh.size(plan.mesh.tensor))
    return multiple


def check_length(plan: Plan, length: int) -> None:
    """Raise StrategyError when rows of `length` positions cannot be split evenly over context and tensor."""
    multiple = length_multiple(plan)
    if length % multiple:
        context, tensor = plan.mesh.size("context"), plan.mesh.size(plan.mesh.tensor)
        split = [f"context {context}"] if context > 1 else []
        split += [f"tensor {tensor} (the sequence)"] if plan.sequence else []
        raise StrategyError(
            f"rows of {length} positions cannot be split evenly over {' and '.join(split)}; "
            f"use a multiple of {multiple}"
        )
