"""Steps of submodels on real gloo workers, beside the step of the whole model on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness.ranks import run_ranks
from harness.submodel_models import MODELS
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard.experts.loads import take_loads
from hyper_parallel.step.submodels import submodels
from hyper_parallel.strategy import Strategy

RATE = 0.1
"""Of the update, which is plain gradient descent: it makes a small error of a gradient no larger."""


@dataclass(frozen=True)
class SubmodelCase:
    """A step of one model with its submodels."""

    model: str
    submodels: Mapping[str, Any]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 2
    """Of a micro-batch."""
    micro_batches: int = 3
    steps: int = 1
    frozen: Sequence[str] = ()
    """Modules that are not trained."""
    adapted: Sequence[str] = ()
    """Ends of the names of linear layers with LoRA adapters, which are trained alone."""
    evaluates: bool = False
    """The rows are evaluated too, before and after the steps."""
    arrange: bool = True

    def build(self) -> Any:
        """The model."""
        model = MODELS[self.model].build().train()
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        if not self.adapted:
            return model
        torch.manual_seed(0)
        # B is drawn like A instead of zeros, so that every gradient says something.
        adapter = LoraConfig(r=3, lora_alpha=2, init_lora_weights=False, target_modules=list(self.adapted))
        return get_peft_model(model, adapter).train()


@dataclass(frozen=True)
class Outcome:
    """What a step came to."""

    loss: float = 0.0
    norm: float = 0.0
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    plan: str = ""
    refused: str = ""
    evaluated: Sequence[float] = ()
    """The mean losses of a token."""
    loads: Tensor | None = None
    """The rows of each expert of each layer in the last step, over all ranks."""


def on_one_device(case: SubmodelCase) -> Outcome:
    """The unmodified model on one device, micro-batch by micro-batch."""
    made = MODELS[case.model]
    model = case.build()
    batch = made.draw(case.rows * case.micro_batches)
    tokens = (batch["labels"] != -100).sum()

    def parts() -> Iterator[Tensor]:
        """The loss of each micro-batch."""
        for at in range(0, case.rows * case.micro_batches, case.rows):
            given = dict(made.inputs({name: one[at : at + case.rows] for name, one in batch.items()}))
            labels = given.pop("labels")
            logits = model(**given, use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            yield loss / tokens

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            found = float(sum(parts()))
        model.train()
        return found

    before = evaluated()
    for _ in range(case.steps):
        model.zero_grad()
        loss = 0.0
        for part in parts():
            part.backward()
            loss += float(part.detach())
        found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        norm = torch.stack([one.norm() for one in found.values()]).norm()
        with torch.no_grad():
            for one in model.parameters():
                if one.grad is not None:
                    one -= RATE * one.grad
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    return Outcome(loss, float(norm), found, values, evaluated=(before, evaluated()))


def _worker(rank: int, world: int, cases: list[SubmodelCase]) -> list[Outcome]:
    return [run_case(case) for case in cases]


def run_case(case: SubmodelCase) -> Outcome:
    """This rank's part."""
    made = MODELS[case.model]
    model = case.build()
    batch = made.draw(case.rows * case.micro_batches)
    try:
        parts = submodels(
            model,
            case.submodels,
            batch,
            micro_batches=case.micro_batches,
            strategy=Strategy.model_validate({"version": 1, **case.strategy}),
            inputs=made.inputs,
        )
        handle = parts.handle
        evaluated = [float(parts.evaluate(batch))] if case.evaluates else []
        for _ in range(case.steps):
            for one in handle.owned():
                one.parameter.grad = None
            loss = parts.forward_backward(batch, arrange=case.arrange)
            norm = handle.grad_norm()
            loads = None if handle.routing is None else handle.over_all_ranks(take_loads(handle))
            owned = [(one, grad) for one in handle.owned() if (grad := one.grad) is not None]
            gradients = {one.name: handle.gather(grad, one.layout).clone() for one, grad in owned}
            with torch.no_grad():
                for one, grad in owned:
                    one.local.sub_(RATE * grad)
        evaluated += [float(parts.evaluate(batch))] if case.evaluates else []
    except HyperParallelError as error:
        return Outcome(refused=str(error))
    values = {one.name: handle.gather(one.local, one.layout).clone() for one in handle.owned()}
    return Outcome(float(loss), float(norm), gradients, values, parts.plan, evaluated=evaluated, loads=loads)


@dataclass(frozen=True)
class Compared:
    """A case beside one device: errors relative to the largest element, or to a thousandth of that of all gradients,
    where a gradient is 0 but for rounding."""

    loss: float
    norm: float
    gradient: float
    value: float
    missing: tuple[str, ...]
    """Parameters that no rank has a gradient or a value of."""
    plan: str
    refused: str = ""
    evaluated: float | None = None
    """Of losses without gradients; None where the case has none."""

    @property
    def error(self) -> float:
        """The worst."""
        return max(self.loss, self.norm, self.gradient, self.value, self.evaluated or 0.0)


def against_one_device(world: int, cases: Sequence[SubmodelCase], timeout: float = 240.0) -> list[Compared]:
    """Each case on `world` workers, one after the other, beside one device."""
    ones = [on_one_device(case) for case in cases]
    by_rank: list[list[Outcome]] = run_ranks(_worker, world, list(cases), timeout=timeout)
    return [compared(one, [found[at] for found in by_rank]) for at, one in enumerate(ones)]


def compared(one: Outcome, ranks: Sequence[Outcome]) -> Compared:
    """What the ranks have beside one device."""
    refused = next((found.refused for found in ranks if found.refused), "")
    if refused:
        return Compared(math.inf, math.inf, math.inf, math.inf, (), "", refused)
    largest = max(float(x.abs().max()) for x in one.gradients.values())
    missing = []
    worst = {"gradients": 0.0, "values": 0.0}
    for kind in worst:
        for name, expected in getattr(one, kind).items():
            scale = max(float(expected.abs().max()), 1e-3 * largest)
            found = [getattr(rank, kind)[name] for rank in ranks if name in getattr(rank, kind)]
            if not found:
                missing.append(f"{kind} {name}")
            for x in found:
                worst[kind] = max(worst[kind], float((x - expected).abs().max()) / scale)
    return Compared(
        max(abs(rank.loss / one.loss - 1) for rank in ranks),
        max(abs(rank.norm / one.norm - 1) for rank in ranks),
        worst["gradients"],
        worst["values"],
        tuple(missing),
        ranks[0].plan,
        evaluated=max(
            (
                abs(x / expected - 1)
                for rank in ranks
                for x, expected in zip(rank.evaluated, one.evaluated, strict=bool(rank.evaluated))
            ),
            default=None,
        ),
    )
