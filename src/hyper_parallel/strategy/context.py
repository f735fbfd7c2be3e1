"""`context` section: how positions are split over the `context` axis, and how attention is computed over them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyper_parallel.strategy.section import Section

Method = Literal["auto", "ring", "ulysses", "hybrid"]


class Context(Section):
    """Method of context parallelism."""

    method: Method = "auto"
    """`ring`: keys and values travel from rank to rank; positions are distributed so that each rank has the same work
    under a causal mask. `ulysses`: an all-to-all exchanges heads for positions. `hybrid`: Ulysses inside, rings
    outside. `auto`: Ulysses over the largest divisor of the axis that divides the key-value heads, rings over the rest.
    """
    ulysses: Annotated[int, Field(ge=2, strict=True)] | None = None
    """With `hybrid`: the number of ranks that exchange heads, a divisor of axes.context. Default: the largest divisor
    that also divides the key-value heads of a rank.
    """

    @model_validator(mode="after")
    def _only_with_hybrid(self) -> Context:
        if self.ulysses is not None and self.method != "hybrid":
            raise ValueError(
                f"'ulysses' is the degree of Ulysses inside rings, and method is {self.method}; "
                "set method: hybrid, or leave ulysses out"
            )
        return self
