"""Actor: the policy that is trained, on each rank of its group, and its checkpoints.

A batch of samples is trained in `minibatches` updates, each on whole groups:

1. log-probabilities before the batch, where the objective needs them (`decoupled`, `truncated`)
2. advantages from the rewards of the groups, and the critic's values with PPO
3. for each update: log-probabilities before it, where ratios are those of answers (`rl.ratio`); forward and backward of
   each micro-batch, the gradient norm, clipping, the optimizer

Every rank is given the whole batch and computes its share of rows, so that all of them know every count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from hyper_parallel.checkpoint import Piece
from hyper_parallel.checkpoint.adapters import STATE as LORA
from hyper_parallel.checkpoint.adapters import merge_state
from hyper_parallel.checkpoint.reader import read
from hyper_parallel.checkpoint.verify import newest
from hyper_parallel.checkpoint.writer import Writer
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.export_assets import tokenizer_assets
from hyper_parallel.data.generation_settings import GENERATION
from hyper_parallel.errors import ConfigError, NonFiniteError
from hyper_parallel.rl.roles.critic import Critic
from hyper_parallel.rl.roles.models import ends_of
from hyper_parallel.rl.roles.policy_recipe import PolicyRecipe, positions_of
from hyper_parallel.rl.roles.policy_update import (
    GivenGradient,
    MetricSums,
    MicroRows,
    PolicyTokens,
    add_gradients,
    advantages_of,
    answer_objective,
    count_of,
    estimated,
    means,
    metric_names,
    micro_batches,
    on_all_ranks,
    supervised_samples,
    update,
    weights_of,
)
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import causal_lm_loss, token_logprobs
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.engine import refuses
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.train.checkpoint_state import FOLDER, model_shards

Values = Sequence[Sequence[float]]
"""Of each sample's tokens."""


