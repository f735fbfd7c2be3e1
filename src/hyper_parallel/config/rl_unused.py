"""Keys of a reinforcement-learning file that nothing would read, each with the reason: they are refused, not ignored.

The sections `launch` and `checkpoint` are those of `train`, with keys that mean something there only; other
keys belong to an algorithm, an objective or a placement that the file does not choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

Reads = Callable[[Any], bool]
"""Whether a file with other keys such as these reads the key."""


def _never(config: Any) -> bool:
    return False


def _apart(role: str) -> Reads:
    """Whether a role has workers of its own."""

    def apart(config: Any) -> bool:
        roles = config.roles
        return roles.open or getattr(roles, role).devices not in (None, roles.actors.placed)

    return apart


_WORKERS = "; '{}' takes turns in the actor's workers, which have roles.actor.threads"
UNUSED: dict[str, tuple[str, Reads]] = {
    "launch.workers": (
        "; it is the number of devices that 'roles: auto' may use, and these roles have devices of their own",
        lambda config: config.roles.open,
    ),
    "launch.nodes": ("; several machines are a Ray cluster's: set roles.engine to ray", _never),
    "launch.node_rank": ("; several machines are a Ray cluster's: set roles.engine to ray", _never),
    "launch.rendezvous": ("; the workers of a group meet on a port of their own", _never),
    "launch.grace": (
        "; after a stop request the step under way ends and is saved, however long it takes",
        _never,
    ),
    "checkpoint.resume_from": ("; a run goes on from its newest checkpoint", _never),
    "checkpoint.allow_other_data": ("; a run goes on with the prompts that it began with", _never),
    "rl.critic": ("; it is the critic of ppo", lambda config: config.rl.algorithm == "ppo"),
    "rl.truncate": (
        "; it bounds the weights of 'objective: truncated'",
        lambda config: config.rl.objective == "truncated",
    ),
    "rl.scale": (
        "; it scales the advantages of grpo and dapo",
        lambda config: config.rl.algorithm in ("grpo", "dapo"),
    ),
    "task.settings": (
        "; they are of a synthetic task, 'task.name'",
        lambda config: config.task.name is not None,
    ),
    "task.held_out": (
        "; it belongs to a file of prompts, and the synthetic task holds out prompts of its own",
        lambda config: config.task.prompts is not None,
    ),
    "roles.reference": (
        "; the reference is measured against with 'rl.kl' above 0",
        lambda config: config.rl.kl > 0,
    ),
    **{
        f"roles.{role}.threads": (_WORKERS.format(role), _apart(role))
        for role in ("rollout", "reference", "reward")
    },
}
"""By key: the reason, and when the key is read after all."""


def unused(config: BaseModel) -> str | None:
    """The line about the first key that is written and not used; None where there is none."""
    for key, (reason, reads) in UNUSED.items():
        if _written(config, key.split(".")) and not reads(config):
            return f"{key!r} is not used here{reason}; leave it out"
    return None


def _written(section: Any, path: list[str]) -> bool:
    """Whether a key has another value than its default."""
    for name in path[:-1]:
        section = getattr(section, name)
        if section is None:
            return False
    field = type(section).model_fields[path[-1]]
    return bool(getattr(section, path[-1]) != field.get_default(call_default_factory=True))
