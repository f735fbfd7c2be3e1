"""Policy update on this rank: rows and micro-batches of samples, advantages, and the loss in the forward pass.

The loss is a `TokenObjective` of a micro-batch's rows. The forward pass computes a chunk of positions at a time, and a
part of the loss L may need all tokens of an answer (`rl.ratio: answer`). Such a loss is differentiated first, at
log-probabilities ℓ of a pass without gradients; the pass with gradients then needs its own position only
(`answer_objective`):

    Σ_t g_t (log p_t − sg(log p_t)) + L(ℓ)      g = ∂L/∂ℓ, sg: without a gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.config.rl import Ratio, RLTraining
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.tokenizer import encode_characters
from hyper_parallel.rl.losses import policy
from hyper_parallel.rl.losses.advantages import (
    gae,
    group_advantages,
    leave_one_out_advantages,
    reinforce_pp_baseline_advantages,
    token_rewards,
    whiten,
)
from hyper_parallel.rl.losses.policy import PolicyObjective, policy_terms
from hyper_parallel.rl.losses.reductions import loss_count
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.loss import IGNORED
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.step.batches import rows_beside, share_of
from hyper_parallel.step.optimizer.interface import Optimizer

_RATIOS: dict[Ratio, policy.Ratio] = {
    "token": "token",
    "answer": "sequence_product",
    "answer_mean": "sequence_mean",
}


def settings_of(rl: RLTraining) -> PolicyObjective:
    """The objective that a run declares."""
    low, high = rl.clips
    return PolicyObjective(
        objective=rl.objective,
        ratio=_RATIOS[rl.ratios],
        clip_low=low,
        clip_high=high,
        weight_cap=rl.truncate if rl.objective == "truncated" else None,
        normalization=rl.normalized,
        kl=rl.kl,
    )


def count_of(rl: RLTraining, update: Sequence[Sample], batch: Sequence[Sample]) -> float:
    """What an update's sum over tokens is divided by (`losses.reductions`)."""
    kind = rl.normalized
    samples = batch if kind == "dapo" else update
    longest = max(len(one.tokens) for one in samples)
    mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, one in enumerate(samples):
        mask[row, : len(one.tokens)] = torch.tensor(one.drawn)
    return float(
        loss_count(
            kind,
            mask,
            max_length=rl.max_tokens if kind == "dr_grpo" else None,
            updates=rl.minibatches if kind == "dapo" else 1,
        )
    )


def weights_of(rl: RLTraining, drawn: Tensor, count: float) -> Tensor:
    """fp32 [B, S]: the weight of each token in the loss; 0 where the policy did not draw it."""
    weights = drawn.float()
    if rl.normalized == "grpo":
        weights = weights / drawn.sum(-1, keepdim=True).clamp(min=1)
    return weights / count if count else weights


@dataclass
class MetricSums:
    """Sums over tokens of metrics."""

    total: Tensor | None = None
    """fp64 [1 + metrics] on the device: the number of tokens, and the sum of each metric; None before the first
    token."""

    def add(self, metrics: Mapping[str, Tensor], logprobs: Tensor, trained: Tensor) -> None:
        """Of some positions."""
        sums = [
            torch.where(trained, value.detach().float(), 0.0).sum()
            for value in _with_entropy(metrics, logprobs).values()
        ]
        added = torch.stack([trained.sum().double(), *(one.double() for one in sums)])
        self.total = added if self.total is None else self.total + added


def _with_entropy(metrics: Mapping[str, Tensor], logprobs: Tensor) -> dict[str, Tensor]:
    return {**metrics, "entropy": -logprobs}


def metric_names(settings: PolicyObjective, *, proximal: bool, reference: bool) -> tuple[str, ...]:
    """The metrics that `MetricSums` has behind the number of tokens, in order. `proximal`, `reference`: whether there
    are such log-probabilities."""
    zero = torch.zeros(1, 1)
    _, metrics = policy_terms(
        zero,
        behaviour=zero,
        advantages=zero,
        mask=zero == 0,
        settings=settings,
        proximal=zero if proximal else None,
        reference=zero if reference else None,
    )
    return tuple(_with_entropy(metrics, zero))


def means(names: Sequence[str], sums: Tensor) -> dict[str, float]:
    """The mean of each metric over the tokens, from `MetricSums.total` of all ranks; empty without names."""
    if not names:
        return {}
    tokens, *values = sums.tolist()
    return {name: value / max(tokens, 1.0) for name, value in zip(names, values, strict=True)}


@dataclass
class PolicyTokens:
    """Of the rows [B, S] of one micro-batch; a part of their positions where ratios are those of tokens."""

    settings: PolicyObjective
    temperature: float
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    sums: MetricSums
    """Is added to."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `TokenObjective` has them."""
        given = (self.weights, self.behaviour, self.advantages, self.proximal, self.reference)
        return tuple(one for one in given if one is not None)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        weights, behaviour, advantages, *others = inputs_N
        trained = weights > 0
        terms, metrics = policy_terms(
            logprobs_N,
            behaviour=behaviour,
            advantages=advantages,
            mask=trained,
            settings=self.settings,
            proximal=others.pop(0) if self.proximal is not None else None,
            reference=others.pop(0) if self.reference is not None else None,
        )
        self.sums.add(metrics, logprobs_N, trained)
        return (terms * weights).sum()


