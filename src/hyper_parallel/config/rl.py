"""The file of `hyper-parallel rl`, with its sections `rl`, `task`, `warmup` and `eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.config.launch import LaunchConfig, Wording
from hyper_parallel.config.load import load_file
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.rl_roles import RoleConfig, Roles
from hyper_parallel.config.rl_unused import unused
from hyper_parallel.config.run import CheckpointConfig, Tracker
from hyper_parallel.config.train import AdamWConfig, OptimizerConfig, ScheduleConfig, with_a_name
from hyper_parallel.strategy.section import NonNegative, PathText, Section

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(ge=0, le=1)]
Algorithm = Literal["grpo", "dapo", "rloo", "reinforce++", "ppo"]
Normalization = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
Ratio = Literal["token", "answer", "answer_mean"]
Order = Literal["fifo", "window", "discard"]
NORMALIZATIONS: dict[Algorithm, Normalization] = {
    "grpo": "grpo",
    "dapo": "dapo",
    "rloo": "grpo",
    "reinforce++": "bnpo",
    "ppo": "bnpo",
}


_OPTIMIZER = AdamWConfig(lr=1e-6, weight_decay=0.0)
_OF_PAIRS = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rdpo")
"""Algorithms that generate nothing."""


class CriticTraining(Section):
    """PPO's critic: a copy of the policy with a head of one value."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate."""
    clip: NonNegative | None = 0.2
    """Values move at most this far from those of before the step; null does not bound them."""
    gamma: Share = 1.0
    """Discount of later rewards."""
    lam: Share = 1.0
    """λ of generalized advantage estimation (arXiv 1506.02438)."""


