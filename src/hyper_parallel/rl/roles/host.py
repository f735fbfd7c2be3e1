"""The host object of a group's workers: its roles, and the operations that the controller may call.

Every rank of a group is given the same instructions. Results are plain data; ranks that have nothing to say give none.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.checkpoint import export
from hyper_parallel.compat.process_groups import ServedStore, serve_store
from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.launch.worker import Worker
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.roles.actor import Actor, ActorCheckpoints, logprobs_of
from hyper_parallel.rl.roles.models import RewardModel, rollout_model, tokenizer_of, trained_policy
from hyper_parallel.rl.roles.policy_recipe import captured_policy
from hyper_parallel.rl.roles.rollout import Rollout
from hyper_parallel.rl.roles.sleep import RoleMemory, Turn
from hyper_parallel.rl.sample import Prompted, Sample
from hyper_parallel.rl.weights.description import Description
from hyper_parallel.rl.weights.merged_adapters import has_adapters, sent_tensors
from hyper_parallel.rl.weights.plan import plan_weights
from hyper_parallel.rl.weights.transfer import Meeting, WeightTransfer, connect, describe, local_tensors
from hyper_parallel.shard import load_weights
from hyper_parallel.step.profiling import StepTraces


class RoleHost:
    """The roles of one worker."""

    def __init__(self, launch: RoleLaunch, worker: Worker) -> None:
        """Builds the models that the group's roles need, with the values that the run declares.

        Raises ConfigError, DataError, StrategyError, UnsupportedModelError or CheckpointError.
        """
        config = self._config = RLConfig.model_validate(launch.settings["run"])
        roles = set(launch.settings["roles"])
        self._worker = worker
        self._links = WeightLinks(worker.rank)
        tokenizer = tokenizer_of(config)
        self._actor: Actor | None = None
        self._rollout: Rollout | None = None
        self._traces: StepTraces | None = None
        self._reference: Any = None
        self._reward: RewardModel | None = None
        self._checkpoints: ActorCheckpoints | None = None
        self._in_turns = "actor" in roles and bool(roles & {"rollout", "reference", "reward"})
        self._memory = RoleMemory(config.roles.sleep if self._in_turns else None, worker.device)
        shares = "rollout" in roles and config.shares_model
        if "actor" in roles:
            model, graphs = captured_policy(config, tokenizer, worker.device)
            actor = self._actor = Actor(
                config, model, tokenizer, worker.device, critic="critic" in roles, graphs=graphs
            )
            self._checkpoints = ActorCheckpoints(config, actor)
            if (profile := config.roles.actor.profile) is not None:
                self._traces = StepTraces(profile.steps, Path(config.out), worker)
            updates: set[Turn] = {"train", "send"}
            generates: set[Turn] = {"generate"}
            self._memory.add(
                "actor",
                lambda: local_tensors(actor.model).values(),
                needed=updates | generates if shares else updates,
                leaves=() if shares else generates,
            )
            self._memory.add("optimizer", actor.update_state, needed={"train"}, leaves={"generate"})
        if "reference" in roles:
            strategy = config.roles.references.strategy
            reference = trained_policy(config, tokenizer, strategy, worker.device, adapted=False)
            self._reference = reference.requires_grad_(False)
            self._memory.add(
                "reference",
                lambda: local_tensors(self._reference).values(),
                needed={"score"},
                leaves={"generate", "train"},
                constant=True,
            )
        if "reward" in roles:
            role = config.roles.rewards
            assert role is not None, "a group has the roles of the run"
            self._reward = RewardModel(role, worker.device)
            reward = self._reward
            self._memory.add(
                "reward",
                lambda: local_tensors(reward.model).values(),
                needed={"generate"},
                leaves={"score", "train", "send"},
                constant=True,
            )
        # Before a rollout takes memory.
        self._memory.turn("generate")
        if "rollout" in roles:
            model = (
                self._actor.model
                if self._actor is not None and shares
                else rollout_model(config, tokenizer, worker.device)
            )
            rollout = self._rollout = Rollout(config, model, tokenizer)
            self._memory.add_cache(rollout.release, lambda: rollout.cache_bytes)
            if not shares:
                self._memory.add(
                    "rollout",
                    lambda: local_tensors(rollout.model).values(),
                    needed={"generate"},
                    leaves={"train", "score", "send"},
                    replaced=True,
                )

    def close(self) -> None:
        """Leave nothing behind."""
        if self._rollout is not None:
            self._rollout.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._memory.close()

    # The actor.

    def train(self, samples: Sequence[Sample], reference: list[list[float]] | None) -> dict[str, float]:
        """Train on a batch; what came of it."""
        assert self._actor is not None
        self._memory.turn("train")
        step = self._actor.version // self._config.rl.minibatches + 1
        with contextlib.nullcontext() if self._traces is None else self._traces.step(step):
            found = self._actor.train(samples, reference)
        self._memory.look("train")
        return found | self._memory.metrics()

    def warm_up(self, batches: Sequence[Sequence[tuple[str, str]]]) -> list[float]:
        """A supervised step on each batch of prompts and answers; the losses."""
        assert self._actor is not None
        self._memory.turn("train")
        return [self._actor.warm_up(one) for one in batches]

    def warmed_up(self) -> None:
        """The supervised steps are over."""
        assert self._actor is not None
        self._memory.turn("train")
        self._actor.warmed_up()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint: the actor, its optimizer, and the controller's state."""
        assert self._checkpoints is not None
        self._checkpoints.save(step, state)

    def saved(self) -> str | None:
        """Wait until the last one is written; its path."""
        assert self._checkpoints is not None
        return self._checkpoints.wait()

    def resume(self) -> dict[str, Any] | None:
        """Load the newest checkpoint; the controller's state in it, None where there is none."""
        assert self._checkpoints is not None
        return self._checkpoints.resume()

    def export(self, checkpoint: str, folder: str) -> None:
        """Write the model of a checkpoint to a Transformers folder, by the first rank."""
        if self._worker.rank == 0:
            export(checkpoint, folder)

    # The reference.

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probabilities of each sample's tokens under the reference."""
        self._memory.turn("score")
        found = logprobs_of(self._reference, samples, self._config, self._worker.device)
        if self._in_turns:
            self._memory.look("score")
        return found

    def load_reference(self, folder: str) -> None:
        """The reference is the model of a Transformers folder."""
        self._memory.turn("score")
        load_weights(self._reference, folder, self._worker.device)
        self._memory.changed("reference")

    # The reward model.

    def reward(self, groups: Sequence[Sequence[tuple[Prompt, str]]]) -> list[list[float | None]]:
        """As `RewardModel.scores`; the first rank gives them."""
        assert self._reward is not None
        self._memory.turn("generate")
        found = self._reward.scores(groups)
        return found if self._worker.rank == 0 else []

    # The rollout.

    def generate(self, new: Sequence[Prompted], passes: int) -> list[Sample]:
        """As `Rollout.generate`."""
        assert self._rollout is not None
        self._awake()
        found = self._rollout.generate(new, passes)
        if self._in_turns:
            self._memory.look("generate")
        return found

    def answer(self, asked: Sequence[Prompted], temperature: float, seed: int) -> list[Sample]:
        """As `Rollout.answer`; the first rank gives them."""
        assert self._rollout is not None
        self._awake()
        found = self._rollout.answer(asked, temperature=temperature, seed=seed)
        return found if self._worker.rank == 0 else []

    def drop(self, tickets: Sequence[int]) -> None:
        """As `Rollout.drop`."""
        assert self._rollout is not None
        self._rollout.drop(tickets)

    def give_up(self) -> None:
        """Give up all answers under way."""
        assert self._rollout is not None
        self._rollout.give_up()

    # Weights.

    def describe(self, role: str) -> dict[str, Any]:
        """The parameters of a role's model."""
        return describe(self._model(role), role, self._worker.world).to_json()

    def address(self) -> str:
        """Of this worker's machine, as others reach it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("10.255.255.255", 1))  # nothing is sent: it only chooses an interface
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"

    def serve(self, host: str) -> tuple[str, int]:
        """The address at which roles meet, from the first rank."""
        return self._links.serve(host) if self._worker.rank == 0 else ("", 0)

    def connect(
        self,
        link: str,
        source: dict[str, Any],
        target: dict[str, Any],
        meeting: dict[str, Any],
        options: dict[str, Any],
        seconds: float,
    ) -> None:
        """Meet the ranks of the other role; all ranks of both are called at once."""
        self._links.connect(
            link,
            source,
            target,
            meeting,
            options,
            gives=self._actor.model if self._actor is not None else None,
            takes=self._model(target["role"]) if self._has(target["role"]) else None,
            seconds=seconds,
        )

    def begin_send(self, link: str, version: int) -> str | None:
        """Copy the weights, and begin to send them. What is wrong with the link, None where nothing is: a link that
        failed must not take the answer of the list with it."""
        self._memory.turn("send")
        return _tried(lambda: self._links[link].begin_send(version))

    def finish_send(self, link: str) -> str | None:
        """Wait until they have arrived. As `begin_send`."""
        return _tried(self._links[link].finish_send)

    def begin_receive(self, link: str, version: int) -> str | None:
        """Begin to receive weights beside what is generated. As `begin_send`."""
        return _tried(lambda: self._links[link].begin_receive(version))

    def arrived(self, link: str) -> bool:
        """Whether `install` would not wait."""
        return not self._links[link].under_way

    def install(self, link: str, version: int) -> str | None:
        """Wait for the weights and generate with them from now on. As `begin_send`; the old ones stay then."""

        def received() -> None:
            self._links[link].finish_receive()
            self._links[link].install(version)
            self.renewed(version)

        return _tried(received)

    def exchange(self, link: str, version: int) -> None:
        """Of a group with both roles: copy the actor's weights to the rollout."""
        self._memory.turn("send")
        self._links[link].exchange(version)
        self._memory.turn("generate")
        self._links[link].install(version)
        self._memory.changed("rollout")
        self.renewed(version)

    def renewed(self, version: int) -> None:
        """The rollout's weights are those of `version`."""
        if self._rollout is not None:
            self._rollout.renewed(version)

    def _awake(self) -> None:
        """The rollout's turn."""
        self._memory.turn("generate")
        self._memory.check("rollout")

    def _has(self, role: str) -> bool:
        return {"rollout": self._rollout, "reference": self._reference}.get(role) is not None

    def _model(self, role: str) -> Any:
        if role == "rollout":
            assert self._rollout is not None
            return self._rollout.model
        if role == "reference":
            return self._reference
        assert self._actor is not None
        return self._actor.model


