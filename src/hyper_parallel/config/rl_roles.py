"""`roles` section: which devices each role has, and how its model is spread over them.

With `split: auto` (in short `roles: auto`) the roles have no devices yet: these are split from measured times before
the run. What is written of strategies stays; the actor's open data axis takes the devices that are left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from hyper_parallel.config.generate import GenerationStrategy, check_strategy
from hyper_parallel.hub.hub_id import local_folder
from hyper_parallel.strategy import Axes, Strategy
from hyper_parallel.strategy.memory import TIERS, Bytes, Memory
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
_PLANNED = "is for the planner of training steps, and 'roles.split: auto' measures"
_OF_A_STEP = {
    "context": "section 'context' is the method of axes.context, under which no role runs",
    "overlap": "section 'overlap' schedules the collectives of a captured step, and a role runs the model's own code",
    "expert_balance": "'expert_balance' moves experts between the steps of `train`",
    "cluster": f"'cluster' {_PLANNED}",
    "tries": f"'tries' {_PLANNED}",
    "tries_seconds": f"'tries_seconds' {_PLANNED}",
}
"""Keys of `strategy` that no role honours, with the reason."""


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
    for key, reason in _OF_A_STEP.items():
        if getattr(strategy, key) != Strategy.model_fields[key].get_default():
            raise ValueError(f"{reason}; leave it out")
    memory, plain = strategy.memory, Memory()
    for key in _OF_A_GRAPH:
        if getattr(memory, key) != getattr(plain, key):
            raise ValueError(
                f"'memory.{key}' is planned for the shape of a step's rows, and a role's change with the answers; "
                "leave it out (for roles that take turns: roles.sleep; for activations: memory.recompute)"
            )


_OWN_CODE = "a role that scores runs the model's own code; leave it out"


class TrainedRole(RoleConfig):
    """A model that is trained, or scores as one that is."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "engine": _OWN_CODE,
        "compile": _OWN_CODE,
        "profile": "of the roles' models the actor's updates are traced; leave it out",
    }

    @model_validator(mode="after")
    def _runs(self) -> TrainedRole:
        _check_spread(self.strategy, self.devices)
        return self


class ActorProfile(Section):
    """PyTorch's traces of some of the actor's steps, one of each worker, in ``profile`` of the run's folder."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "cluster": "it compares a step of `train` with its prediction, and an actor's steps are traced; leave it out"
    }

    steps: Annotated[int, Field(ge=1, strict=True)] = 5
    """Number of traced steps, after the first two of a start."""


class ActorRole(TrainedRole):
    """The model that is trained."""

    elsewhere: ClassVar[Mapping[str, str]] = {}

    engine: Literal["eager", "graph"] = "eager"
    """`eager` runs the model's own code in every update. `graph` captures an update for each number and length of its
    rows, as `train` does its step, and runs that; rows are padded to a power of two, so that there are few lengths. An
    update that cannot be captured runs as `eager`, and a message gives the reason."""
    compile: bool = False
    """Whether the layers of captured updates are compiled, as `train.compile` has it. Compiled code is cached in
    `.cache/hyper-parallel`."""
    profile: ActorProfile | None = None
    """Trace a few steps."""

    @model_validator(mode="after")
    def _runs(self) -> ActorRole:
        if self.compile and self.engine != "graph":
            raise ValueError(
                "'compile' is of captured updates; set 'engine' to graph beside it, or leave it out"
            )
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


class WeightsConfig(Section):
    """How weights travel from the actor to a rollout that has a copy of them."""

    dtype: Literal["bfloat16"] | None = None
    """Round them to this on their way. Default: they travel in the narrower dtype of both sides."""
    delta: bool = False
    """Send only what has changed since the last version; exact. Both sides keep a copy of that version."""
    bucket_bytes: Annotated[int, Field(ge=8, strict=True)] = 32 * 2**20
    """The most bytes of one message."""


class SleepConfig(Section):
    """Where what roles that take turns on the same devices do not need goes, in the turns of the others."""

    host: Bytes | None = None
    """Host memory of each worker, at most. On a CPU this is the memory of the device, too: nothing is gained there."""
    flash: str | None = None
    """A folder on a fast disk, for what `host` has no room for. The files in it are removed when the run ends."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> SleepConfig:
        if self.host is None and self.flash is None:
            raise ValueError("set 'host' to a number of bytes, or 'flash' to a folder on a fast disk")
        return self