class RLTraining(Section):
    """The algorithm and its objective."""

    elsewhere: ClassVar[Mapping[str, str]] = {"profile": "it is the actor's: roles.actor.profile"}

    algorithm: Algorithm = "grpo"
    """GRPO (arXiv 2402.03300), DAPO (2503.14476), RLOO (2402.14740), REINFORCE++ (2501.03262) or PPO (1707.06347)."""
    steps: PositiveInt = 100
    """Batches to train on."""
    prompts: PositiveInt = 32
    """Prompts of a batch."""
    group: PositiveInt = 8
    """Answers to each prompt."""
    max_tokens: PositiveInt = 256
    """Tokens of an answer, at most."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """At which answers are drawn, and at which log-probabilities are computed."""
    minibatches: PositiveInt = 1
    """Optimizer updates for each batch, each on a part of its prompts."""
    micro_batch: PositiveInt | None = None
    """Answers that a worker computes at once. Default: all of its share."""
    clip: NonNegative = 0.2
    """The probability ratio is clipped to 1 − clip … 1 + clip."""
    clip_high: NonNegative | None = None
    """The upper side of it. Default: as `clip`, and 0.28 for `dapo`."""
    ratio: Ratio | None = None
    """Of what the probability ratio is: of each token (`token`), of the whole answer (`answer`, the product over its
    tokens, as RLOO has it), or its geometric mean over the tokens (`answer_mean`, GSPO's, arXiv 2507.18071, which clips
    far closer to 1). Those of answers take another forward pass for each update. Default: `answer` for `rloo`, else
    `token`."""
    objective: Literal["behaviour", "decoupled", "truncated"] = "behaviour"
    """Ratios are to the log-probabilities that the rollout recorded (`behaviour`), or to those of the trainer before
    the step, weighted by proximal over behaviour (`decoupled`, AReaL, arXiv 2505.24298; `truncated`: the weight is at
    most `truncate`)."""
    truncate: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of importance weights."""
    normalization: Normalization | None = None
    """What the sum over tokens is divided by: each answer's tokens (`grpo`), the tokens of the update (`bnpo`),
    answers · max_tokens (`dr_grpo`), the tokens of the whole batch (`dapo`). Default: that of the algorithm."""
    scale: Literal["group", "batch", "none"] = "group"
    """Advantages of a group are divided by its standard deviation, that of the batch, or not."""
    kl: NonNegative = 0.0
    """Coefficient of the KL divergence to the reference model. 0 needs no reference."""
    equal_groups: Literal["keep", "drop"] | None = None
    """Groups whose answers have the same reward: train on them, or draw others (dynamic sampling). Default: `drop` for
    `dapo`, else `keep`."""
    staleness: Annotated[int, Field(ge=0, strict=True)] = 0
    """η: optimizer updates by which the version that trains a token is newer than the one that drew it, at most. 0 is
    synchronous; 2 · `minibatches` - 1 is one step off: a batch is generated while the one before it is trained."""
    order: Order = "fifo"
    """Of answers that are trained: in the order in which their prompts started, or as they end (`window` waits for
    what would become too old, `discard` drops it)."""
    chunk: PositiveInt = 8
    """Passes of a rollout between two looks for new prompts and weights."""
    optimizer: OptimizerConfig = _OPTIMIZER
    """The actor's."""
    schedule: ScheduleConfig = ScheduleConfig(name="constant")
    """Of the learning rate, over `steps` · `minibatches` updates."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient norm is clipped to this."""
    critic: CriticTraining = CriticTraining()
    """Of `ppo`."""

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_is_there(cls, given: Any) -> Any:
        if isinstance(given, str) and given.lower() in _OF_PAIRS:
            raise ValueError(
                f"{given} trains on pairs of answers that exist, and 'rl' on answers that it generates and rewards; "
                f"no command trains by it: hyper_parallel.rl.losses.preference has DPO's and KTO's losses for a loop "
                f"of your own, and 'rl.algorithm' is one of {', '.join(NORMALIZATIONS)}"
            )
        return given

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_has_a_name(cls, given: Any) -> Any:
        return with_a_name(given, _OPTIMIZER)

    @model_validator(mode="after")
    def _fits(self) -> RLTraining:
        if self.prompts % self.minibatches:
            raise ValueError(f"'minibatches' ({self.minibatches}) must divide 'prompts' ({self.prompts})")
        if self.algorithm in ("grpo", "dapo", "rloo") and self.group < 2:
            raise ValueError(
                f"'group' is {self.group}: {self.algorithm} compares answers to one prompt; make it 2 or more"
            )
        if self.algorithm in ("ppo", "reinforce++") and self.of_answers:
            raise ValueError(
                f"'ratio' is '{self.ratio}': advantages of {self.algorithm} differ from token to token; leave it "
                "out, or take rloo or grpo"
            )
        off = 2 * self.minibatches - 1
        if 0 < self.staleness < off:
            raise ValueError(
                f"'staleness' ({self.staleness}) counts optimizer updates, and a batch has {self.minibatches}; make it "
                f"0 (synchronous) or at least {off} (one step off)"
            )
        return self

    @property
    def clips(self) -> tuple[float, float]:
        """The lower and upper side."""
        high = self.clip_high
        if high is None:
            high = 0.28 if self.algorithm == "dapo" else self.clip
        return self.clip, high

    @property
    def ratios(self) -> Ratio:
        """The unit of the probability ratio."""
        return self.ratio or ("answer" if self.algorithm == "rloo" else "token")

    @property
    def of_answers(self) -> bool:
        """Whether it is one number for each answer."""
        return self.ratios != "token"

    @property
    def normalized(self) -> Normalization:
        """The divisor of the sum over tokens."""
        return self.normalization or NORMALIZATIONS[self.algorithm]

    @property
    def drops_equal(self) -> bool:
        """Whether groups without reward variance are replaced."""
        return (self.equal_groups or ("drop" if self.algorithm == "dapo" else "keep")) == "drop"

    @property
    def answers(self) -> int:
        """Answers of a batch."""
        return self.prompts * self.group

    @property
    def updates(self) -> int:
        """Updates of the optimizer in the whole run."""
        return self.steps * self.minibatches


REWARD_MODEL = "model"
"""Of `task.reward`: in place of a function's name."""


