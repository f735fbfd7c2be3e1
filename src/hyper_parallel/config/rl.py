"""`rl` section: the algorithm, its objective, and how stale what it trains on may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.config.optimizer import AdamWConfig, OptimizerConfig, with_a_name
from hyper_parallel.config.train import ScheduleConfig
from hyper_parallel.strategy.section import Section

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[float, Field(ge=0)]
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
    """η: the version that trains a token is at most so many optimizer updates newer than the one that drew it. 0 is
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
        """Of what the probability ratio is."""
        return self.ratio or ("answer" if self.algorithm == "rloo" else "token")

    @property
    def of_answers(self) -> bool:
        """Whether it is one number for each answer."""
        return self.ratios != "token"

    @property
    def normalized(self) -> Normalization:
        """What the sum over tokens is divided by."""
        return self.normalization or NORMALIZATIONS[self.algorithm]

    @property
    def drops_equal(self) -> bool:
        """Whether groups without reward variance are replaced."""
        return (self.equal_groups or ("drop" if self.algorithm == "dapo" else "keep")) == "drop"

    @property
    def answers(self) -> int:
        """Of a batch."""
        return self.prompts * self.group

    @property
    def updates(self) -> int:
        """Of the optimizer, in the whole run."""
        return self.steps * self.minibatches