@dataclass(frozen=True)
class GivenGradient:
    """A loss of 0 with a gradient that is known for each position."""

    temperature: float
    gradient: Tensor
    """fp32 [B, S]."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `TokenObjective` has them."""
        return (self.gradient,)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        return (inputs_N[0] * (logprobs_N - logprobs_N.detach())).sum()


def answer_objective(tokens: PolicyTokens, logprobs: Tensor) -> tuple[GivenGradient, Tensor]:
    """(the objective of the pass with gradients, the zero-dim loss without one) of ratios of whole answers.

    `logprobs`: fp32 [B, S], of the labels under the weights that are trained, of whole rows.
    """
    leaf = logprobs.detach().requires_grad_()
    loss = tokens(leaf, *tokens.inputs)
    [gradient] = torch.autograd.grad(loss, [leaf])
    return GivenGradient(tokens.temperature, gradient), loss.detach()


@dataclass(frozen=True)
class SampleRows:
    """Rows [B, S] of B samples: a position's label is the token behind it, where the policy drew that one."""

    input_ids: Tensor
    labels: Tensor
    """int64; -100 where the policy did not draw the next token."""
    position_ids: Tensor
    behaviour: Tensor
    """fp32: the log-probabilities that the rollout recorded; 0 where there is no label."""

    @property
    def drawn(self) -> Tensor:
        """bool [B, S]: whether a position has a label."""
        return self.labels != IGNORED

    def placed(self, values: Sequence[Sequence[float]], samples: Sequence[Sample]) -> Tensor:
        """fp32 [B, S] of a value for each token of each answer, at the positions of the labels."""
        placed = torch.zeros(self.labels.shape)
        for row, (one, given) in enumerate(zip(samples, values, strict=True)):
            first = len(one.prompt) - 1
            placed[row, first : first + len(given)] = torch.tensor(given)
        return placed.to(self.labels.device).masked_fill(~self.drawn, 0)


def length_of(samples: Sequence[Sample], multiple: int, most: int | None = None) -> int:
    """Positions that the longest needs, a multiple of `multiple`. With `most`, the positions of the model, it is a
    power of two or the whole of these: of few lengths, each of which has a graph."""
    longest = max(len(one.prompt) + len(one.tokens) - 1 for one in samples)
    return few_lengths(longest, multiple, most or longest)


