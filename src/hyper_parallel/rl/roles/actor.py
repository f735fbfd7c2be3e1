"""The actor: the policy that is trained, on each rank of its group.

A batch of samples is trained in `minibatches` updates, each on whole groups:

1. log-probabilities before the batch, where the objective needs them (`decoupled`, `truncated`)
2. advantages from the rewards of the groups, and the critic's values with PPO
3. for each update: log-probabilities before it, where ratios are those of answers (`rl.ratio`); forward and backward of
   each micro-batch, the gradient norm, clipping, the optimizer

Every rank is given the whole batch and computes its share of rows, so that all of them know every count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.checkpoint import Piece
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.export_assets import tokenizer_assets
from hyper_parallel.data.generation_settings import GENERATION
from hyper_parallel.errors import NonFiniteError
from hyper_parallel.rl.roles.batch_advantages import advantages_of, estimated
from hyper_parallel.rl.roles.critic import Critic
from hyper_parallel.rl.roles.micro_batches import MicroRows, micro_batches, on_all_ranks
from hyper_parallel.rl.roles.policy_model import ends_of
from hyper_parallel.rl.roles.policy_objective import (
    MetricSums,
    PolicyTokens,
    answer_objective,
    count_of,
    settings_of,
    weights_of,
)
from hyper_parallel.rl.roles.supervised import supervised_samples
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import causal_lm_loss, token_logprobs, token_loss
from hyper_parallel.shard.sharded_model import LOSS_AXES
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer

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
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.handle = sharded(model)
        self.version = 0
        """Optimizer updates of reinforcement learning until now."""
        self._config, self._rl, self._device = config, config.rl, device
        self.optimizer = build_optimizer(model, config.rl.optimizer)
        self.critic = Critic(config, model, device) if critic else None
        self._settings = settings_of(config.rl)
        self._schedule = schedule(config.rl.schedule, config.rl.updates)
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

        total = self._accumulated(micro, loss)
        norm = self.handle.grad_norm()
        if float(norm) > 1.0:
            self.handle.clip(norm, 1.0)
        self._warmup.step(1.0)
        model.zero_grad(set_to_none=True)
        return float(self.handle.all_reduce(total, LOSS_AXES))

    def warmed_up(self) -> None:
        """The supervised steps are over: forget their optimizer, and let the critic begin as the policy is now."""
        self._warmup = None
        if self.critic is not None:
            self.critic.copy(self.model)

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probabilities of each sample's tokens under the weights as they are, on every rank."""
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
        rl, model = self._rl, self.model.train()
        micro = micro_batches(samples, self.handle, rl.micro_batch, self._device)
        sums = MetricSums()

        def placed(one: MicroRows, values: Values | None) -> Tensor | None:
            if values is None:
                return None
            return one.rows.placed([values[place] for place in one.places], one.samples)

        def loss(one: MicroRows) -> Tensor:
            rows = one.rows
            given = placed(one, advantages)
            assert given is not None
            objective = PolicyTokens(
                settings=self._settings,
                temperature=rl.temperature,
                weights=weights_of(rl, rows.drawn, count),
                behaviour=rows.behaviour,
                advantages=given,
                proximal=placed(one, proximal),
                reference=placed(one, reference),
                sums=sums,
            )
            ids, positions = rows.input_ids, rows.position_ids
            logprobs = placed(one, current)
            if logprobs is None:
                return token_loss(model, ids, rows.labels, positions, objective, micro_batches=len(micro))
            whole, value = answer_objective(objective, logprobs)
            return token_loss(model, ids, rows.labels, positions, whole, micro_batches=len(micro)) + value

        total = self._accumulated(micro, loss)
        norm = self.handle.grad_norm()
        vector = torch.cat([total.double().reshape(1).cpu(), sums.vector()]).to(self._device)
        added = self.handle.all_reduce(vector, LOSS_AXES).cpu()
        found = {"loss": float(added[0]), "grad_norm": float(norm), **sums.means(added[1:])}
        if not torch.tensor([found["loss"], found["grad_norm"]]).isfinite().all():
            model.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"the loss is {found['loss']:g} and the gradient norm {found['grad_norm']:g} at update {self.version}; "
                "lower rl.optimizer.lr, or look at the rewards in samples.jsonl"
            )
        if rl.grad_clip is not None and found["grad_norm"] > rl.grad_clip:
            self.handle.clip(norm, rl.grad_clip)
        scale = self._schedule(self.version)
        self.optimizer.step(scale)
        model.zero_grad(set_to_none=True)
        self.version += 1
        return {**found, "lr": rl.optimizer.lr * scale}

    def _accumulated(self, micro: Sequence[MicroRows], loss_of: Callable[[MicroRows], Tensor]) -> Tensor:
        """Add the gradients of micro-batches; this rank's part of the loss, fp32."""
        total = torch.zeros((), device=self._device)
        for index, one in enumerate(micro):
            rows = torch.tensor(one.places, device=self._device)
            last = index == len(micro) - 1
            with self.handle.micro_batch(seed=self._config.seed, step=self.version, rows=rows, last=last):
                loss = loss_of(one)
                loss.backward()
            total += loss.detach()
        return total


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
