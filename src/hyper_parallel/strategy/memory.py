"""What is sharded, kept, recomputed or moved: today the ZeRO levels and recomputation, later HyperOffload's budget."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from hyper_parallel.strategy.section import Section

ShardLevel = Literal["optimizer", "gradients", "parameters"]
"""What ranks of the `shard` axis hold a part of: ZeRO-1, 2 and 3 (Rajbhandari et al., arXiv 1910.02054, section 5)."""


class Memory(Section):
    """How the step's memory is held down."""

    reserved: ClassVar = dict.fromkeys(
        ("device", "host", "pool", "flash", "expert_load"), "memory budgets come with HyperOffload"
    )

    shard: ShardLevel = "parameters"
    """What the `shard` axis splits while a step runs. `parameters`: everything; parameters are gathered for each use,
    gradients reduced in each micro-batch (ZeRO-3). `gradients`: parameters are gathered once a step and kept (ZeRO-2).
    `optimizer`: gradients, too, are kept whole, and reduced in the last micro-batch only (ZeRO-1)."""
    recompute: Literal["none", "layer"] = "none"
    """`layer` keeps only each layer's input and computes the layer again in the backward pass."""
    gathered: Literal["keep", "mlp", "again"] = "keep"
    """With the sequence split (`sequence`, tensor_y): the gathered inputs of matrix products are kept for the backward
    pass, or only their shards are, and the backward pass gathers again. `mlp` keeps those of the first products of
    the MLPs."""
    reshard_after_forward: bool | dict[str, bool] | None = None
    """With `shard: parameters`: free a layer's gathered parameters after its forward pass and gather them again in the
    backward pass (true, which leaving it out means), or keep them, which costs memory and saves a gather. Or module
    pattern to either; the last pattern that matches a layer holds, and layers that none matches free theirs."""

    @model_validator(mode="after")
    def _reshards_by_level(self) -> Memory:
        given = self.reshard_after_forward
        asked = any(given.values()) if isinstance(given, dict) else given
        if asked and self.shard != "parameters":
            raise ValueError(
                f"'reshard_after_forward' frees parameters that 'shard: {self.shard}' keeps through the step; "
                "set shard to parameters, or leave reshard_after_forward out"
            )
        return self
