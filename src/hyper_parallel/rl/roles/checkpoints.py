"""Checkpoints of the actor's group: weights, optimizer, and the controller's state, committed as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from hyper_parallel.checkpoint.reader import read
from hyper_parallel.checkpoint.verify import newest
from hyper_parallel.checkpoint.writer import Writer
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.train.checkpoint_state import FOLDER, model_shards

_FIXED = ("seed", "model", "task", "rl")
"""Sections that may not change in a run that goes on."""


class ActorCheckpoints:
    """Every rank calls the same methods in step."""

    def __init__(self, config: RLConfig, actor: Actor) -> None:
        self._config, self._actor = config, actor
        self._folder = Path(config.out) / FOLDER
        self._writer: Writer | None = None
        self._last: Path | None = None

    def resume(self) -> dict[str, Any] | None:
        """Load the newest checkpoint that verifies; the controller's state in it, None where there is none.

        Raises CheckpointError for a folder that another run writes into or whose checkpoints are damaged, ConfigError
        for one of another run.
        """
        handle, group = self._actor.handle, self._group
        if self._writer is None:
            settings = self._config.checkpoint
            self._writer = Writer(
                self._folder,
                handle.world,
                handle.rank,
                keep=settings.keep,
                background=settings.background,
                group=group,
            )
        found = newest(self._folder, group=group)
        if found is None:
            return None
        if not self._config.checkpoint.resume:
            raise ConfigError(
                f"{self._folder} holds the checkpoint of step {found.step} and checkpoint.resume is false; choose "
                "another 'out', remove the folder, or set checkpoint.resume=true to go on"
            )
        state = read(found.path, self._pieces(), rank=handle.rank)
        self._check(state, found.path)
        self._actor.load_state(state["actor"])
        self._last = found.path
        controller: dict[str, Any] = state["controller"]
        return controller

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write in the background, where the run does so."""
        assert self._writer is not None, "resume comes first"
        self._writer.save(
            step,
            self._pieces(),
            {
                "controller": state,
                "actor": self._actor.state(),
                "config": self._config.model_dump(mode="json"),
                "model_config": self._actor.model_config,
            },
            assets=self._actor.assets if self._actor.handle.rank == 0 else {},
        )

    def wait(self) -> str | None:
        """Until the last one is written; its path, or that of the one that the run goes on from."""
        if self._writer is not None:
            self._last = self._writer.wait() or self._last
        return str(self._last) if self._last is not None else None

    def close(self) -> None:
        """Let other runs write."""
        if self._writer is not None:
            self._writer.close()

    def _pieces(self) -> dict[str, Any]:
        return {**model_shards(self._actor.handle), **self._actor.pieces()}

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self._actor.handle.world > 1 else None

    def _check(self, state: dict[str, Any], path: Path) -> None:
        now = self._config.model_dump(mode="json")
        then = state.get("config", {})
        differ = [key for key in _FIXED if then.get(key) != now[key]]
        # More steps are how a run is prolonged.
        if differ == ["rl"] and {**then["rl"], "steps": now["rl"]["steps"]} == now["rl"]:
            return
        if differ:
            raise ConfigError(
                f"{path} is of another run: {', '.join(differ)} differ from this file; put them back to go on, or "
                "choose another 'out'"
            )
