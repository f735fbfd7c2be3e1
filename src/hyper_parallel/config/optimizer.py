"""`train.optimizer` section: an optimizer by its name, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hyper_parallel.strategy.section import Section

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class _Optimizer(Section):
    """What the sections have in common."""

    KEYS_OF_STATE: ClassVar[tuple[str, ...]] = ()
    """Keys that say what the state is: they may not change when a run is resumed."""


class AdamWConfig(_Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    elsewhere: ClassVar[Mapping[str, str]] = {"fused": "PyTorch's fused kernel is always used; leave it out"}

    name: Literal["adamw"] = "adamw"
    lr: Rate = 3e-4
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Rate = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of parameters of two or more dims; norms and biases are not decayed."""


class MuonConfig(_Optimizer):
    """Muon (Jordan et al. 2024) for the hidden matrices; AdamW for embeddings, head, norms and biases."""

    name: Literal["muon"]
    lr: Rate = 0.02
    """Peak learning rate of the matrices."""
    momentum: Decay = 0.95
    """Nesterov momentum."""
    steps: PositiveInt = 5
    """Newton–Schulz iterations."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay of the matrices."""
    adamw: AdamWConfig = AdamWConfig()
    """AdamW for all parameters that are not hidden matrices."""


class AdamW8bitConfig(_Optimizer):
    """AdamW whose moments are kept in 8 bits (Dettmers et al., arXiv 2110.02861): two bytes per element in place of
    eight. Embeddings, and parameters of one dim or of fewer than 4,096 elements, keep float32 moments."""

    KEYS_OF_STATE: ClassVar[tuple[str, ...]] = ("block",)

    name: Literal["adamw_8bit"]
    lr: Rate = 3e-4
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Rate = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of parameters of two or more dims; norms and biases are not decayed."""
    block: Annotated[int, Field(ge=16, le=4096)] = 256
    """Consecutive elements of a row that share one scale. A split of rows must fall between blocks."""


class LionConfig(_Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum, four bytes of state per
    element."""

    name: Literal["lion"]
    lr: Rate = 1e-4
    """Peak learning rate; the schedule scales it. The paper advises a third to a tenth of AdamW's."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay rates: of the momentum in the update, and of the momentum that is kept."""
    weight_decay: NonNegative = 0.3
    """Decoupled decay of parameters of two or more dims. The paper advises three to ten times AdamW's."""


class AdafactorConfig(_Optimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): the second moment of a matrix as its row and column means.
    The rate is `lr` and the schedule, as in Transformers' Trainer; there is no relative step and no momentum."""

    name: Literal["adafactor"]
    lr: Rate = 1e-3
    """Peak learning rate; the schedule scales it."""
    eps: tuple[Rate, Rate] = (1e-30, 1e-3)
    """Added to squared gradients; the least root mean square of a parameter under `scale_parameter`."""
    clip_threshold: Rate = 1.0
    """Largest root mean square of a parameter's update before the rate."""
    decay_rate: Annotated[float, Field(lt=0)] = -0.8
    """The second moment's decay in update t is 1 - t ** decay_rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay of parameters of two or more dims; norms and biases are not decayed."""
    scale_parameter: bool = False
    """Whether the rate of each parameter is multiplied with its root mean square."""


OptimizerConfig = Annotated[
    AdamWConfig | AdamW8bitConfig | LionConfig | AdafactorConfig | MuonConfig, Field(discriminator="name")
]
"""The optimizers that a run file can name."""


def with_a_name(given: Any, default: AdamWConfig) -> Any:
    """A section `optimizer: {lr: 1e-3}`, which names no optimizer, means the default one with another `lr`: a union of
    kinds has no default kind. For validators, before they know what is given."""
    return {**default.model_dump(), **given} if isinstance(given, Mapping) and "name" not in given else given