class Actor:
    """The trained policy on this rank."""

    def __init__(
        self,
        config: RLConfig,
        model: nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
        *,
        critic: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        """`graphs`: those of the updates, of a model in the traceable lowering; None to run the model's own code."""
        self.model, self.tokenizer = model, tokenizer
        self.handle = sharded(model)
        self.version = 0
        """Optimizer updates of reinforcement learning until now."""
        self._config, self._rl, self._device = config, config.rl, device
        self.optimizer = build_optimizer(model, config.rl.optimizer)
        self.critic = Critic(config, model, device) if critic else None
        self._recipe = PolicyRecipe.of_policy(config, model, self.optimizer)
        self._graphs = graphs
        self._stepper = Stepper(self._recipe) if graphs is None else GraphStepper(self._recipe, graphs)
        self._most = None if graphs is None else positions_of(model)
        """The most positions of a row, where rows are padded to few lengths."""
        self._warmup: Any = None

    def train(self, samples: Sequence[Sample], reference: Values | None = None) -> dict[str, float]:
        """Train on a batch, `rl.group` answers after the other of each group; what came of it, the same on every rank.

        `reference`: log-probabilities under the reference model. Raises NonFiniteError where the loss or the gradient
        is not finite; that update is not done then.
        """
        rl = self._rl
        proximal = self.logprobs(samples) if rl.objective != "behaviour" else None
        old, returns = None, None
        if self.critic is not None:
            old = self.critic.values(samples)
            advantages, returns = estimated(rl, samples, old)
        else:
            advantages = advantages_of(rl, samples)
        size = len(samples) // rl.minibatches
        total: dict[str, float] = {}
        for first in range(0, len(samples), size):
            span = slice(first, first + size)
            current = None
            if rl.of_answers:
                # Before the first update they are those of before the batch.
                known = proximal[span] if proximal is not None and first == 0 else None
                current = known or self.logprobs(samples[span])
            with record_function(f"update {self.version + 1}"):
                found = self._update(
                    samples[span],
                    current,
                    advantages[span],
                    proximal[span] if proximal is not None else None,
                    reference[span] if reference is not None else None,
                    count_of(rl, samples[span], samples),
                )
            if self.critic is not None and old is not None and returns is not None:
                found |= self.critic.train(samples[span], old[span], returns[span])
            for key, value in found.items():
                total[key] = total.get(key, 0.0) + value / rl.minibatches
        return total

    def warm_up(self, rows: Sequence[tuple[str, str]]) -> float:
        """One supervised step on prompts and answers, the same on every rank; its loss."""
        assert self._config.warmup is not None, "checked by whoever asks for it"
        if self._warmup is None:
            self._warmup = build_optimizer(self.model, self._config.warmup.optimizer)
        samples = supervised_samples(rows, self.tokenizer)
        tokens = float(sum(len(one.tokens) for one in samples))
        micro = micro_batches(samples, self.handle, self._rl.micro_batch, self._device)
        model = self.model.train()

        def loss(one: MicroRows) -> Tensor:
            rows = one.rows
            return causal_lm_loss(
                model, rows.input_ids, rows.labels, rows.position_ids, tokens, micro_batches=len(micro)
            )

        total = add_gradients(
            self.handle, micro, loss, self._device, seed=self._config.seed, step=self.version
        )
        update(model, self._warmup, self.handle.grad_norm(), 1.0)
        return float(self.handle.all_reduce(total, LOSS_AXES))

    def warmed_up(self) -> None:
        """The supervised steps are over: forget their optimizer, and let the critic begin as the policy is now."""
        self._warmup = None
        if self.critic is not None:
            self.critic.copy(self.model)

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probabilities of each sample's tokens under the weights as they are, on every rank."""
        with record_function("log-probabilities"):
            return logprobs_of(self.model, samples, self._config, self._device)

    def update_state(self) -> list[Tensor]:
        """What only updates need: the optimizers' tensors, and the critic with its own."""
        found = [*self.optimizer.tensors().values()]
        if self._warmup is not None:
            found += self._warmup.tensors().values()
        if self.critic is not None:
            found += [one.local for one in self.critic.handle.owned()]
            found += self.critic.optimizer.tensors().values()
        return found

    def pieces(self) -> dict[str, Piece]:
        """What a checkpoint has beside the model's parameters."""
        found = dict(self.optimizer.pieces())
        if self.critic is not None:
            handle = self.critic.handle
            found |= {f"critic.{one.name}": Piece(one.local, one.layout) for one in handle.owned()}
            found |= {f"critic.{name}": piece for name, piece in self.critic.optimizer.pieces().items()}
        return found

    def state(self) -> dict[str, Any]:
        """The rest, as JSON."""
        critic = self.critic.optimizer.state() if self.critic is not None else None
        return {"version": self.version, "optimizer": self.optimizer.state(), "critic": critic}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, once the pieces were read."""
        self.version = state["version"]
        self.optimizer.load_state(state["optimizer"])
        if self.critic is not None:
            self.critic.optimizer.load_state(state["critic"])

    @property
    def model_config(self) -> dict[str, Any]:
        """The Transformers config, as JSON has it."""
        config: Any = self.model.config
        found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        return found

    @property
    def assets(self) -> dict[str, bytes]:
        """Files for an exported model: the tokenizer's, and how generation ends."""
        ends = sorted(ends_of(self.model, self.tokenizer, self._config.model.folder))
        generation = json.dumps({"eos_token_id": ends}, indent=2).encode()
        return {**tokenizer_assets(self.tokenizer), GENERATION: generation}

    def _update(
        self,
        samples: Sequence[Sample],
        current: Values | None,
        advantages: Values,
        proximal: Values | None,
        reference: Values | None,
        count: float,
    ) -> dict[str, float]:
        rl, handle = self._rl, self.handle
        micro = micro_batches(samples, handle, rl.micro_batch, self._device, self._most)
        # Ratios of whole answers are no part of the step's own loss: it is given their gradient.
        answers, value = MetricSums(), torch.zeros((), dtype=torch.float64, device=self._device)
        given = []
        for one in micro:
            rows = one.rows
            objective: PolicyTokens | GivenGradient = PolicyTokens(
                settings=self._recipe.settings,
                temperature=rl.temperature,
                weights=weights_of(rl, rows.drawn, count),
                behaviour=rows.behaviour,
                advantages=one.placed(advantages),
                proximal=None if proximal is None else one.placed(proximal),
                reference=None if reference is None else one.placed(reference),
                sums=answers,
            )
            if current is not None:
                assert isinstance(objective, PolicyTokens)
                objective, whole = answer_objective(objective, one.placed(current))
                value += whole
            given.append(self._recipe.micro_batch(one, objective))
        of_answers = self._of_answers(value, answers) if current is not None else {}
        batch = StepBatch(self.version, list(range(len(samples))), given, torch.ones((), device=self._device))
        try:
            self._begin(batch)
            result = self._stepper.run(load_next=None, memory=0.0)
        except NonFiniteError as error:
            raise self._not_finite(str(error)) from error
        finally:
            self.model.zero_grad(set_to_none=True)
        scale = self._recipe.schedule(self.version)
        self.version += 1
        found = {"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics, **of_answers}
        if of_answers:
            # The step's own part is the model's auxiliary loss, where it has one.
            found["loss"] += result.loss
        return {**found, "lr": rl.optimizer.lr * scale}

    def _of_answers(self, value: Tensor, sums: MetricSums) -> dict[str, float]:
        """The loss and the metrics of ratios of whole answers, over all ranks. Raises NonFiniteError."""
        assert sums.total is not None, "a rank has micro-batches"
        added = self.handle.all_reduce(torch.cat([value.reshape(1), sums.total]), LOSS_AXES)
        loss = float(added[0])
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss:g}")
        rl, settings = self._rl, self._recipe.settings
        names = metric_names(settings, proximal=rl.objective != "behaviour", reference=rl.kl > 0)
        return {"loss": loss, **means(names, added[1:])}

    def _not_finite(self, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"update {self.version}: {what}; lower rl.optimizer.lr, or look at the rewards in samples.jsonl"
        )

    def _begin(self, batch: StepBatch) -> None:
        """Take an update's batch; the first one of graphs is captured on all ranks or none."""
        graphs = self._graphs
        if graphs is not None and not graphs.captured and graphs.refused is None:
            refuses(graphs, graphs.shape_of(batch.micro), self._device)
        self._stepper.begin(batch)


def logprobs_of(
    model: nn.Module, samples: Sequence[Sample], config: RLConfig, device: torch.device
) -> list[list[float]]:
    """Log-probabilities of each sample's tokens at the run's temperature, on every rank. A collective; every rank is
    given the same samples, whose number replicate · shard divides."""
    handle, training = sharded(model), model.training
    model.eval()
    found = [
        (
            one,
            token_logprobs(
                model,
                one.rows.input_ids,
                one.rows.labels,
                one.rows.position_ids,
                config.rl.temperature,
            ),
        )
        for one in micro_batches(samples, handle, config.rl.micro_batch, device)
    ]
    model.train(training)
    return on_all_ranks(found, samples, handle)


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
                **({LORA: merge} if (merge := merge_state(self._actor.model)) is not None else {}),
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
