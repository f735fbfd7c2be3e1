"""`memory` section of training and of generation: ZeRO levels, recomputed layers, offload budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.section import Section
from hyper_parallel.units import exact_bytes, parse_bytes


def _bytes(given: Any) -> Any:
    return parse_bytes(given) if isinstance(given, str) else given


Bytes = Annotated[
    int,
    Field(gt=0, json_schema_extra={"type": ["integer", "string"], "examples": ["10GiB"]}),
    BeforeValidator(_bytes),
    PlainSerializer(exact_bytes),
]
"""A number of bytes; in a file also `10GiB`, `512MiB`, `10GB`."""

ShardLevel = Literal["optimizer", "gradients", "parameters"]
"""ZeRO levels 1, 2 and 3: the tensors that the ranks of the `shard` axis split (Rajbhandari et al., arXiv 1910.02054,
section 5).
"""


Where = Literal["auto", "device", "host"]
"""Place of optimizer updates under a budget; `auto`: wherever the step is fastest."""


class Memory(Section):
    """Memory: ZeRO level, recomputation, and the budget with its tiers. `memory: auto`, or `device: auto` in the
    section, lets the planner choose the budgets of all tiers, or none where everything fits.
    """

    device: Bytes | None = None
    """Memory budget: the bytes that a step may hold at once on each rank's device. Parameters, optimizer state,
    gradients and activations are offloaded and fetched back while the step runs, as little as the budget allows. Needs
    `host`, `pool` or `flash`.
    """
    host: Bytes | None = None
    """Host memory that each rank may use for offloading."""
    pool: Bytes | None = None
    """Memory shared by all ranks, a supernode's or one machine's, that they may use together for offloading. Each rank
    may take an equal part.
    """
    flash: str | None = None
    """A folder on a fast disk for data that fits in neither. The files in it are removed when the run ends."""
    cluster: str | None = None
    """The machine for which offloading is planned: a preset such as `h100`, or a file that `hyper-parallel calibrate`
    wrote. Default: the device's preset, else a rough guess. It affects the speed of a step, never its memory.
    """
    expert_load: float = Field(default=1.5, ge=1.0, allow_inf_nan=False)
    """Under a budget, with `axes.expert`: the multiple of its even share of a layer's rows for which memory is reserved
    on each rank. A step that needs more is replanned and restarted if that fits into the budget; else the run ends
    before anything is updated.
    """

    update: Where = "auto"
    """Place of optimizer updates under a budget. `host`: moments and master values stay in `host` or `pool`; gradients
    go there, PyTorch's fused AdamW runs there in parallel with the device, and new values come back: a third of the
    traffic of moving the moments. `device`: on the device. `auto`: whichever is fastest.
    """

    shard: ShardLevel = "parameters"
    """ZeRO level: the tensors that the `shard` axis splits while a step runs. `parameters`: everything; parameters are
    gathered for each use, gradients reduced in each micro-batch (ZeRO-3). `gradients`: parameters are gathered once a
    step and kept (ZeRO-2). `optimizer`: gradients, too, are kept whole, and reduced in the last micro-batch only
    (ZeRO-1).
    """
    recompute: Literal["auto", "none", "layer", "selective"] = "auto"
    """Activation checkpointing. `layer` keeps only each layer's input and recomputes the layer in the backward pass.
    `selective` keeps the results of matrix products, fused attention and collectives, and recomputes the cheap
    operators between them (norms, activation functions, rotations, casts) and attention scores that no kernel fuses.
    `none` keeps everything. `auto`: under a budget, recompute what is cheaper to recompute than to copy; else `none`.
    """
    recompute_layers: (
        Annotated[int, Field(ge=1, strict=True)]
        | Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
        | None
    ) = None
    """With `recompute: layer` or `selective`: the number of layers that are recomputed, the first ones of each pipeline
    stage; without a pipeline the first ones of the model. Or a list with a number for each stage. A stage with fewer
    layers recomputes all of them. Default: every layer.
    """
    gathered: Literal["keep", "mlp", "again"] = "keep"
    """With the sequence split (`sequence`, tensor_y): `keep` keeps the gathered inputs of matrix products for the
    backward pass; `again` keeps only their shards, and the backward pass gathers again; `mlp` keeps the gathered inputs
    of the first products of the MLPs only.
    """
    reshard_after_forward: bool | dict[str, bool] | None = None
    """With `shard: parameters`: free a layer's gathered parameters after its forward pass and gather them again in the
    backward pass (true, the default), or keep them (false), which costs memory and saves a gather. Or a mapping of
    module patterns to either; the last pattern that matches a layer wins, and other layers free theirs.
    """

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Memory:
        elsewhere = [name for name in ("host", "pool", "flash") if getattr(self, name) is not None]
        if self.device is not None and not elsewhere:
            raise ValueError(
                "'device' is a budget, and what does not fit needs a place to go; set host or pool to a number of "
                "bytes, or flash to a folder"
            )
        if self.update == "host" and self.host is None and self.pool is None:
            raise ValueError(
                "'update: host' needs memory that the host computes in; set device to what a step may hold on the "
                "device, and host or pool to a number of bytes"
            )
        if self.device is None and elsewhere:
            raise ValueError(
                f"'{elsewhere[0]}' is where things go that do not fit on the device; set device to what it may hold"
            )
        return self

    @model_validator(mode="after")
    def _recomputes_some(self) -> Memory:
        if self.recompute_layers is not None and self.recompute not in ("layer", "selective"):
            raise ValueError(
                f"'recompute_layers' is the number of layers that are recomputed, and 'recompute: {self.recompute}' "
                "recomputes none by number; set recompute to layer or selective, or leave recompute_layers out"
            )
        return self

    @model_validator(mode="after")
    def _reshards_by_level(self) -> Memory:
        given = self.reshard_after_forward
        some_layers = any(given.values()) if isinstance(given, dict) else given
        if some_layers and self.shard != "parameters":
            raise ValueError(
                f"'reshard_after_forward' frees parameters that 'shard: {self.shard}' keeps through the step; "
                "set shard to parameters, or leave reshard_after_forward out"
            )
        return self


# Layers that a strategy recomputes: of each pipeline stage the first k (`memory.recompute_layers`), or all.
#
# The first layers, as Megatron's `recompute_method: block` has it, and not the last or evenly spread ones: a backward
# pass runs from the last layer to the first. When it comes to the recomputed layers, the others have freed what they
# kept of this micro-batch, so that the tensors of one recomputed layer come in their place and not on top of them. To
# the bytes of the micro-batches that wait it makes no difference which k layers of a stage are recomputed.


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
    counted = memory.recompute_layers
    most = max(counts, default=0)
    if counted is None:
        counted = most
    if isinstance(counted, int):
        counted = [counted] * len(counts)
    if len(counted) != len(counts):
        stages = "1 stage (no pipeline)" if len(counts) == 1 else f"{len(counts)} stages"
        raise StrategyError(
            f"memory.recompute_layers: {counted} has {len(counted)} numbers, and the run has {stages}; give one number "
            "for each stage, or a single number for all of them"
        )
    if max(counted, default=0) > most:
        has = "the model has" if len(counts) == 1 else "the largest stage has"
        raise StrategyError(
            f"memory.recompute_layers: {max(counted)} is too large: {has} {most} layers; give at most {most}, or leave "
            "recompute_layers out to recompute every layer"
        )
    found: list[int] = []
    first = 0
    for count, again in zip(counts, counted, strict=True):
        found += range(first, first + min(count, again))
        first += count
    return found


# `memory` section of generation: the budget of the device, and the tiers for what does not fit.
#
# The keys are those of training's section; what concerns gradients and optimizer state is refused by name.

TIERS = ("host", "pool", "flash")
"""The tiers, the fastest first."""


class GenerationMemory(Section):
    """Memory of generation: the device's budget and the tiers."""

    device: Bytes | Literal["auto"] | None = None
    """Memory budget: the bytes of weights, KV cache and everything that a pass computes that may be on the device at
    once. `auto`: what is free on the device. Weights that do not fit are read from `host`, `pool` or `flash` in each
    pass.
    """
    host: Bytes | None = None
    """Host memory for what is not on the device."""
    pool: Bytes | None = None
    """Memory that all ranks of a machine or supernode share, for what is not on the device."""
    flash: str | None = None
    """A folder on a fast disk for what fits in neither. The files in it are removed when the run ends."""

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key in Memory.model_fields:
            return (
                f"'memory.{key}' is for training, and generation has nothing that it applies to; leave it out (the "
                f"keys here are device, {', '.join(TIERS)})"
            )
        return super()._hint(key, known)

    @model_validator(mode="after")
    def _has_budget(self) -> GenerationMemory:
        elsewhere = [name for name in TIERS if getattr(self, name) is not None]
        if self.device is None and elsewhere:
            raise ValueError(
                f"'{elsewhere[0]}' is where things go that do not fit on the device; set device to what it may hold, "
                "or to auto"
            )
        return self
