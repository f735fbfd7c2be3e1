"""How a sequence's positions are split over the `context` axis, and how attention sees them all."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyper_parallel.strategy.section import Section

Method = Literal["auto", "ring", "ulysses", "hybrid"]


class Context(Section):
    """How ranks of the `context` axis compute attention together."""

    method: Method = "auto"
    """`ring`: keys and values travel from rank to rank, positions are dealt so that each rank has the same work under a
    causal mask. `ulysses`: heads are exchanged for positions. `hybrid`: Ulysses inside, rings outside. `auto`: Ulysses
    where every rank can have key-value heads of its own, else as much of it as they allow, else rings."""
    ulysses: Annotated[int, Field(ge=2, strict=True)] | None = None
    """With `hybrid`: over how many ranks heads are exchanged, a divisor of axes.context. Left out: the largest divisor
    that also divides the key-value heads of a rank."""

    @model_validator(mode="after")
    def _only_with_hybrid(self) -> Context:
        if self.ulysses is not None and self.method != "hybrid":
            raise ValueError(
                f"'ulysses' is the degree of Ulysses inside rings, and method is {self.method}; "
                "set method: hybrid, or leave ulysses out"
            )
        return self
