"""Files and overrides of generation: of `generate`, of `simulate --generate`, and of `plan --generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from hyper_parallel.config.inference import GenerationWorkload, Inference, PredictedInference
from hyper_parallel.config.launch import LaunchConfig, Wording
from hyper_parallel.config.load import build, load_file
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.hub.hub_id import parse
from hyper_parallel.strategy import Axes, Strategy
from hyper_parallel.strategy.memory import GenerationMemory, Memory
from hyper_parallel.strategy.section import PathText, Section
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.transformers_config import to_config


def published(name: str) -> dict[str, Any]:
    """The section of a published model. Raises ConfigError for a name that is not known."""
    return {"config": {**to_config(shape(name)), "dtype": "bfloat16"}}


def _generates(model: ModelConfig) -> ModelConfig:
    """Raise ValueError for a key of training, which would be ignored."""
    if model.adapter is not None:
        raise ValueError(
            "'adapter' is trained, and generation takes the weights as they are, those of a run with its adapters "
            "merged; leave it out"
        )
    if model.attention != "auto":
        raise ValueError("'attention' is for training, and generation has attention of its own; leave it out")
    return model


PredictedModel = Annotated[
    ModelConfig,
    BeforeValidator(lambda given: published(given) if isinstance(given, str) else given),
    AfterValidator(_generates),
]
"""A published model by its name, a config, or a folder."""


_TRAINING = "is for training, and generation does not use it"
_UNUSED = {
    "pipeline": f"section 'pipeline' {_TRAINING}",
    "sequence": f"'sequence' {_TRAINING}; the tokens of a pass are split by axes.context",
    "context": f"section 'context' {_TRAINING}; axes.context needs no method here",
    "submodels": f"section 'submodels' {_TRAINING}",
    "overlap": f"section 'overlap' {_TRAINING}",
    "precision": "section 'strategy.precision' is for training; generation computes in the dtype of the model's folder",
    "expert_replicas": f"'expert_replicas' {_TRAINING}",
    "expert_balance": f"section 'expert_balance' {_TRAINING}",
}
"""Keys of `strategy` that must be left out, with the reason."""


class GenerationStrategy(Strategy):
    """How a model and requests are spread over workers, and the memory of each worker's device."""

    plans_memory: ClassVar = False

    memory: GenerationMemory = GenerationMemory()  # type: ignore[assignment]
    """The byte budget of the device, and tiers for what does not fit."""

    @property
    def on_one_device(self) -> GenerationStrategy:
        """As `Strategy`'s."""
        return self.model_copy(update={"axes": Axes()})


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError for what generation does not use, which would be ignored."""
    if strategy.open:
        raise ValueError(
            "'auto' leaves keys to the planner, which plans training; write the degrees of the axes of 'strategy', and "
            "leave 'memory: auto' out"
        )
    if strategy.axes.pipeline > 1:
        raise ValueError(
            f"'axes.pipeline' ({strategy.axes.pipeline}): generation does not run pipelines; use tensor_x, tensor_y, "
            "shard, expert, replicate or context"
        )
    plain = Strategy(axes=strategy.axes)
    for key, reason in _UNUSED.items():
        if getattr(strategy, key) != getattr(plain, key):
            raise ValueError(f"{reason}; leave it out")
    budget_of(strategy)


def budget_of(strategy: Strategy) -> GenerationMemory:
    """The memory budget of a strategy. Raises ValueError for a key of training."""
    if isinstance(strategy, GenerationStrategy):
        return strategy.memory
    given = {key: value for key, value in strategy.memory if value != Memory.model_fields[key].get_default()}
    if other := next((key for key in given if key not in GenerationMemory.model_fields), None):
        raise ValueError(f"'memory.{other}' {_TRAINING}; leave it out")
    return GenerationMemory(**given)


class GenerateConfig(Section):
    """Settings of `hyper-parallel generate` beside the model and the prompts."""

    wording: ClassVar = Wording(
        stopping="finished answers are kept",
        safe="finished answers are kept",
        resume="run the same command again: a batch goes on after the finished answers",
    )

    version: Literal[1] = 1
    """Version of the format."""
    inference: Inference = Inference()
    """How answers are drawn, and how requests share the device."""
    strategy: GenerationStrategy = GenerationStrategy()
    """How the model and the requests are spread over workers: `axes`, `placement`, `rules`; and their `memory`."""
    launch: LaunchConfig = LaunchConfig()
    """The workers."""
    logs: PathText | None = None
    """A folder for the logs of several workers. Default: none are left."""
    model: PredictedModel | None = None
    """The model of a file that `simulate --generate` reads. The command is given its folder, which must be `model.path`
    where the file has one.
    """
    workload: GenerationWorkload | None = None
    """The requests that `simulate --generate` predicts for. The command answers the prompts that it is given."""

    @model_validator(mode="after")
    def _generation_uses_it(self) -> GenerateConfig:
        check_strategy(self.strategy)
        axes, workers = self.strategy.axes, self.launch.workers
        if workers is not None and workers not in (1, axes.world):
            raise ValueError(
                f"the strategy's axes multiply to {axes.world}{f' ({axes.product})' if axes.world > 1 else ''}, but "
                f"'launch.workers' is {workers}; make them equal, leave 'launch.workers' out, or set it to 1 for one "
                "device"
            )
        return self

    @property
    def open(self) -> bool:
        """Never: the planner chooses nothing for generation."""
        return False

    @property
    def effective_strategy(self) -> GenerationStrategy:
        """The strategy that runs: with all axes 1 when `launch.workers` is 1."""
        return self.strategy.on_one_device if self.launch.workers == 1 else self.strategy

    @property
    def keeps_logs(self) -> bool:
        """Only in a folder that is named."""
        return self.logs is not None

    @property
    def model_type(self) -> str | None:
        """Not known before the model's folder is read."""
        return None