def few_lengths(longest: int, multiple: int, most: int) -> int:
    """The power of two that is at least `longest`, or `most` where that is less; a multiple of `multiple`."""
    length = max(longest, min(1 << (longest - 1).bit_length(), most))
    return -(-length // multiple) * multiple


def rows_of(samples: Sequence[Sample], length: int, device: torch.device) -> SampleRows:
    """Rows of `length` positions."""
    count = len(samples)
    ids = torch.zeros(count, length, dtype=torch.int64)
    labels = torch.full((count, length), IGNORED, dtype=torch.int64)
    behaviour = torch.zeros(count, length)
    for row, one in enumerate(samples):
        tokens = [*one.prompt, *one.tokens]
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        first = len(one.prompt) - 1
        answer = torch.tensor(one.tokens)
        drawn = torch.tensor(one.drawn)
        labels[row, first : first + len(answer)] = torch.where(drawn, answer, IGNORED)
        behaviour[row, first : first + len(answer)] = torch.tensor(one.logprobs) * drawn
    positions = torch.arange(length).expand(count, length).contiguous()
    return SampleRows(*(one.to(device) for one in (ids, labels, positions, behaviour)))


def answers_of(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    """The values [B, S] at the positions of each answer's tokens: what `SampleRows.placed` takes."""
    host = values.cpu()
    return [
        host[row, len(one.prompt) - 1 : len(one.prompt) - 1 + len(one.tokens)].tolist()
        for row, one in enumerate(samples)
    ]


@dataclass(frozen=True)
class MicroRows:
    """One micro-batch of this rank."""

    places: list[int]
    """Of its samples in the update."""
    samples: list[Sample]
    rows: SampleRows

    def placed(self, values: Sequence[Sequence[float]]) -> Tensor:
        """fp32 [B, S] of a value for each token of each sample of the update, at the positions of the labels."""
        return self.rows.placed([values[place] for place in self.places], self.samples)


def micro_batches(
    samples: Sequence[Sample],
    handle: ShardedModel,
    micro: int | None,
    device: torch.device,
    most: int | None = None,
) -> list[MicroRows]:
    """Of an update, the same samples on every rank; replicate · shard divides their number. With `most` all have one
    length, of few (`length_of`)."""
    share = share_of(handle, len(samples))
    size = share.stop - share.start
    micro, multiple = min(micro or size, size), length_multiple(handle.plan)
    found = []
    for at in range(share.start, share.stop, micro):
        count = min(micro, share.stop - at)
        beside = rows_beside(handle, len(samples), at, count)
        longest = [samples[place] for place in beside] if most is None else samples
        length = length_of(longest, multiple, most)
        own = list(samples[at : at + count])
        found.append(MicroRows(list(range(at, at + count)), own, rows_of(own, length, device)))
    return found


def add_gradients(
    handle: ShardedModel,
    micro: Sequence[MicroRows],
    loss_of: Callable[[MicroRows], Tensor],
    device: torch.device,
    *,
    seed: int,
    step: int = 0,
) -> Tensor:
    """Add the gradients of micro-batches; this rank's part of the loss, fp32. `seed`, `step`: of dropout."""
    total = torch.zeros((), device=device)
    for index, one in enumerate(micro):
        rows = torch.tensor(one.places, device=device)
        with handle.micro_batch(seed=seed, step=step, rows=rows, last=index == len(micro) - 1):
            loss = loss_of(one)
            loss.backward()
        total += loss.detach()
    return total


def update(
    model: nn.Module, optimizer: Optimizer, norm: Tensor, clip: float | None, scale: float = 1.0
) -> None:
    """Clip the gradient, whose norm is `norm`, let the optimizer step with `scale` times its rate, and drop it."""
    if clip is not None and float(norm) > clip:
        sharded(model).clip(norm, clip)
    optimizer.step(scale)
    model.zero_grad(set_to_none=True)


def on_all_ranks(
    values: Sequence[tuple[MicroRows, Tensor]], samples: Sequence[Sample], handle: ShardedModel
) -> list[list[float]]:
    """For each sample of an update the values [B, S] of its answer's tokens, from the rank that computed them."""
    longest = max(len(one.tokens) for one in samples)
    whole = torch.zeros(len(samples), longest, dtype=torch.float32, device=handle.device)
    for micro, computed in values:
        for place, one in zip(micro.places, answers_of(computed, micro.samples), strict=True):
            whole[place, : len(one)] = torch.tensor(one, device=handle.device)
    whole = handle.all_reduce(whole, ("replicate", "shard"))
    host = whole.cpu()
    return [host[place, : len(one.tokens)].tolist() for place, one in enumerate(samples)]


def mask_of(samples: Sequence[Sample]) -> Tensor:
    """bool [answers, tokens]: what the policy drew, of answers with a reward."""
    mask = torch.zeros(len(samples), max(len(one.tokens) for one in samples), dtype=torch.bool)
    for row, one in enumerate(samples):
        if one.reward is not None:
            mask[row, : len(one.tokens)] = torch.tensor(one.drawn)
    return mask


def advantages_of(rl: RLTraining, samples: Sequence[Sample]) -> list[list[float]]:
    """Of each sample's tokens, without a critic. Samples come group after group; one without a reward gets 0."""
    missing = float("nan")
    rewards = torch.tensor([missing if one.reward is None else one.reward for one in samples])
    grouped = rewards.view(-1, rl.group)
    if rl.algorithm == "reinforce++":
        return _rows(reinforce_pp_baseline_advantages(grouped, mask_of(samples)), samples)
    if rl.algorithm == "rloo":
        found = leave_one_out_advantages(grouped)
    else:
        found = group_advantages(grouped, scale=rl.scale)
    return [[value] * len(one.tokens) for value, one in zip(found.flatten().tolist(), samples, strict=True)]


def estimated(
    rl: RLTraining, samples: Sequence[Sample], values: Sequence[Sequence[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages and returns of each sample's tokens, from the critic's values of them."""
    mask = mask_of(samples)
    scores = torch.tensor([one.reward or 0.0 for one in samples])
    own = torch.zeros(mask.shape)
    for row, given in enumerate(values):
        own[row, : len(given)] = torch.tensor(given)
    advantages, returns = gae(
        token_rewards(scores, mask), own, mask, gamma=rl.critic.gamma, lam=rl.critic.lam
    )
    return _rows(whiten(advantages, mask), samples), _rows(returns, samples)


def _rows(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    host = values.tolist()
    return [row[: len(one.tokens)] for row, one in zip(host, samples, strict=True)]


def supervised_samples(rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Sample]:
    """An answer is followed by the token that ends it. Raises DataError for a character without a token."""
    found = []
    for row, (prompt, answer) in enumerate(rows):
        ids = (*tokenizer.beginning, *encode_characters(tokenizer.transformers, prompt))
        tokens = (*encode_characters(tokenizer.transformers, answer), tokenizer.eos)
        found.append(
            Sample(
                ticket=row,
                place=0,
                row=row,
                prompt=ids,
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                versions=(0,) * len(tokens),
                drawn=(True,) * len(tokens),
                ended=True,
            )
        )
    return found
