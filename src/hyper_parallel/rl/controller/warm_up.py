"""Supervised steps on the task's answers, until drawn answers to held-out prompts are right often enough."""

from __future__ import annotations

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.controller.scorer import Scorer, mean_reward
from hyper_parallel.rl.controller.workers import RoleGroup, WeightSync, do
from hyper_parallel.rl.environments import prompt_of

FIRST_ROW = 2**40
"""Rows of prompts that reinforcement learning does not come to."""


def warm_up(
    config: RLConfig,
    actor: RoleGroup,
    rollout: RoleGroup,
    weights: WeightSync,
    prompts: Prompts,
    scorer: Scorer,
    recorder: Recorder,
) -> None:
    """Both groups are idle. Raises DataError for a task whose rows have no answer."""
    section = config.warmup
    assert section is not None
    weights.connect(rollout, 0)
    step = 0
    while step < section.steps:
        count = min(section.every, section.steps - step)
        batches = [
            [pair_of(row) for row in prompts.between(first, first + section.batch)]
            for first in range(
                FIRST_ROW + step * section.batch, FIRST_ROW + (step + count) * section.batch, section.batch
            )
        ]
        losses = actor.call([do("warm_up", batches=batches)], 0).result()[0][0]
        step += count
        right = None
        if section.until is not None and prompts.held_out:
            weights.now(rollout, step, 0)
            right = mean_reward(config, rollout, prompts.held_out, scorer, 0, config.rl.temperature)
        recorder.warm_up(step, losses[-1], right)
        if right is not None and section.until is not None and right >= section.until:
            break
    actor.ask(0, "warmed_up")


def pair_of(row: object) -> tuple[str, str]:
    """A row's prompt and answer."""
    assert isinstance(row, dict)
    prompt, answer = prompt_of(row), row.get("demonstration", row.get("answer"))
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise DataError(
            "warmup: a row of the task has no text 'answer', or its prompt is a conversation; leave 'warmup' out, or "
            "give answers"
        )
    return prompt, answer
