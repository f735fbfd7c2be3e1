"""The file of a simulated reinforcement-learning loop: what each role takes, and how stale answers may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hyper_parallel.config.load import load_file
from hyper_parallel.strategy.section import Section

_Count = Annotated[int, Field(ge=1, le=2**20, strict=True)]
_Some = Annotated[int, Field(ge=0, le=2**20, strict=True)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Measured = dict[_Count, Annotated[float, Field(gt=0, allow_inf_nan=False)]]


class Lengths(Section):
    """How many tokens an answer has."""

    distribution: Literal["lognormal", "constant", "observed"] = "lognormal"
    mean: float = Field(default=1024.0, ge=1)
    """Mean number of tokens, before the limit `longest` cuts answers; not of `observed`."""
    sigma: float = Field(default=1.0, gt=0, le=4)
    """Standard deviation of the logarithm, of a log-normal distribution."""
    longest: _Count = 2**15
    """Tokens at which an answer is cut."""
    observed: Annotated[tuple[_Count, ...], Field(max_length=2**16)] = ()
    """Lengths that were seen, for `distribution: observed`: each answer has one of them, drawn at random."""

    @model_validator(mode="after")
    def _has_what_was_observed(self) -> Self:
        if bool(self.observed) != (self.distribution == "observed"):
            raise ValueError("'observed' lists the lengths of 'distribution: observed'; give both or neither")
        return self


class RoleTime(Section):
    """Seconds that a role takes for a step on n devices: `fixed` + `work` / n, or as measured."""

    fixed: _Seconds = 0.0
    """Seconds that no further device shortens."""
    work: _Seconds = 0.0
    """Device-seconds that devices share evenly."""
    measured: _Measured = Field(default_factory=dict)
    """Seconds on each number of devices. For other numbers, `fixed` and `work` are fitted to these."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.measured and (self.fixed or self.work):
            raise ValueError("give 'measured', or 'fixed' and 'work', not both")
        return self


class GenerationTime(Section):
    """Engines with continuous batching: a pass gives each running answer a token, in `pass_seconds` + n
    `sequence_seconds` for n running answers."""

    pass_seconds: _Seconds = 0.02
    """Seconds of a pass, however many answers run: weights are read, kernels start."""
    sequence_seconds: _Seconds = 0.0
    """Seconds that each running answer adds to a pass."""
    measured: _Measured = Field(default_factory=dict)
    """Seconds in which numbers of devices generate one step's answers, all started at once, until the last has
    ended; both of the above are fitted to these."""
    slots: _Count = 256
    """Answers that run at once on an engine; 1: one after another."""
    engine: _Count = 1
    """Devices of an engine."""
    interrupt: bool = True
    """Whether running answers pause for new weights and go on under them; else the engines take new weights when all
    running answers have ended, and no others start until then."""
    recompute_seconds: _Seconds = 0.0
    """Seconds for each token of a running answer whose keys and values are computed again under new weights."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self.measured) == 1:
            raise ValueError("'measured' needs two numbers of devices at least; or give pass_seconds instead")
        if not self.measured and not self.pass_seconds + self.sequence_seconds:
            raise ValueError("a pass takes time: 'pass_seconds' or 'sequence_seconds' is above 0")
        return self


class RlSimulation(Section):
    """A loop of generation and training. A step is `batches_per_step` batches; after it, rollouts get new weights."""

    devices: Annotated[int, Field(ge=2, le=2**20, strict=True)]
    """Devices of the rollouts and the actor together."""
    rollout: _Count | Literal["auto"] = "auto"
    """Devices that generate; the others train. `auto`: the split that takes least time."""
    batch: _Count
    """Groups (prompts) that are trained together."""
    group: _Count = 1
    """Answers to each prompt."""
    updates: _Count = 1
    """Optimizer updates for each batch."""
    batches_per_step: _Count = 1
    staleness: _Some = 0
    """The largest number of optimizer updates between the version that drew a token and the last one that trains it."""
    order: Literal["fifo", "window", "discard", "capacity"] = "window"
    """The queue's order. `capacity`, for comparison only: groups are trained as they finish, and `staleness` limits how
    many start, which bounds no group's staleness."""
    lengths: Lengths = Lengths()
    generation: GenerationTime = GenerationTime()
    train: RoleTime = RoleTime(work=1.0)
    """The actor's updates of a step."""
    score: RoleTime = RoleTime()
    """The actor's forward passes over a step's answers for log-probabilities."""
    rescore: bool = True
    """Whether a disaggregated actor makes those passes, too; else it uses the rollouts' log-probabilities."""
    reward_seconds: _Seconds = 0.0
    """For each group, after its last answer has ended."""
    reward_workers: _Some = 0
    """Groups whose rewards are computed at once; 0: all."""
    refused: float = Field(default=0.0, ge=0, le=0.95)
    """Share of the groups that a filter drops."""
    transfer_seconds: _Seconds = 0.0
    """Between the actor and the rollouts after a step, while neither works."""
    switch_seconds: _Seconds = 0.0
    """In a step of the colocated loop, for all that is neither generation, `score` nor `train`."""
    warmup: _Count = 4
    """Steps before those that are measured."""
    steps: _Count = 12
    """Steps that are measured."""
    seed: _Some = 0

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        least = self.batches_per_step * self.updates - 1
        if self.staleness < least and (self.staleness or self.batches_per_step > 1):
            raise ValueError(
                f"'staleness' ({self.staleness}) is below {least}: rollouts get new weights after {least + 1} updates "
                f"only ('batches_per_step' x 'updates'); give at least {least}"
            )
        if isinstance(self.rollout, int) and self.rollout >= self.devices:
            raise ValueError(f"'rollout' ({self.rollout}) leaves none of {self.devices} 'devices' to train")
        for name, devices in (("rollout", self.rollout), ("devices", self.devices)):
            if isinstance(devices, int) and devices % self.generation.engine:
                raise ValueError(f"'{name}' ({devices}) is no multiple of generation.engine")
        return self

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.batch * self.batches_per_step


class RlSimulationRun(Section):
    """A file of `hyper-parallel simulate --rl`."""

    version: Literal[1]
    """The version of the file's format."""
    simulation: RlSimulation


def load_rl_simulation(path: Path, overrides: Sequence[str] = ()) -> RlSimulation:
    """The simulation that a YAML file describes, with dotted overrides. Raises ConfigError as `load` does."""
    return load_file(RlSimulationRun, path, overrides).simulation
