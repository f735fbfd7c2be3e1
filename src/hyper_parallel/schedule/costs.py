"""Costs of a pipeline's stages: seconds of each kind of action and of transfers, and bytes that stay alive."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hyper_parallel.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one micro-batch, by stage. Seconds and bytes may have any unit, as long as it is one."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Of a backward pass that is not split."""
    input: tuple[float, ...]
    weight: tuple[float, ...]
    """Halves of a split backward pass. Under layer recomputation they take longer together than `backward`, since
    each needs the layer's activations."""
    transfers: tuple[float, ...] = ()
    """Of an activation over the border between stages s and s + 1; nothing when left out. A gradient takes as long
    on its way back, beside computation. A border between two stages of one rank costs nothing."""
    saved: tuple[float, ...] = ()
    """Bytes that live from a micro-batch's forward pass until its backward pass, or, when that is split, until its
    WEIGHT half: the inputs and output gradients of the weights are needed until then. One for each stage when left
    out, so that memory is counted in micro-batches of a stage."""
    released: tuple[float, ...] = ()
    """Of `saved`, what the end of the INPUT half frees; below zero where it adds (what recomputation brought back and
    the WEIGHT half needs). Nothing when left out: splitting frees nothing."""
    hidden: tuple[tuple[float, ...], ...] = ()
    """[forward stage][backward stage]: by how much the pair of a forward pass and of a backward pass (or its INPUT
    half) of another micro-batch is shorter than the two one after the other. Nothing when left out."""

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if not stages:
            raise StrategyError("costs of a pipeline name no stage; give the seconds of at least one")
        defaults: dict[str, tuple[float, ...]] = {
            "transfers": (0.0,) * (stages - 1),
            "saved": (1.0,) * stages,
            "released": (0.0,) * stages,
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for field in fields(self):
            if field.name == "hidden":
                continue
            values = getattr(self, field.name)
            needed = stages - 1 if field.name == "transfers" else stages
            if len(values) != needed:
                raise StrategyError(
                    f"costs: {field.name} has {len(values)} values, and {stages} stages need {needed}"
                )
            for index, value in enumerate(values):
                if not math.isfinite(value) or (value < 0 and field.name != "released"):
                    raise StrategyError(
                        f"costs: {field.name}[{index}] is {value}; it must be finite and not below 0"
                    )
        for index, (released, saved) in enumerate(zip(self.released, self.saved, strict=True)):
            if released > saved:
                raise StrategyError(
                    f"costs: released[{index}] is {released}, more than the {saved} bytes that were saved"
                )

        for one in (self.hidden, *self.hidden):
            if self.hidden and len(one) != stages:
                raise StrategyError(
                    f"costs: hidden has {len(one)} values, and {stages} stages need {stages} by {stages}"
                )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    def hides(self, forward: int, backward: int, *, split: bool) -> float:
        """Seconds that the pair of two stages' passes hides. `split`: the second one is an INPUT half, in which at most
        its own time is hidden: none in the first stage, which has no gradient of inputs."""
        hidden = self.hidden[forward][backward] if self.hidden else 0.0
        return min(hidden, self.input[backward]) if split else hidden

    @classmethod
    def even(
        cls, stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, transfer: float = 0.0
    ) -> Costs:
        """Equal stages, whose backward pass takes as long whole as in halves."""
        return cls(
            forward=(forward,) * stages,
            backward=(input + weight,) * stages,
            input=(input,) * stages,
            weight=(weight,) * stages,
            transfers=(transfer,) * (stages - 1),
        )

    def merged(self, parts: int) -> Costs:
        """Each `parts` consecutive stages as one, as where they lie on one rank. Raises StrategyError if uneven.

        Where one of them adds in its INPUT half, what others free there does not count: it may be freed later.
        """
        if self.stages % parts:
            raise StrategyError(f"{self.stages} stages do not divide into groups of {parts}")

        def summed(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[i : i + parts]) for i in range(0, self.stages, parts))

        return Costs(
            forward=summed(self.forward),
            backward=summed(self.backward),
            input=summed(self.input),
            weight=summed(self.weight),
            transfers=self.transfers[parts - 1 :: parts],
            saved=summed(self.saved),
            released=tuple(
                sum(group) if min(group) >= 0 else sum(min(0.0, r) for r in group)
                for group in (self.released[i : i + parts] for i in range(0, self.stages, parts))
            ),
        )
