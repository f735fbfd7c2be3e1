"""The training loss of a causal language model, computed inside the model's own forward pass.

    loss = Σ_valid loss of a token / T

T counts the valid tokens of the whole step: all micro-batches and all ranks. Each micro-batch divides its own sum by
the same T, so that gradients are *summed* over micro-batches and ranks and equal those of one big batch, also when
documents leave ranks with different numbers of valid tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import phase
from hyper_parallel.shard.forward import call, logits_in
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.lora_adapters import base_of, without_adapters
from hyper_parallel.shard.loss.auxiliary_loss import OwnTerms
from hyper_parallel.shard.loss.cross_entropy import (
    TokenObjective,
    chunked_sum,
    cross_entropy_sum,
    log_probabilities,
    split_logits,
)
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import features_of, is_transformers
from hyper_parallel.shard.plan.plan import Plan
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.shard.sharded_model import sharded


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor | None,
    tokens: Tensor | float,
    options: LossConfig | None = None,
    *,
    micro_batches: int = 1,
    **inputs: Any,
) -> Tensor:
    """This rank's part of the step's loss, in nats: a zero-dim fp32 tensor. The sum over `LOSS_AXES` is the loss.

    `input_ids`, `position_ids` and `labels` int64 [B, S], whole rows on every rank. `labels` are shifted already: the
    label at a position is the token after it; -100 bears no loss. `tokens` is the number of valid tokens of the
    whole step. `options` is `train.loss` of a run file. `inputs`: what else the model takes (`pixel_values`).

    While it trains, a mixture of experts whose config asks for it (`output_router_logits`) adds its auxiliary loss,
    the mean over the `micro_batches` of the step.

    A Transformers model computes its logits a chunk of positions at a time (`options.chunk`), split over the
    vocabulary where its head is; their gradients are taken in this forward pass, and can be handed out once. Any other
    module, and one that was not parallelized, computes them at once. Without gradients enabled it is only the value.
    """
    options = options or LossConfig()
    root = root_of(model)
    if root is not None:
        with root.requested(Request(labels, tokens, options, micro_batches)):
            loss: Tensor = call(model, input_ids, position_ids, **inputs)
            return loss
    logits = logits_in(call(model, input_ids, position_ids, **inputs))
    with phase("loss"):
        total = cross_entropy_sum(
            logits.flatten(0, -2),
            labels.flatten(),
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )
        return total / tokens


# The loss inside the model's own forward: logits a chunk of positions at a time, split over the vocabulary.
#
# A wrapper around the root of a Transformers model. When a loss is asked for it lets the model's own forward run once,
# with one position put in where the base model's output is used; then a chunk at a time, with the base model's output
# put in and the base model itself left alone. So every family's own head is used, soft caps and scales included, FSDP2
# sees one forward pass of the root, and the parameters of the head are made ready once.

_ATTRIBUTE = "_hyper_parallel_loss"

CHUNK_LOGITS = 1 << 27
"""Logits of a chunk that `chunk: auto` aims at: 256 MiB in bfloat16, and twice that in fp32 for their softmax."""


@dataclass(frozen=True)
class Request:
    """Loss request of one forward pass: the loss of these labels, divided by `tokens`."""

    labels: Tensor
    """int64 [B, S], already shifted, of whole rows."""
    tokens: Tensor | float
    options: LossConfig
    micro_batches: int
    """In the step."""
    objective: TokenObjective | None = None
    """Takes the place of the cross-entropy."""


class LossRoot:
    """A model's base and head, and the loss request of the current forward pass."""

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        head: nn.Module,
        vocabulary: Axis | None,
        layers: str | None,
        chunks: bool,
        cut: Callable[[Tensor], Tensor] | None,
        of_logits: bool = False,
    ) -> None:
        self._model, self._base, self._head, self._axis = model, base, head, vocabulary
        self._layers, self._chunks, self._cut, self._of_logits = layers, chunks, cut, of_logits
        self._size = features_of(head, output=True)
        self._request: Request | None = None
        self._inputs: tuple[Tensor, ...] = ()
        """The objective's, [N] each, of this rank's positions."""
        self._instead: Callable[[Any], Any] | None = None
        self._output: Any = None
        self._adds = False
        """The model's own term of the logits is added in the current forward pass."""

    @contextlib.contextmanager
    def requested(self, request: Request) -> Iterator[None]:
        """Inside, a call of the model returns the requested loss, and no logits."""
        before, self._request = self._request, request
        try:
            yield
        finally:
            self._request = before

    @property
    def request(self) -> Request | None:
        """The request of the current forward pass; None where the model returns its usual outputs."""
        return self._request

    def around_model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The wrapper of the root."""
        request = self._request
        if request is None:
            return forward(*args, **kwargs)
        cut = self._cut or (lambda x: x)
        labels_N, objective = cut(request.labels).flatten(), request.objective
        self._inputs = () if objective is None else tuple(cut(one).flatten() for one in objective.inputs)
        # A term of the logits is the model's own code, which takes them whole.
        self._adds = self._of_logits and objective is None and torch.is_grad_enabled()
        with contextlib.ExitStack() as stack:
            if self._split is not None:
                stack.enter_context(split_logits(self._head))
            chunk = self._chunk(request.options, labels_N.size(0))
            call_model = functools.partial(forward, *args, **kwargs)
            if chunk is None:
                loss = self._at_once(request, call_model, labels_N)
            else:
                loss = self._in_chunks(request, call_model, labels_N, chunk)
        handle = sharded(self._model)
        if handle.balancing is None or not torch.is_grad_enabled():
            return loss
        return loss + handle.auxiliary_loss() / request.micro_batches

    @property
    def _split(self) -> Axis | None:
        """The axis over which the logits of the current forward pass are split."""
        return None if self._adds else self._axis

    def around_base(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The wrapper of the base model: its output is kept, and given in part while chunks are computed."""
        if self._instead is None:
            return forward(*args, **kwargs)
        if self._output is None:
            self._output = forward(*args, **kwargs)
        return self._instead(self._output)

    def _chunk(self, options: LossConfig, positions: int) -> int | None:
        """How many positions at a time; None for all at once."""
        if not self._chunks or options.chunk == "none":
            return None
        chunk = options.chunk
        if chunk == "auto":
            local = -(-self._size // self._split.size) if self._split is not None else self._size
            chunk = 1 << max(CHUNK_LOGITS // local, 1).bit_length() - 1
        return chunk if chunk < positions else None

    def _loss(self, request: Request, logits: Tensor, labels_N: Tensor, start: int, stop: int) -> Tensor:
        """The loss of the positions from `start` to `stop` - 1, whose logits these are."""
        if request.objective is not None:
            temperature = request.objective.temperature
            logprobs_N = log_probabilities(
                logits.flatten(0, -2) if temperature == 1 else logits.flatten(0, -2).float() / temperature,
                labels_N[start:stop],
                vocabulary=self._split,
                size=self._size,
            )
            return request.objective(logprobs_N, *(one[start:stop] for one in self._inputs))
        total = cross_entropy_sum(
            logits.flatten(0, -2),
            labels_N[start:stop],
            vocabulary=self._split,
            size=self._size,
            label_smoothing=request.options.label_smoothing,
            z_loss=request.options.z_loss,
        )
        return total / request.tokens

    def _with_own_term(self, request: Request, output: Any, loss: Tensor, share: float) -> Tensor:
        """`loss` and the model's own term of the logits in `output`, which are this share of this rank's positions."""
        if not self._adds:
            return loss
        mesh = sharded(self._model).mesh
        parts = request.micro_batches * math.prod(mesh.size(axis) for axis in LOSS_AXES)
        term: Tensor = output.loss
        return loss + term.float() * (share / parts)

    def _labels(self, request: Request, positions: tuple[int, int]) -> dict[str, Tensor]:
        """The labels with which the model adds its own term; what they say goes into no cross-entropy."""
        return {"labels": request.labels.new_zeros(positions)} if self._adds else {}

    @contextlib.contextmanager
    def _without_cross_entropy(self) -> Iterator[None]:
        """Inside, the model's loss is its own term alone."""
        core: Any = without_adapters(self._model)
        if not self._adds:
            yield
            return
        before = core.loss_function
        core.loss_function = lambda logits, *_, **__: logits.new_zeros((), dtype=torch.float32)
        try:
            yield
        finally:
            core.loss_function = before

    def _at_once(self, request: Request, forward: Callable[..., Any], labels_N: Tensor) -> Tensor:
        rows, count = request.labels.size(0), labels_N.size(0)
        with self._without_cross_entropy():
            output = forward(**self._labels(request, (rows, count // rows)))
        with phase("loss"):
            loss = self._loss(request, logits_in(output), labels_N, 0, count)
            return self._with_own_term(request, output, loss, 1.0)

    def _in_chunks(
        self, request: Request, forward: Callable[..., Any], labels_N: Tensor, chunk: int
    ) -> Tensor:
        try:
            # This pass needs no logits, so the head computes one position only.
            self._instead = lambda output: _with_hidden(output, _hidden(output)[:1, :1])
            first = logits_in(forward())
            if self._output is None or first.shape[:-1] != (1, 1):
                raise StrategyError(
                    f"{type(self._model).__name__} does not compute its logits position by position from "
                    "the output of its base model; set train.loss.chunk: none"
                )

            def loss(hidden_1CH: Tensor, start: int, stop: int) -> Tensor:
                self._instead = lambda output: _with_hidden(output, hidden_1CH)
                with self._without_cross_entropy():
                    output = forward(**self._labels(request, (1, stop - start)))
                part = self._loss(request, logits_in(output), labels_N, start, stop)
                return self._with_own_term(request, output, part, (stop - start) / labels_N.size(0))

            with phase("loss"):
                return chunked_sum(loss, _hidden(self._output).flatten(0, 1), self._weights(), chunk)
        finally:
            self._instead = self._output = None

    def _weights(self) -> list[Tensor]:
        """Every tensor outside of the layers that the head may compute with, as it is while the root computes."""
        found: dict[int, Tensor] = {}
        for name, module in self._model.named_modules():
            if self._layers is None or not name.startswith(f"{self._layers}."):
                found.update((id(p), p) for p in module._parameters.values() if p is not None)
        return list(found.values())


def apply_loss(
    model: nn.Module,
    plan: Plan,
    axes: Mapping[str, Axis],
    dtypes: Mapping[str, torch.dtype],
    cut: Callable[[Tensor], Tensor] | None = None,
    terms: OwnTerms | None = None,
) -> None:
    """Let a Transformers model with an output head compute its loss; other modules do not change.

    Call it before `apply_access`, whose wrapper then encloses this one, so that the loss reads the parameters that the
    modules compute with. `cut` selects this rank's positions from labels [B, S] of whole rows. `terms`: what the
    model's own loss adds. A head with another compute dtype than the model, or with dropout, computes all positions at
    once.
    """
    if not is_transformers(model):
        return
    core: Any = without_adapters(model)
    head, base = core.get_output_embeddings(), getattr(core, core.base_model_prefix, None)
    if not isinstance(base, nn.Module) or head is None or not isinstance(base_of(head), nn.Linear):
        return
    names = {id(module): name for name, module in model.named_modules()}
    planned = plan.modules.get(names[id(head)])
    split = planned is not None and planned.leaves == "gather"
    inside = {id(module) for module in base.modules()}
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    chunks = all(
        dtypes[name] == dtypes[""] and not (isinstance(module, nn.Dropout) and module.p > 0)
        for name, module in outside
    )
    axis = axes[plan.mesh.tensor] if split else None
    of_logits = terms is not None and terms.of_logits
    if terms is not None and of_logits and terms.balancing is not None:
        raise StrategyError(
            f"the loss of {type(core).__name__} adds a term of the logits to one of the routers, which cannot be taken "
            "apart yet; set output_router_logits to false in the model's config"
        )
    root = LossRoot(model, base, head, axis, plan.layers, chunks, cut, of_logits)
    wrap(core, root.around_model)
    wrap(base, root.around_base)
    model.__dict__[_ATTRIBUTE] = root


def root_of(model: nn.Module) -> LossRoot | None:
    """The wrapper that `apply_loss` put around the model, or None."""
    root = model.__dict__.get(_ATTRIBUTE)
    assert root is None or isinstance(root, LossRoot)
    return root


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    # Without the router's logits the model's own forward has no auxiliary loss to compute once more.
    kept = {key: value for key, value in output.items() if key != "router_logits"}
    return type(output)(**{**kept, "last_hidden_state": hidden})


def token_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    objective: TokenObjective,
    *,
    micro_batches: int = 1,
    chunk: LossConfig | None = None,
) -> Tensor:
    """This rank's part of the objective, a zero-dim fp32 tensor with gradients.

    `input_ids`, `labels` and `position_ids` int64 [B, S]; a label is the token after its position, or -100 for none.
    Raises StrategyError for a model that does not compute its own loss (`apply_loss`).
    """
    root = root_of(model)
    if root is None:
        raise StrategyError(
            f"{type(model).__name__} has no output head that is found; log-probabilities need a causal language model "
            "of Transformers that was parallelized"
        )
    with root.requested(Request(labels, 1.0, chunk or LossConfig(), micro_batches, objective)):
        loss: Tensor = call(model, input_ids, position_ids)
        return loss


def token_logprobs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, position_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of the labels at a temperature, fp32 [B, S] without gradients; 0 where a label is -100.

    Raises StrategyError as `token_loss`, and where `context` splits rows.
    """
    if sharded(model).mesh.size("context") > 1:
        raise StrategyError("axes.context: log-probabilities are not computed over split rows; leave it out")
    kept = _Kept(temperature)
    with torch.no_grad():
        token_loss(model, input_ids, labels, position_ids, kept)
    return torch.cat(kept.found).view(labels.shape)


@dataclass
class _Kept:
    """Keeps what it is given."""

    temperature: float
    inputs: tuple[Tensor, ...] = ()
    found: list[Tensor] = field(default_factory=list)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        self.found.append(logprobs_N)
        return logprobs_N.sum()