def _tried(operation: Callable[[], object]) -> str | None:
    try:
        operation()
    except WeightsError as error:
        return str(error)
    return None


class WeightLinks:
    """By the name of the group at the other end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._links: dict[str, WeightTransfer] = {}
        self._store: ServedStore | None = None

    def __getitem__(self, link: str) -> WeightTransfer:
        return self._links[link]

    def serve(self, host: str) -> tuple[str, int]:
        """The address at which roles meet, served by this process until it ends."""
        if self._store is None:
            self._store = serve_store(host)
        return self._store.host, self._store.port

    def connect(
        self,
        link: str,
        source: dict[str, Any],
        target: dict[str, Any],
        meeting: dict[str, Any],
        options: dict[str, Any],
        *,
        gives: nn.Module | None,
        takes: nn.Module | None,
        seconds: float,
    ) -> None:
        """Meet the other ranks. `gives`, `takes`: this worker's model in the role of the source and of the target."""
        self.close(link)
        plan = plan_weights(
            Description.from_json(source),
            Description.from_json(target),
            WeightsConfig(**options),
            colocated=gives is not None and takes is not None,
        )
        rank = self._rank if gives is not None else plan.target_rank(self._rank)
        self._links[link] = connect(
            plan,
            rank,
            Meeting(**meeting),
            source=(lambda: sent_tensors(gives)) if gives is not None else None,
            target=(lambda: local_tensors(takes)) if takes is not None else None,
            computed=gives is not None and has_adapters(gives),
            seconds=seconds,
        )

    def close(self, link: str) -> None:
        """End a link, if it is there."""
        if (found := self._links.pop(link, None)) is not None:
            found.close()
