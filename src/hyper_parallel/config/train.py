"""`train` section: steps, batch, optimizers, schedule, evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from hyper_parallel.strategy.section import NonNegative, PositiveInt, Section

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class _Optimizer(Section):
    """Fields that the sections have in common."""

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


class ScheduleConfig(Section):
    """The learning rate as a function of the step: a linear warm-up, then a shape."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """`wsd` is warm-up, stable, decay (arXiv 2404.06395): constant, then linear over the last `decay` steps."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = 0
    """Steps of linear warm-up from 0; below 1, a share of all steps, rounded up."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The final learning rate as a share of the peak, for `cosine`, `linear` and `wsd`."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of all steps over which `wsd` decays."""

    def warmup_steps(self, steps: int) -> int:
        """The steps of warm-up of a run of `steps`."""
        # What a product rounds up by is no step.
        return self.warmup if isinstance(self.warmup, int) else math.ceil(self.warmup * steps - 1e-9)


class LossConfig(Section):
    """Cross-entropy over the tokens that contribute to the loss, with optional terms."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: NonNegative = 0.0
    """Coefficient of the square of each token's log-sum-exp of the logits (PaLM, arXiv 2204.02311: 1e-4)."""
    chunk: PositiveInt | Literal["auto", "none"] = "auto"
    """Number of a worker's positions whose logits are in memory at the same time. `auto` keeps a chunk's logits near
    2^27 elements; `none` computes all at once.
    """


class EvalConfig(Section):
    """Evaluation on held-out text."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last one only."""
    batches: PositiveInt = 8
    """Global batches per evaluation, always the same ones."""


class SampleConfig(Section):
    """Text that the trained model writes at the end."""

    prompt: str | None = None
    """The text to continue; for conversations, the user's message. Default: the first held-out (or training)
    document up to its first answer, with its images and sound, or `def ` where the text has no answers.
    """
    tokens: Annotated[int, Field(ge=0)] = 48
    """Maximum number of tokens to add; the sample stops where the model ends the text or its answer. 0 writes
    none.
    """
    temperature: NonNegative = 0.7
    """0 takes the most likely token each time; above 0, tokens are drawn, the same ones for the same seed."""


class ProfileConfig(Section):
    """Measurement of single steps. The trace and the page are written to ``profile`` in the run's folder; where parts
    of the model are on several ranks, PyTorch's trace of each rank is."""

    steps: PositiveInt = 5
    """Number of measured steps, after the first two; the page shows the one of median length."""
    cluster: str | None = None
    """A cluster file, such as `hyper-parallel calibrate` writes, or a preset: the page compares its
    prediction with the measurement.
    """


class TrainConfig(Section):
    """The training loop. The batch is global: it is the same on any number of workers."""

    engine: Literal["graph", "eager"] = "graph"
    """The engine. `graph` captures the whole step once, as one graph, and runs that; a step that cannot be
    captured runs under `eager`, and a message gives the reason. `eager` runs the model's own code in every
    step.
    """
    compile: bool | Literal["auto"] = False
    """Whether the layers of a captured step are compiled by PyTorch's Inductor: faster steps after a longer start, and
    results that differ in the last digits (docs/compile.md). Compiled code is cached in `data.cache`. `auto`
    compiles runs whose model is estimated to compute for five minutes or longer. A layer that cannot be
    compiled runs uncompiled."""
    graph_cache: bool = True
    """Whether captured steps are kept in `data.cache`, and read by later runs of the same step (docs/graph.md). False
    captures each time."""
    steps: PositiveInt = 100
    """Optimizer steps. With `epochs` they are computed from the data, and `steps` is left out or null."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training data, in place of `steps`: their sequences over `batch`, rounded up to whole steps."""
    batch: PositiveInt = 32
    """Sequences per optimizer step, over all workers."""
    micro_batch: PositiveInt | None = None
    """Sequences that one worker computes at once; gradients are accumulated over micro-batches. Default: its
    whole share.
    """
    optimizer: OptimizerConfig = AdamWConfig()
    """The optimizer and its settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over time."""
    loss: LossConfig = LossConfig()
    """The training loss. Evaluation uses plain cross-entropy."""
    router_bias_rate: NonNegative = 0.0
    """Step size with which the bias of an expert's router score is corrected after each step: up if its load
    was below the mean, down if above (arXiv 2408.15664; DeepSeek-V3 used 0.001). 0 leaves the biases
    unchanged.
    """
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; null does not clip."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Policy for a step whose loss or gradient norm is not finite; such a step never updates anything. `stop`
    ends the run; `skip` leaves the batch out and continues, as long as the weights are healthy; `rollback`
    returns to the newest healthy checkpoint, also where weights are ruined but finite, and leaves the batch
    out.
    """
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out text."""
    sample: SampleConfig | Literal[False] = SampleConfig()
    """A sample of text at the end; false writes none."""
    log_every: PositiveInt = 1
    """Steps between records of metrics."""
    profile: ProfileConfig | None = None
    """Measure a few steps, operator by operator; needs `engine: graph`. Also set by `train --profile`. Steps of
    pipelines and submodels are traced on each rank."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_has_a_name(cls, given: Any) -> Any:
        return with_a_name(given, AdamWConfig())

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        steps, epochs = given.get("steps"), given.get("epochs")
        if steps is not None and epochs is not None:
            raise ValueError(
                f"give either 'steps' ({steps}) or 'epochs' ({epochs}), and leave the other out or set it to null"
            )
        return {key: value for key, value in given.items() if key != "steps" or value is not None}

    @field_serializer("steps")
    def _only_epochs(self, steps: int) -> int | None:
        # A file that is written from these values computes the steps again.
        return steps if self.epochs is None else None

    @model_validator(mode="after")
    def _batches_divide(self) -> TrainConfig:
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"'micro_batch' ({self.micro_batch}) must divide 'batch' ({self.batch})")
        if self.profile is not None and self.compile is True:
            raise ValueError("'profile' measures single operators; leave compile out")
        if self.profile is not None and self.engine != "graph":
            raise ValueError(
                "'profile' measures the operators of a graph; set engine to graph, or leave it out"
            )
        if self.epochs is None:
            self.check_warmup()
        return self

    def check_warmup(self) -> None:
        """Raises ValueError where warm-up is longer than the run."""
        if self.schedule.warmup_steps(self.steps) > self.steps:
            raise ValueError(
                f"'schedule.warmup' ({self.schedule.warmup}) is longer than 'steps' ({self.steps}); "
                "add train.schedule.warmup=0, or a share of the steps such as train.schedule.warmup=0.1"
            )
