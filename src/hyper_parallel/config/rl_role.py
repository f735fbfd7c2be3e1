"""One role of a reinforcement-learning run: its devices, and how its model is spread over them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from hyper_parallel.config.generate import GenerationStrategy, check_strategy
from hyper_parallel.hub.hub_id import local_folder
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.generation_memory import TIERS
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.strategy.section import PathText, Section

DATA_AXES = ("shard", "replicate")
"""The actor's axes that may take the devices which are left over."""
Devices = tuple[Annotated[int, Field(ge=0, strict=True)], ...]
_NUMBER = {"type": "integer", "minimum": 0}
_WRITTEN = WithJsonSchema(
    {
        "anyOf": [
            _NUMBER,
            {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"},
            {"type": "array", "items": _NUMBER, "minItems": 1},
            {"type": "null"},
        ]
    }
)
"""How a file may write them."""


def _expanded(given: object) -> object:
    """Numbers of devices from 3, [0, 1] or '0-3'."""
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
    if isinstance(given, str):
        first, dash, last = given.partition("-")
        if first.isdigit() and (last.isdigit() if dash else True):
            return tuple(range(int(first), int(last if dash else first) + 1))
        raise ValueError(f"is a number, a list of numbers or a range such as 0-3; got {given!r}")
    return given


class RoleConfig(Section):
    """One role: its devices, counted over all roles, and its strategy."""

    devices: Annotated[Devices | None, _WRITTEN] = None
    """Numbers of devices (on a CPU, of worker processes): a number, a list, or a range such as `0-3`. Roles with the
    same devices take turns on them; others run at the same time. Default: the actor's, which has the first ones.
    """
    strategy: Strategy = Strategy()
    """How the model is spread over the devices."""
    threads: Annotated[int, Field(ge=1, strict=True)] | None = None
    """CPU threads of each worker. Default: `launch.threads`, or the cores divided by all workers."""

    _expand = field_validator("devices", mode="before")(_expanded)

    @field_validator("devices")
    @classmethod
    def _once(cls, given: Devices | None) -> Devices | None:
        if given is not None and (not given or len(set(given)) != len(given)):
            raise ValueError("names each device once, and at least one")
        return given

    @property
    def placed(self) -> Devices:
        """The devices, of a role whose default was filled in (`Roles.actors`, `rollouts`, `references`, `rewards`)."""
        assert self.devices is not None
        return self.devices


_OF_A_GRAPH = ("device", "host", "pool", "flash", "update", "cluster", "expert_load")
"""Keys of `strategy.memory` that only a captured step honours."""


def _check_spread(strategy: Strategy, devices: Devices | None) -> None:
    """Raise ValueError for a strategy that no training or scoring role runs under."""
    axes = strategy.axes
    if strategy.open and (len(axes.open) != 1 or axes.open[0] not in DATA_AXES):
        raise ValueError(
            "'strategy: auto' is not planned for a role; write the degrees of its axes (with 'roles.split: auto' one "
            "of shard and replicate may be auto)"
        )
    if axes.pipeline > 1 or axes.context > 1 or strategy.submodels:
        raise ValueError(
            "an actor, reference or reward model runs under replicate, shard, tensor and expert; leave the others out"
        )
    if devices is not None and not axes.open and len(devices) != strategy.world:
        raise ValueError(
            f"the axes multiply to {strategy.world}, and the devices are {len(devices)}; make them equal"
        )
    memory, plain = strategy.memory, Memory()
    for key in _OF_A_GRAPH:
        if getattr(memory, key) != getattr(plain, key):
            raise ValueError(
                f"'memory.{key}' is of the graph of a training step, and a role runs without one; leave it out "
                "(for roles that take turns: roles.sleep; for activations: memory.recompute)"
            )


class TrainedRole(RoleConfig):
    """A model that is trained, or scores as one that is."""

    @model_validator(mode="after")
    def _runs(self) -> TrainedRole:
        _check_spread(self.strategy, self.devices)
        return self


class RewardRole(RoleConfig):
    """A reward model: the answers' scores, with `task.reward: model`."""

    model: PathText
    """A Transformers folder of a decoder with a sequence-classification head of one label
    (`AutoModelForSequenceClassification`, `num_labels=1`), and its tokenizer; or an id of the Hub, as in
    `model.path`."""
    strategy: Strategy | None = None  # type: ignore[assignment]
    """How the model is spread over the devices. Default: on the actor's devices with its axes and precision, else a
    copy on each."""
    batch: Annotated[int, Field(ge=1, strict=True)] = 64
    """Answers that a copy scores at once, at most."""
    max_length: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Tokens of prompt and answer, at most; a longer answer has no reward. Default: the model's positions."""
    append_eos: bool = False
    """Whether a text ends with the tokenizer's end-of-text token, as the texts that TRL's RewardTrainer trains on.
    Conversations end as the chat template ends them."""

    @property
    def folder(self) -> str:
        """The folder of `model`. Raises ConfigError for an id of the Hub without a commit."""
        return str(local_folder(self.model))

    @property
    def spread(self) -> Strategy:
        """The strategy, of a role whose default was filled in."""
        assert self.strategy is not None
        return self.strategy

    @model_validator(mode="after")
    def _runs(self) -> RewardRole:
        if self.strategy is not None:
            _check_spread(self.strategy, self.devices)
        return self


class RolloutRole(RoleConfig):
    """The model that answers prompts, once or several times."""

    strategy: GenerationStrategy | None = None  # type: ignore[assignment]
    """How one copy of the model is spread; as many copies run as the devices hold, each for itself. Default: on the
    actor's devices with its axes, else on one device each. Its `memory.device` bounds the bytes of weights, KV cache
    and passes; answers for which there is no memory wait."""
    batch: Annotated[int, Field(ge=1, strict=True)] = 64
    """Answers that a copy generates at once, at most."""
    page: Annotated[int, Field(ge=16, multiple_of=16, strict=True)] = 32
    """Tokens of a page of the KV cache."""

    @property
    def spread(self) -> GenerationStrategy:
        """The strategy, of a role whose default was filled in."""
        assert self.strategy is not None
        return self.strategy

    @model_validator(mode="after")
    def _runs(self) -> RolloutRole:
        if self.strategy is None:
            return self
        if self.strategy.axes.context > 1:
            raise ValueError("'axes.context' is for long prompts of `generate`; leave it out of a rollout")
        check_strategy(self.strategy)
        if tier := next((one for one in TIERS if getattr(self.strategy.memory, one) is not None), None):
            raise ValueError(
                f"'memory.{tier}' is for weights that stay the same, and a rollout's change with every update; leave "
                "it out (without memory for more pages, answers wait)"
            )
        if self.devices is not None and len(self.devices) % self.strategy.world:
            raise ValueError(
                f"a copy needs {self.strategy.world} devices, which does not divide the {len(self.devices)} named"
            )
        return self
