"""The whole run file, with its `checkpoint` section."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.config.data import DataConfig
from hyper_parallel.config.launch import LaunchConfig, Wording
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.train import TrainConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import PathText, Section
from hyper_parallel.units import parse_seconds


class CheckpointConfig(Section):
    """Checkpoints: one folder per step, committed when complete, loadable into any strategy and number of
    workers.
    """

    every: Annotated[int | str, Field(json_schema_extra={"examples": ["15min", "2h", 500], "minimum": 0})] = (
        "15min"
    )
    """The interval between checkpoints: a length of time (`90s`, `15min`, `2h`), or a number of steps. 0 writes one at
    the end only. A crash loses at most the steps since the last one.
    """
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep; older ones are removed only after a newer one is durable. With 1 the
    previous one stays as well, since only the next step shows whether a checkpoint's weights are healthy.
    """
    background: bool = True
    """Write in the background; training waits only for the copy out of the device."""
    resume: bool = True
    """Continue from the newest verified checkpoint in the run's folder whose weights are healthy, if there is one."""
    resume_from: Annotated[int, Field(ge=1)] | None = None
    """Continue from the checkpoint of this step instead, whatever its health. Newer checkpoints are ignored
    from then on; repeating the command continues from the newest checkpoint written since. Also set by `train
    --resume-from`.
    """
    allow_other_data: bool = False
    """Continue with other training text, or other packing, than the checkpoint was trained on, from its first
    row. By default other text is refused; moved or renamed files count as the same text.
    """

    @field_validator("every", mode="before")
    @classmethod
    def _every_is_steps_or_time(cls, given: Any) -> Any:
        message = f"must be a number of steps or a length of time such as 15min (got {given!r})"
        if isinstance(given, str):
            try:
                seconds = parse_seconds(given)
            except ValueError:
                raise ValueError(message) from None
            if seconds <= 0:
                raise ValueError(
                    "must be longer than no time at all; 0, a number of steps, writes at the end only"
                )
        elif isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ValueError(message)
        return given

    @model_validator(mode="after")
    def _resumes_or_not(self) -> CheckpointConfig:
        if self.resume_from is not None and not self.resume:
            raise ValueError(
                "'resume_from' names a step to go on from, and 'resume' is false; leave one of them out"
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None if only the last step writes one, or if the interval is a time."""
        return self.every if isinstance(self.every, int) and self.every else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None if the interval is a number of steps."""
        return parse_seconds(self.every) if isinstance(self.every, str) else None


Tracker = Literal["tensorboard", "wandb", "mlflow"]


class RunConfig(Section):
    """One run file: the model, the data, the training, the strategy, the workers and the run's folder."""

    wording: ClassVar = Wording(
        stopping="the workers finish their step and save", kept="'out' has its metrics and logs"
    )

    version: Literal[1]
    """The version of the file's format."""
    out: PathText
    """The run's folder for metrics, logs and checkpoints, relative to the working directory."""
    seed: int = 0
    """All random numbers are functions of this seed, the step and the global element."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The training and evaluation data."""
    train: TrainConfig = TrainConfig()
    """The training loop: steps, batch, optimizer, schedule."""
    strategy: Strategy = Strategy()
    """The strategy: axes, precision, memory and overlap; `auto`: the planner chooses."""
    launch: LaunchConfig = LaunchConfig()
    """The workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    trackers: list[Tracker] = Field(default_factory=lambda: list[Tracker](["tensorboard"]))
    """Trackers besides `metrics.jsonl`, which is always written."""

    @model_validator(mode="after")
    def _workers_fit(self) -> RunConfig:
        if self.open:
            return self._open_workers_fit()
        world, workers = self.strategy.world, self.launch.workers
        if workers is not None and workers not in (1, world):
            product = self.strategy.product or "no axis is set"
            raise ValueError(
                f"the strategy's axes multiply to {world} ({product}), but 'launch.workers' is {workers}; make them "
                "equal, leave 'launch.workers' out, or set it to 1 for the one-device run"
            )
        if self.train.batch % self.effective_strategy.axes.data:
            raise ValueError(
                f"'train.batch' ({self.train.batch}) must be a multiple of replicate · shard "
                f"({self.effective_strategy.axes.data}), so that every worker gets as many sequences"
            )
        tensor = self.effective_strategy.axes.tensor
        if self.effective_strategy.sequence and self.data.sequence % tensor:
            raise ValueError(
                f"'strategy.sequence' splits each sequence over axes.tensor: 'data.sequence' ({self.data.sequence}) "
                f"must be a multiple of {tensor}"
            )
        share = self.train.batch // self.effective_strategy.axes.data
        if self.train.micro_batch is not None and share % self.train.micro_batch:
            raise ValueError(
                f"'train.micro_batch' ({self.train.micro_batch}) must divide a worker's share of the batch "
                f"({self.train.batch} / {self.effective_strategy.axes.data} = {share})"
            )
        return self

    @model_validator(mode="after")
    def _tokenizer_fits_the_weights(self) -> RunConfig:
        tokenizer = self.data.tokenizer
        named = tokenizer.path is not None or tokenizer.vocab_size is not None
        if tokenizer.replace and (self.model.path is None or not named):
            raise ValueError(
                "'data.tokenizer.replace' lets another tokenizer stand in for that of 'model.path'; name both (the "
                "other one by 'data.tokenizer.path' or 'vocab_size'), or leave it out"
            )
        if self.model.path is not None and named and tokenizer.path is None and not tokenizer.replace:
            raise ValueError(
                "'data.tokenizer.vocab_size' trains a new tokenizer, whose ids mean nothing to the weights of "
                "'model.path'; leave it out (or null) to use the folder's own, or set 'data.tokenizer.replace' to true"
            )
        return self

    @model_validator(mode="after")
    def _budget_needs_the_graph(self) -> RunConfig:
        if self.strategy.memory.device is None:
            return self
        if self.train.engine != "graph":
            raise ValueError(
                "'strategy.memory.device' is kept by moving what the step's graph holds; set train.engine to graph, or "
                "leave the budget out"
            )
        if self.train.compile is True:
            raise ValueError(
                "'strategy.memory.device' needs every operator of the step to be seen, and 'train.compile: true' joins "
                "them; set train.compile to false, or leave the budget out"
            )
        return self

    @model_validator(mode="after")
    def _submodels_need_the_graph(self) -> RunConfig:
        if not self.strategy.submodels or self.open or not self.effective_strategy.submodels:
            return self
        if self.train.engine != "graph":
            raise ValueError(
                "'strategy.submodels': parts are cut from a captured step; set train.engine to graph"
            )
        self._refuse_compared()
        return self

    @model_validator(mode="after")
    def _pipeline_needs_the_graph(self) -> RunConfig:
        strategy, train = self.strategy if self.open else self.effective_strategy, self.train
        if strategy.axes.pipeline == 1:
            return self
        if train.engine != "graph":
            raise ValueError(
                "'axes.pipeline': stages are cut from the captured step; set train.engine to graph, or leave the "
                "pipeline out"
            )
        self._refuse_compared()
        if not self.open and self.micro_batches < strategy.axes.pipeline:
            raise ValueError(
                f"'train.batch' ({train.batch}) is {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} "
                f"of {self.micro_batch} rows for each data rank, and a pipeline of {strategy.axes.pipeline} needs at "
                f"least {strategy.axes.pipeline}; "
                "make 'train.batch' larger, 'train.micro_batch' smaller, or axes.pipeline smaller"
            )
        return self

    def _refuse_compared(self) -> None:
        """Raise ValueError for a profile that would be compared, where each rank has a trace of its own."""
        if self.train.profile is not None and self.train.profile.cluster is not None:
            raise ValueError(
                "'train.profile.cluster' compares a step that is one graph with its prediction, and parts of a model "
                "on several ranks are traced; leave cluster out, and see hyper-parallel simulate for the prediction"
            )

    @property
    def micro_batch(self) -> int:
        """Rows that a worker computes at once; in a pipeline by default few enough for four micro-batches a rank."""
        share = self.train.batch // self.effective_strategy.axes.data
        if self.train.micro_batch is not None:
            return self.train.micro_batch
        ranks = self.effective_strategy.axes.pipeline
        if ranks == 1:
            return share
        least = min(share, 4 * ranks)
        return max(rows for rows in range(1, share + 1) if share % rows == 0 and share // rows >= least)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each data rank."""
        return self.train.batch // self.effective_strategy.axes.data // self.micro_batch

    def _open_workers_fit(self) -> RunConfig:
        fixed, workers = self.strategy.axes.world, self.launch.workers
        if workers is not None and workers % fixed:
            raise ValueError(
                f"the axes that are written multiply to {fixed}, which does not divide 'launch.workers' ({workers}); "
                "make it a multiple, or leave more axes open"
            )
        return self

    @property
    def open(self) -> bool:
        """Whether the planner has to choose axes, or a budget, before the run can begin; no axes for one device."""
        alone = self.launch.workers == 1 and bool(self.strategy.axes.open)
        return self.strategy.open and not alone

    @property
    def effective_strategy(self) -> Strategy:
        """The strategy that runs: the declared one, with all axes 1 when `launch.workers` is 1.

        Raises ConfigError where axes are open.
        """
        if self.open:
            left = ", ".join(self.strategy.axes.open)
            named = f"strategy.axes leaves {left}" if left else "strategy.memory leaves its bytes"
            raise ConfigError(
                f"{named} to the planner, which chooses when `hyper-parallel train` knows its "
                "workers; `hyper-parallel simulate FILE --cluster NAME --ranks N` shows what it would choose for a "
                "cluster. Or write the degrees"
            )
        return self.strategy.on_one_device if self.launch.workers == 1 else self.strategy

    @property
    def keeps_logs(self) -> bool:
        """They stay in the run's folder."""
        return True

    @property
    def model_type(self) -> str | None:
        """The Transformers family, where the file names it."""
        return None if self.model.config is None else str(self.model.config["model_type"])
