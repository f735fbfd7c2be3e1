"""The comparisons of a small copy of a model with its owner's forward pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import float64
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard.forward import call, first_position
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss, logits_of
from hyper_parallel.shard.loss.auxiliary_loss import asks_for_router_logits
from hyper_parallel.shard.model_structure import configs_of, is_transformers, text_config
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.region_check.check import quiet, vocabulary_of
from hyper_parallel.shard.region_check.outcome import FIRST_ID, Outcome, Spread, in_one_line, mismatch
from hyper_parallel.shard.region_check.reduced_model import reduce
from hyper_parallel.shard.sharded_model import sharded
from hyper_parallel.strategy import Strategy

Kind = Literal["loss", "rows", "packing", "length", "padding"]
KINDS: tuple[Kind, ...] = ("loss", "rows", "packing", "length", "padding")
Verdict = Literal["right", "differs", "not applicable"]

LENGTH = 24
"""Positions of a row."""
SHORT = 4
"""Positions of the rows whose positions are far apart: fewer than any table of factors is made for."""
DOCUMENTS = (2, 20, 2)
"""Positions of the documents of a packed row. One has far more than `KEYS`."""
KEYS = 8
"""Keys that sparse attention (DeepSeek's) chooses at most: fewer than positions, so that it does choose."""
TAUGHT = 10
"""Positions of a row whose gradients are compared: a backward pass through many experts takes long, each time that a
token chooses another one."""
CHUNK = 6
"""Positions of a chunk of our loss, so that there are several, the last one shorter."""

ALONE = Strategy(check=False)


@dataclass(frozen=True)
class Comparison:
    """One comparison's verdict."""

    verdict: Verdict
    detail: str = ""
    """What differs by how much, or why nothing could be compared; in words."""
    positions: int | None = None
    """Of `length` where it differs: rows of no more positions than this do not depend on each other."""
    written: str = ""
    """Of `rows` in a call: the weight or buffer that the forward pass writes from its rows."""

    @property
    def right(self) -> bool:
        """Whether nothing differs; also where nothing could be compared."""
        return self.verdict != "differs"

    def __str__(self) -> str:
        return f"{self.verdict} ({self.detail})" if self.detail else self.verdict


@dataclass(frozen=True)
class OwnerReport:
    """The verdict of each comparison that was asked for."""

    comparisons: dict[Kind, Comparison]
    copy: str = ""
    """The small copy, in words."""

    def __getitem__(self, kind: Kind) -> Comparison:
        return self.comparisons[kind]

    @property
    def ok(self) -> bool:
        """Whether no comparison differs."""
        return all(one.right for one in self.comparisons.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(
    model: nn.Module,
    *,
    kinds: tuple[Kind, ...] = KINDS,
    vocabulary: int | None = None,
    spread: Spread,
) -> OwnerReport:
    """Compare a small copy of `model` with the owner's forward pass, on one device, in this process.

    `model`: as it is before any strategy, with or without values; it is not changed. `vocabulary`: the number of token
    ids of a model that is not Transformers'. Nothing is cached. A family that the comparison cannot run is reported as
    not applicable, with the reason.
    """
    reason = "it is no causal language model"
    size = vocabulary_of(model) or vocabulary
    if size is not None:
        with quiet():
            reason = "no copy of it is small enough"
            for small in reduce(model, make_plan(model, ALONE), ALONE):
                template = with_few_keys(without_dropout(small.model))
                subject = _Subject(template, spread, min(size, vocabulary_of(template) or size))
                try:
                    subject.logits([0], LENGTH)
                # A copy may have sizes that the model's own code cannot do.
                except Exception as error:
                    reason = f"a copy of it does not run: {in_one_line(error)}"
                    continue
                found = {kind: _COMPARISONS[kind](subject) for kind in kinds}
                return OwnerReport(found, f"{small.layers} layers, widths divided by {small.factor}")
    return OwnerReport(dict.fromkeys(kinds, Comparison("not applicable", reason)))


@dataclass
class _Subject:
    """The copy that is compared, and the tokens that it is given."""

    template: nn.Module
    """With values, on the CPU; copies of it are computed with."""
    spread: Spread
    vocabulary: int

    def ids(self, rows: int, length: int = LENGTH) -> Tensor:
        """Random token ids, int64 [rows, length]; always the same."""
        draw = torch.Generator().manual_seed(0)
        first = min(FIRST_ID, self.vocabulary // 2)
        return torch.randint(first, self.vocabulary, (rows, length), generator=draw)

    def copied(self, *, precise: bool) -> nn.Module:
        """A copy in the mode of training."""
        return copy.deepcopy(self.template).to(torch.float64 if precise else torch.float32).train()

    def ours(self, *, precise: bool) -> nn.Module:
        """A copy as we train it."""
        return self.spread(self.copied(precise=precise), ALONE)

    def logits(self, starts: list[int], length: int, *, precise: bool = False) -> Tensor:
        """Logits of one row for each start: its positions begin there. Of a copy that computed nothing before."""
        ids = self.ids(len(starts), length)
        return _logits(self.ours(precise=precise), ids, _positions(starts, length))


def _positions(starts: list[int], length: int = LENGTH) -> Tensor:
    return torch.stack([torch.arange(start, start + length) for start in starts])


def _logits(model: nn.Module, ids: Tensor, positions: Tensor | None) -> Tensor:
    """`positions`: None where the model numbers them itself."""
    rows = torch.arange(ids.size(0))
    with torch.no_grad(), sharded(model).micro_batch(seed=0, step=0, rows=rows):
        return logits_of(model, ids, positions)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every rate of dropout at 0: what two passes drop is no difference between them."""
    for holder in (*model.modules(), *configs_of(model)):
        for key, value in vars(holder).items():
            named = "drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(holder).__name__)
            if named and isinstance(value, float):
                vars(holder)[key] = 0.0
    return model


def with_few_keys(model: nn.Module) -> nn.Module:
    """The model whose sparse attention chooses at most `KEYS` keys; of rows this short it would choose all."""
    for module in model.modules():
        keys = getattr(module, "index_topk", None)
        if isinstance(keys, int):
            vars(module).update(index_topk=min(keys, KEYS))
    return model


def _loss(subject: _Subject) -> Comparison:
    """Our loss against the owner's: value, gradients, and the buffers afterwards."""
    if not is_transformers(subject.template):
        return Comparison("not applicable", "the model has no loss of its own")
    found = _same_loss(subject, shifted=False)
    if found.right:
        return found
    # A decoder of an encoder-decoder takes labels that are shifted already.
    again = _same_loss(subject, shifted=True)
    return again if again.verdict == "right" else found


def _same_loss(subject: _Subject, *, shifted: bool) -> Comparison:
    """`shifted`: the owner's labels are those of the next token."""
    found = decided(lambda precise: _losses(subject, shifted=shifted, chunk=CHUNK, precise=precise))
    if found.verdict != "not applicable":
        return found
    # Not every model computes its logits from the output of its base model, a chunk of positions at a time.
    return decided(lambda precise: _losses(subject, shifted=shifted, chunk="none", precise=precise))


def _losses(
    subject: _Subject, *, shifted: bool, chunk: int | Literal["none"], precise: bool
) -> tuple[Outcome, Outcome]:
    """The owner's loss and ours. `shifted`: the owner's labels are those of the next token."""
    ids, positions = subject.ids(2, TAUGHT), _positions([0, 0], TAUGHT)
    labels = ids.clone()
    labels[0, :3] = labels[1, 5:7] = IGNORED
    next_token = labels.roll(-1, 1)
    next_token[:, -1] = IGNORED
    owner = subject.copied(precise=precise)
    # As its user calls it: it numbers positions itself.
    options = {"output_router_logits": True} if asks_for_router_logits(owner) else {}
    output = call(owner, ids, None, labels=next_token if shifted else labels, **options)
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise _NoOwner("its forward pass takes labels and returns no loss")
    loss.backward()  # type: ignore[no-untyped-call]
    ours = subject.ours(precise=precise)
    tokens = float((next_token != IGNORED).sum())
    with sharded(ours).micro_batch(seed=0, step=0, rows=torch.arange(2)):
        mine = causal_lm_loss(ours, ids, next_token, positions, tokens, LossConfig(chunk=chunk))
        mine.backward()  # type: ignore[no-untyped-call]
    return _outcome(owner, loss), _outcome(ours, mine)


class _NoOwner(Exception):
    """The model has no loss to compare with."""


def _outcome(model: nn.Module, loss: Tensor) -> Outcome:
    tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(loss.detach()), tensors | _buffers(model))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {f"buffer {name}": b.detach().double() for name, b in model.named_buffers() if not b.is_meta}


def _rows(subject: _Subject) -> Comparison:
    """Two rows together against each alone."""

    def both(precise: bool) -> tuple[Outcome, Outcome]:
        ids, positions = subject.ids(2), _positions([0, 0])
        model = subject.ours(precise=precise)
        alone = [_logits(model, ids[row : row + 1], None) for row in range(2)]
        together = _logits(subject.ours(precise=precise), ids, positions)
        return _of_logits({f"row {row}": one for row, one in enumerate(alone)}), _of_logits(
            {f"row {row}": together[row : row + 1] for row in range(2)}
        )

    return decided(both)


def _packing(subject: _Subject) -> Comparison:
    """Documents packed into one row against each alone, where they bear loss."""
    ids = subject.ids(1)
    starts = [sum(DOCUMENTS[:at]) for at in range(len(DOCUMENTS))]
    spans = [slice(start, start + length) for start, length in zip(starts, DOCUMENTS, strict=True)]

    def both(precise: bool) -> tuple[Outcome, Outcome]:
        model = subject.ours(precise=precise)
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
        alone = [_logits(model, ids[:, span], None) for span in spans]
        packed = _logits(subject.ours(precise=precise), ids, positions)
        # The last token of a document predicts nothing.
        return _of_logits({f"document {at}": one[:, :-1] for at, one in enumerate(alone)}), _of_logits(
            {f"document {at}": packed[:, span][:, :-1] for at, span in enumerate(spans)}
        )

    return decided(both)


def _padding(subject: _Subject) -> Comparison:
    """A document that is filled up to the length of a row against the document alone, whatever fills it."""

    def both(precise: bool) -> tuple[Outcome, Outcome]:
        ids, document = subject.ids(1), DOCUMENTS[0]
        alone = _logits(subject.ours(precise=precise), ids[:, :document], None)
        padded = _logits(subject.ours(precise=precise), ids, _positions([0]))
        return _of_logits({"a document": alone}), _of_logits({"a document": padded[:, :document]})

    return decided(both)


def _length(subject: _Subject) -> Comparison:
    """A row against the same beside one of the largest positions; where it differs, from which positions on."""
    limits = _limits(subject.template)

    def beside(largest: int, precise: bool) -> tuple[Outcome, Outcome]:
        alone = subject.logits([0], SHORT, precise=precise)
        together = subject.logits([0, largest - SHORT], SHORT, precise=precise)
        return _of_logits({"a row": alone}), _of_logits({"a row": together[:1]})

    found = Comparison("not applicable", "its config names no number of positions")
    for limit in limits:
        found = decided(lambda precise, limit=limit: beside(limit, precise))  # type: ignore[misc]
        if found.verdict == "right":
            return found
        if found.verdict == "differs":
            break
    if found.verdict != "differs":
        return found
    low, high = SHORT, limit
    while high - low > 1:
        middle = (low + high) // 2
        if decided(lambda precise, middle=middle: beside(middle, precise)).right:  # type: ignore[misc]
            low = middle
        else:
            high = middle
    return Comparison(
        "differs", f"rows of more than {low} positions change those beside them: {found.detail}", low
    )


def _limits(model: nn.Module) -> list[int]:
    """Numbers of positions to try: beyond what the model was made for, where it has no table of positions, then its own
    largest."""
    config: Any = text_config(model)
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 2 * SHORT:
        return []
    return [4 * most, most - first_position(model)]


def _of_logits(logits: dict[str, Tensor]) -> Outcome:
    return Outcome(0.0, {name: tensor.double() for name, tensor in logits.items()})


def decided(both: Callable[[bool], tuple[Outcome, Outcome]]) -> Comparison:
    """Whether two outcomes are equal, as `mismatch` decides."""

    def outcomes(precise: bool) -> tuple[Outcome, Outcome]:
        with float64() if precise else contextlib.nullcontext():
            return both(precise)

    try:
        found = mismatch(outcomes)
    except (_NoOwner, HyperParallelError) as reason:
        return Comparison("not applicable", str(reason))
    # Whatever the model's own code raises.
    except Exception as error:
        return Comparison("not applicable", in_one_line(error))
    return Comparison("right") if found is None else Comparison("differs", str(found))


_COMPARISONS: dict[Kind, Callable[[_Subject], Comparison]] = {
    "loss": _loss,
    "rows": _rows,
    "packing": _packing,
    "length": _length,
    "padding": _padding,
}