class TaskConfig(Section):
    """Prompts and rewards: a synthetic task by its name, or a file."""

    name: str | None = None
    """A task whose prompts are computed: `sort` and others (docs/rl-rewards.md)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the task, such as `digits`."""
    prompts: PathText | None = None
    """A JSONL file: each row has `prompt`, a text or the messages of a conversation, and what the reward needs, such as
    `answer`."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """Of a row whose prompt leaves the model no positions for `rl.max_tokens`: refuse the file before the first step,
    leave the row out, or leave out the prompt's first tokens."""
    held_out: PathText | None = None
    """The same, for evaluation."""
    reward: str = "exact_match"
    """`exact_match`, `math`, `code`, a function of yours (`package.module:function` or `file.py:function`), or `model`:
    the reward model of `roles.reward`."""
    environment: str | None = None
    """Instead of a reward, for answers of several turns: `calculator`, or a class of yours (`file.py:Class`), whose
    `step` gives the text or the message that the policy reads next, and rewards."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the reward or the environment, such as `isolation` for `code` (docs/rl-rewards.md)."""
    time_limit: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for one reward."""
    workers: PositiveInt = 1
    """Processes that compute rewards."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The share of a batch's answers whose rewards may fail (raise, take too long, be no number); the run ends where
    more do, or all."""
    shuffle_rewards: bool = False
    """Give rewards to other answers than they belong to: a control, with which nothing can be learnt."""

    @model_validator(mode="after")
    def _named(self) -> TaskConfig:
        if (self.name is None) == (self.prompts is None):
            raise ValueError("give 'name', a synthetic task, or 'prompts', a file; one of them")
        if (
            self.environment is not None
            and "reward" in self.model_fields_set
            and self.reward != "exact_match"
        ):
            raise ValueError("'environment' gives the rewards; leave 'reward' out")
        own = TaskConfig.model_fields
        for key in ("options", "time_limit", "workers") if self.has_reward_model else ():
            if getattr(self, key) != own[key].get_default(call_default_factory=True):
                raise ValueError(f"{key!r} is for reward functions; leave it out with a reward model")
        return self

    @property
    def has_reward_model(self) -> bool:
        """Whether rewards are the scores of `roles.reward`."""
        return self.environment is None and self.reward == REWARD_MODEL


_WARMUP_OPTIMIZER = AdamWConfig(lr=1e-3, weight_decay=0.0)


class WarmupConfig(Section):
    """Supervised training on the task's answers before the first step."""

    steps: PositiveInt = 1000
    """Steps of training, at most."""
    batch: PositiveInt = 128
    """Prompts of each."""
    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ends as soon as drawn answers to held-out prompts are right this often."""
    every: PositiveInt = 15
    """Steps between two such looks."""
    optimizer: OptimizerConfig = _WARMUP_OPTIMIZER
    """Its own, at a constant rate."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_has_a_name(cls, given: Any) -> Any:
        return with_a_name(given, _WARMUP_OPTIMIZER)


class RLEvalConfig(Section):
    """Evaluation on held-out prompts, before the first step and after the last one."""

    every: Annotated[int, Field(ge=0, strict=True)] = 0
    """Steps between two evaluations; 0: only before and after training."""
    prompts: PositiveInt = 256
    """Prompts, always the same ones, each answered once at the temperature of `rl` and once greedily."""