class Roles(Section):
    """The roles of a run. Those that are left out have the devices of the actor."""

    actor: ActorRole = ActorRole()
    """Trains."""
    rollout: RolloutRole = RolloutRole()
    """Generates."""
    reference: TrainedRole | None = None
    """Where the KL divergence is measured from; needed with `rl.kl` above 0. Default: as the actor."""
    reward: RewardRole | None = None
    """A model that scores answers, with `task.reward: model`."""
    weights: WeightsConfig = WeightsConfig()
    """How weights travel to the rollout (docs/rl-weights.md)."""
    sleep: SleepConfig | None = None
    """Offload what a role needs in its own turn only, where roles have the same devices: while answers are generated
    the optimizer, the critic, the reference, and the actor's weights where the rollout has its own; while the actor
    trains the KV cache, the reference and the rollout's own weights (the sleep mode of vLLM, `param_offload` and
    `optimizer_offload` of verl). Default: everything stays."""
    engine: Literal["local", "ray"] = "local"
    """Who starts the workers: this command on this machine, or Ray (an extra) on one or more (docs/roles.md)."""
    address: str | None = None
    """host:port of the Ray cluster to join. Default: one is started on this machine, and ends with the run."""
    restarts: Annotated[int, Field(ge=0, strict=True)] = 10
    """How often the workers of one group are started again after some were lost; then the run ends."""
    split: Literal["auto"] | None = None
    """`auto` (`roles: auto` in short): the devices of the actor and the rollout are chosen before the first step, from
    times that are measured on them: all devices take turns, or some train while the others generate. Written strategies
    stay; the actor's data axis (`shard`, or `replicate: auto`) takes what is left over."""
    devices: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = None
    """Number of devices that `split: auto` may use. Default: `launch.workers`, or this machine's accelerators, or its
    cores where it has none."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, given: object) -> object:
        return {"split": "auto"} if given == "auto" else given

    @property
    def open(self) -> bool:
        """Whether the devices are still to be chosen."""
        return self.split is not None

    @model_validator(mode="after")
    def _split_or_written(self) -> Roles:
        named: dict[str, RoleConfig] = {"actor": self.actor, "rollout": self.rollout}
        if not self.open:
            if self.devices is not None:
                raise ValueError(
                    f"'devices' ({self.devices}) is the number that 'split: auto' may use; add that, or write the "
                    "devices of each role instead"
                )
            if self.reference is not None:
                named["reference"] = self.reference
            for name, role in named.items():
                if role.strategy is not None and role.strategy.open:
                    raise ValueError(
                        f"'{name}' has an axis that is auto, which only 'split: auto' fills in; write its degree"
                    )
            return self
        for name, role in named.items():
            if role.devices is not None:
                raise ValueError(
                    f"'split: auto' chooses the devices, and '{name}.devices' is written; leave one of them out"
                )
        if self.reference is not None:
            raise ValueError(
                "with 'split: auto' the reference is on the actor's workers; leave 'reference' out"
            )
        if self.reward is not None:
            raise ValueError(
                "'split: auto' does not place a reward model; write the devices of each role, or take another reward"
            )
        return self

    @property
    def actors(self) -> ActorRole:
        """The actor, its devices filled in."""
        return _on(self.actor, tuple(range(self.actor.strategy.world)))

    @property
    def rollouts(self) -> RolloutRole:
        """The rollout, its devices and axes filled in."""
        role, actor = self.rollout, self.actors
        if role.strategy is None:
            shared = role.devices in (None, actor.placed)
            strategy = GenerationStrategy(axes=actor.strategy.axes) if shared else GenerationStrategy()
            role = role.model_copy(update={"strategy": strategy})
        return _on(role, actor.placed)

    @property
    def references(self) -> TrainedRole:
        """The reference, its devices filled in."""
        return self.actors if self.reference is None else _on(self.reference, self.actors.placed)

    @property
    def rewards(self) -> RewardRole | None:
        """The reward model's role, its devices and strategy filled in; None where there is none."""
        role, actor = self.reward, self.actors
        if role is None:
            return None
        devices = role.devices or actor.placed
        if role.strategy is None:
            spread = Strategy(axes=Axes(replicate=len(devices)))
            if devices == actor.placed:
                spread = Strategy(axes=actor.strategy.axes, precision=actor.strategy.precision)
            role = role.model_copy(update={"strategy": spread})
        return _on(role, devices)

    @model_validator(mode="after")
    def _address_is_ray(self) -> Roles:
        if self.address is not None and self.engine != "ray":
            raise ValueError("'address' is that of a Ray cluster; set 'engine' to ray, or leave it out")
        return self

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Roles:
        if self.open:
            return self
        actor, rollout, reference = self.actors, self.rollouts, self.references
        worlds = {"rollout": rollout.spread.world, "reference": reference.strategy.world}
        for name, role in (("rollout", rollout), ("reference", reference)):
            world = worlds[name]
            fits = len(role.placed) == world or (name == "rollout" and role.placed != actor.placed)
            if not fits or len(role.placed) % world:
                raise ValueError(
                    f"'{name}' has {len(role.placed)} devices, and its axes multiply to {world}; on the actor's "
                    "devices make them equal (with replicate, for copies)"
                )
            for other, devices in (("actor", actor.placed), ("rollout", rollout.placed)):
                if role.placed != devices and set(role.placed) & set(devices):
                    raise ValueError(
                        f"'{name}' and '{other}' share some of their devices; give them the same ones, or none in "
                        "common"
                    )
        if self.reference is not None and reference.placed == rollout.placed != actor.placed:
            raise ValueError(
                "'reference' and 'rollout' have the same devices; give it the actor's, or its own"
            )
        return self

    @model_validator(mode="after")
    def _reward_is_apart(self) -> Roles:
        if self.reward is None:
            return self
        role, actor = self.rewards, self.actors
        assert role is not None
        if len(role.placed) != role.spread.world:
            raise ValueError(
                f"'reward' has {len(role.placed)} devices, and its axes multiply to {role.spread.world}; make them "
                "equal (with replicate, for copies), or leave 'strategy' out"
            )
        if role.placed == actor.placed:
            return self
        for name, other in (("actor", actor), ("rollout", self.rollouts), ("reference", self.references)):
            if set(role.placed) & set(other.placed):
                raise ValueError(
                    f"'reward' and '{name}' share devices; give the reward model all of the actor's, or its own"
                )
        return self


Role = TypeVar("Role", bound=RoleConfig)


def _on(role: Role, devices: Devices) -> Role:
    return role if role.devices is not None else role.model_copy(update={"devices": devices})
