"""`task` and `warmup` sections: prompts, what an answer is worth, and supervised training before."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.config.optimizer import AdamWConfig, OptimizerConfig, with_a_name
from hyper_parallel.strategy.section import PathText, Section

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
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
    """At most so many."""
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
    """Also after each so many steps; 0: not."""
    prompts: PositiveInt = 256
    """Prompts, always the same ones, each answered once at the temperature of `rl` and once greedily."""
