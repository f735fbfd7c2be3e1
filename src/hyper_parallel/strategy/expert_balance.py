"""`expert_balance` section: expert load balancing by measured loads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyper_parallel.strategy.section import Section


class ExpertBalance(Section):
    """Expert load balancing: experts move to other ranks of the `expert` axis, and hot ones have replicas, by the rows
    that each expert got (EPLB). The results equal those without it."""

    every: Annotated[int, Field(ge=1)] = 50
    """Number of steps over which rows are counted; after them experts are placed anew, if `limit` is exceeded."""
    limit: Annotated[float, Field(gt=1)] = 1.15
    """The heaviest rank's rows over the mean, in each layer, up to which experts stay where they are."""
    replicas: Annotated[int, Field(ge=0)] = 2
    """Number of experts in each layer, the hottest, whose weights are copied to every rank of the `expert` axis in each
    forward pass (redundant experts); their rows stay where they are. 0 only moves experts.
    """
