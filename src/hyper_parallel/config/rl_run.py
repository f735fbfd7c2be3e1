"""The file of `hyper-parallel rl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from hyper_parallel.config.checkpoint import CheckpointConfig
from hyper_parallel.config.launch import LaunchConfig
from hyper_parallel.config.launched import Wording
from hyper_parallel.config.load import load_file
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.rl import RLTraining
from hyper_parallel.config.rl_role import RoleConfig
from hyper_parallel.config.rl_roles import Roles
from hyper_parallel.config.rl_task import RLEvalConfig, TaskConfig, WarmupConfig
from hyper_parallel.config.run import Tracker
from hyper_parallel.strategy.section import PathText, Section


class RLConfig(Section):
    """Reinforcement learning: the model, the task, the algorithm, and the devices of each role."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "tokenizer": "a folder in 'model.path' has its own, and for a 'model.config' write 'characters', a text",
        "data": "prompts are in 'task', and 'characters' gives a 'model.config' its tokenizer",
    }

    wording: ClassVar = Wording(
        stopping="the step under way ends and is saved",
        safe="committed checkpoints are safe",
        resume="run the same command again: it continues from the last committed checkpoint",
        kept="'out' has its metrics and logs",
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
        """Whether the rollout generates with the actor's own model: on the same devices, with the same axes."""
        actor, rollout = self.roles.actors, self.roles.rollouts
        same = rollout.placed == actor.placed and rollout.spread.axes == actor.strategy.axes
        return same and rollout.spread.rules == actor.strategy.rules


def load_rl(path: str | Path, overrides: Sequence[str] = ()) -> RLConfig:
    """The run that a file describes, with dotted overrides. Raises ConfigError as `load` does."""
    return load_file(RLConfig, path, overrides)
