"""A link: one rank's connection to the other ranks of a weight transfer plan."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.compat.standalone_group import StandaloneGroup
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.plan import Message, WeightPlan


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank of a plan, and the process group of all of them."""

    plan: WeightPlan
    rank: int
    group: StandaloneGroup
    epoch: int
    """How many times the roles met before."""

    @property
    def named(self) -> str:
        """This rank by its role."""
        return self.plan.named(self.rank)

    def error(self, version: int | None, message: Message, why: str) -> WeightsError:
        """What went wrong with a message that this rank sends or receives; `version`: None before it is known."""
        if message.sender == self.rank:
            what, other = "send", f"to {self.plan.named(message.receiver)}"
        else:
            what, other = "receive", f"from {self.plan.named(message.sender)}"
        which = "the next version" if version is None else f"version {version}"
        return WeightsError(
            f"{self.named}: {what} weights, {which}, {other}: {why}; the old weights are in place, connect again with "
            "the next epoch"
        )
