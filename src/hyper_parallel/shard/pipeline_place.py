"""This rank's place in a pipeline, or among submodels: the device groups, and which of them hold which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.device_group import DeviceGroup
from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class PipelinePlace:
    """The device groups in the order of the pipeline, or of the submodels' declaration, and the group of this rank."""

    groups: tuple[DeviceGroup, ...]
    index: int
    """Of this rank's group."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a parameter or buffer to the groups that hold it, ascending; empty before the model is cut, when every
    group counts as a holder."""
    submodels: bool = False
    """The groups have submodels of their own: one that a micro-batch does not need has no gradients in it."""

    @classmethod
    def of(cls, strategy: Strategy, rank: int) -> PipelinePlace | None:
        """The place of a rank of the run; None without a pipeline."""
        if strategy.axes.pipeline == 1:
            return None
        groups = DeviceGroup.of_pipeline(strategy)
        for index, group in enumerate(groups):
            if rank in group.ranks:
                return cls(groups, index)
        raise StrategyError(
            f"the strategy's axes multiply to {strategy.axes.world}, and this is rank {rank}; start that many workers"
        )

    @property
    def devices(self) -> DeviceGroup:
        """This rank's group."""
        return self.groups[self.index]

    @property
    def alike(self) -> tuple[int, ...]:
        """The ranks of the run whose groups have the mesh of this one's."""
        return tuple(
            sorted(rank for group in self.groups if group.mesh == self.devices.mesh for rank in group.ranks)
        )

    def holders(self, name: str) -> tuple[DeviceGroup, ...]:
        """The groups that hold a parameter or buffer."""
        return tuple(self.groups[index] for index in self.owners.get(name, range(len(self.groups))))

    def owns(self, name: str) -> bool:
        """Whether this rank's group holds it."""
        return self.index in self.owners.get(name, (self.index,))

    def counts(self, name: str) -> bool:
        """Whether this rank's group is the first that holds it, and so speaks for it in sums over all ranks."""
        return self.owners.get(name, (self.index,))[0] == self.index