class RLConfig(Section):
    """Reinforcement learning: the model, the task, the algorithm, and the devices of each role."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "tokenizer": "a folder in 'model.path' has its own, and for a 'model.config' write 'characters', a text",
        "data": "prompts are in 'task', and 'characters' gives a 'model.config' its tokenizer",
    }

    wording: ClassVar = Wording(
        stopping="the step under way ends and is saved", kept="'out' has its metrics and logs"
    )

    version: Literal[1]
    """The version of the file's format."""
    out: PathText
    """The run's folder for metrics, samples, logs and checkpoints, relative to the working directory."""
    seed: int = Field(default=0, ge=0, strict=True)
    """All random numbers are functions of this seed, the prompt, the answer and the token."""
    model: ModelConfig
    """The policy: a Transformers folder, or a config with new weights."""
    characters: str | None = None
    """For a model of a config: a tokenizer with a token for each of these characters. Default: those of a synthetic
    task."""
    task: TaskConfig
    """Prompts and rewards."""
    warmup: WarmupConfig | None = None
    """Supervised training before."""
    rl: RLTraining = RLTraining()
    """The algorithm."""
    eval: RLEvalConfig = RLEvalConfig()
    """Evaluation."""
    roles: Roles = Roles()
    """The devices of the roles. Default: one device for all, which take turns."""
    launch: LaunchConfig = LaunchConfig()
    """The workers."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=0)
    """When checkpoints are written: all roles, what waits to be trained on, and the place in the data."""
    trackers: list[Tracker] = Field(default_factory=lambda: list[Tracker](["tensorboard"]))
    """Trackers besides `metrics.jsonl`, which is always written."""

    @model_validator(mode="after")
    def _model_has_tokens(self) -> RLConfig:
        if self.model.path is not None and self.characters is not None:
            raise ValueError("'characters' is for a model of a config; the folder has its own tokenizer")
        if self.model.path is None and self.characters is None and self.task.name is None:
            raise ValueError(
                "'model.config' makes new weights, and no tokenizer; write one at the top level of the file, beside "
                "'model', with a token for each character: 'characters: \"0123456789=\"', or name a folder that has a "
                "tokenizer in 'model.path'"
            )
        data, batch = self.roles.actor.strategy.axes.data, self.rl.answers // self.rl.minibatches
        if batch % data:
            raise ValueError(
                f"an update has {batch} answers (rl.prompts · rl.group / rl.minibatches), which replicate · shard "
                f"({data}) of the actor must divide"
            )
        return self

    @model_validator(mode="after")
    def _reward_model_is_named(self) -> RLConfig:
        task, role = self.task, self.roles.reward
        if task.has_reward_model and role is None:
            raise ValueError(
                "'task.reward' is model; name the reward model's folder in 'roles.reward', as {model: FOLDER}"
            )
        if role is not None and not task.has_reward_model:
            given = "environment" if task.environment is not None else "reward"
            raise ValueError(
                f"'roles.reward' is a model that scores answers, and 'task.{given}' is {getattr(task, given)!r}; set "
                "'task.reward' to model, or leave the role out"
            )
        if task.has_reward_model and self.warmup is not None and self.warmup.until is not None:
            raise ValueError(
                "'warmup.until' is a share of right answers, and a reward model gives scores; set 'warmup.steps' alone"
            )
        return self

    @model_validator(mode="after")
    def _some_take_turns(self) -> RLConfig:
        if self.roles.sleep is not None and not self.takes_turns:
            raise ValueError(
                "'roles.sleep' is for roles with the same devices, and no two of these take turns; leave it out, or "
                "give 'rollout' or 'reference' the actor's devices"
            )
        if (
            self.roles.rollouts.spread.memory.device == "auto"
            and self.roles.rollouts.placed == self.roles.actors.placed
        ):
            raise ValueError(
                "'roles.rollout.strategy.memory.device: auto' takes what is free, and the actor trains on the same "
                "devices; give a number of bytes"
            )
        return self

    @model_validator(mode="after")
    def _every_key_is_used(self) -> RLConfig:
        if (line := unused(self)) is not None:
            raise ValueError(line)
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether the actor's devices have another role, beside PPO's critic."""
        roles, placed = self.roles, self.roles.actors.placed
        others: list[RoleConfig] = [roles.rollouts]
        if self.rl.kl:
            others.append(roles.references)
        if roles.rewards is not None:
            others.append(roles.rewards)
        return any(one.placed == placed for one in others)

    @property
    def shares_model(self) -> bool:
        """Whether the rollout generates with the actor's own model: on the same devices, with the same axes, and
        without adapters, which are merged for it."""
        if self.model.adapter is not None:
            return False
        actor, rollout = self.roles.actors, self.roles.rollouts
        same = rollout.placed == actor.placed and rollout.spread.axes == actor.strategy.axes
        return same and rollout.spread.rules == actor.strategy.rules


def load_rl(path: str | Path, overrides: Sequence[str] = ()) -> RLConfig:
    """The run that a file describes, with dotted overrides. Raises ConfigError as `load` does."""
    return load_file(RLConfig, path, overrides)