class GenerateRun(GenerateConfig):
    """The same with the folder of the model and the prompts, for workers."""

    out: PathText
    """The folder of the workers' logs: `logs`, or one that the command removes."""
    folder: PathText
    """Of the model."""
    prompt: str | None = None
    """A text, whose continuation is printed; or else:"""
    chat: str | None = None
    """A user's message, whose answer is printed; or else:"""
    source: PathText | None = None
    """The file of prompts."""
    answers: PathText | None = None
    """The file for answers."""


def load_generate(overrides: Sequence[str] = (), file: Path | None = None) -> GenerateConfig:
    """Settings of a file with overrides such as ``"inference.max_tokens=40"``. Raises ConfigError as `load` does."""
    if file is not None:
        return load_file(GenerateConfig, file, overrides)
    return build(GenerateConfig, [("generate", {"version": 1})], overrides)


def check_folder(settings: GenerateConfig, folder: Path) -> None:
    """Raise ConfigError where the settings are of a file that describes another folder's model."""
    named = settings.model.path if settings.model is not None else None
    if named is not None and Path(named).expanduser().resolve() != folder.expanduser().resolve():
        raise ConfigError(
            f"model.path: the settings are for {named}, and MODEL is {folder}; make them equal, or leave 'model' out"
        )


def generation_memory(given: Mapping[str, Any]) -> GenerationMemory:
    """The section `strategy.memory` from its keys. Raises ConfigError as `load` does."""
    file = {"version": 1, "strategy": {"memory": dict(given)}}
    return build(GenerateConfig, [("generate", file)], ()).strategy.memory


def inference_settings(given: Mapping[str, Any]) -> Inference:
    """The section `inference` from its keys. Raises ConfigError as `load` does."""
    return build(GenerateConfig, [("generate", {"version": 1, "inference": dict(given)})], ()).inference


def for_workers(settings: GenerateConfig, **given: Any) -> GenerateRun:
    """The same settings with the remaining fields of a `GenerateRun`."""
    return GenerateRun.model_validate(
        {**{key: getattr(settings, key) for key in GenerateConfig.model_fields}, **given}
    )


class PlannedGeneration(Section):
    """Keys of a plan of generation."""

    version: Literal[1] = 1
    """Version of the format."""
    strategy: GenerationStrategy = GenerationStrategy()
    """Axes that are given, and budgets: `memory.device` with the tiers."""
    inference: PredictedInference = PredictedInference()
    """`batch`: requests at once; `rows` and `page`, if given, are kept."""
    workload: GenerationWorkload = GenerationWorkload()
    """The requests."""

    @model_validator(mode="after")
    def _generation_uses_it(self) -> PlannedGeneration:
        if not self.strategy.open:
            check_strategy(self.strategy)
        return self


def load_plan(overrides: Sequence[str] = ()) -> PlannedGeneration:
    """From overrides such as ``"workload.prompt_tokens=4096"``. Raises ConfigError as `load` does."""
    found = build(PlannedGeneration, [("plan", {"version": 1})], overrides)
    for axis in ("context", "pipeline", "shard", "tensor_y"):
        if getattr(found.strategy.axes, axis) > 1:
            raise ConfigError(
                f"strategy.axes.{axis}: plans of generation have tensor, expert and replicate; leave it out"
            )
    return found


class GenerationRun(Section):
    """Generation whose time and memory are predicted: what generates, how, and for which requests."""

    version: Literal[1]
    """The version of the file's format."""
    model: PredictedModel
    """The model: a published one by its name, a config, or a folder."""
    strategy: GenerationStrategy = GenerationStrategy()
    """Axes, and the memory budget with its tiers."""
    inference: PredictedInference = PredictedInference()
    """How requests share the device."""
    workload: GenerationWorkload = GenerationWorkload()
    """The requests."""

    @model_validator(mode="after")
    def _generation_uses_it(self) -> GenerationRun:
        if not self.strategy.open:
            check_strategy(self.strategy)
        return self


def load_generation(given: str, overrides: Sequence[str] = ()) -> GenerationRun:
    """The run that a YAML file describes, or that of a published model, a Transformers folder or an id of the Hub, with
    dotted overrides.

    Raises ConfigError as `load` does.
    """
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return load_file(GenerationRun, path, overrides)
    known = path.is_dir() or parse(given, "model") is not None
    model: Any = {"path": given} if known else published(given)
    return build(GenerationRun, [(given, {"version": 1, "model": model})], overrides)
