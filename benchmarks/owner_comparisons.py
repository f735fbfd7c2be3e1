"""The comparisons of one family with its owner, Transformers, each on one device: what `owner.py` runs."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from campaigns import one_line
from owner_folders import draw_documents, from_folder, save, trained_loss
from owner_verdicts import (
    LENGTH,
    ROWS,
    NoReferenceError,
    Tensors,
    Verdict,
    difference,
    draw_ids,
    judged,
    reference,
    verdict,
    without_cache,
)
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import AutoConfig

import hyper_parallel as hp
from harness.small_models import Fields, noisy_model, small_fields
from hyper_parallel.compat.dispatch import float64, widen
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard.forward import logits_of
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.verify.report import TOLERANCE

ROUNDING = 1e-2
"""A larger error is no rounding."""
RANKS_S = 60
"""Two ranks that take longer hang."""
CHUNK = 24
"""Positions whose logits are computed at a time: the step has more."""


# Loss.


def loss(family: str) -> Verdict:
    """Our loss, its gradients and the buffers that it changes, beside those of the model's own forward with labels."""
    try:
        return _loss(small_fields(family, auxiliary=True))
    except NoReferenceError:
        if small_fields(family, auxiliary=True) == small_fields(family):
            raise
        return _loss(small_fields(family))


def _loss(fields: Fields) -> Verdict:
    model = noisy_model(fields)
    settings: Any = CHUNK
    try:
        result = _loss_verdict(model, settings)
    except HyperParallelError as refusal:
        if "train.loss.chunk: none" not in str(refusal):
            raise
        settings = "none"
        result = _loss_verdict(model, settings)
        if result["verdict"] == "right":
            result |= {"verdict": "adapted", "detail": "train.loss.chunk: none, as the refusal says"}
    if result["verdict"] == "wrong":
        again = _loss_verdict(model, settings, shifted=True)
        if again["verdict"] == "right":
            return {**again, "verdict": "adapted", "detail": "its labels are those of the next token"}
        # A loop of the user's own gets the loss that it asks for; a run may refuse to train on another one.
        with tempfile.TemporaryDirectory() as place:
            save(model, Path(place) / "model")
            trained_loss(Path(place), draw_documents())
    return result


def _loss_verdict(model: nn.Module, chunk: Any, shifted: bool = False) -> Verdict:
    error, where = _loss_error(model, chunk, shifted)
    if TOLERANCE["float32"] < error < ROUNDING:
        exact, where = _loss_error(model, chunk, shifted, exactly=True)
        if exact <= TOLERANCE["float64"]:
            return {"verdict": "right", "error": float(f"{exact:.2g}")}
    return verdict(error, where)


def _loss_error(model: nn.Module, chunk: Any, shifted: bool, exactly: bool = False) -> tuple[float, str]:
    """The largest difference, and where it is. `shifted`: the owner is given the labels of the next token, which the
    decoders of encoder-decoders expect. `exactly`: in float64, where rounding is next to nothing."""
    theirs, ours = without_cache(copy.deepcopy(model)), copy.deepcopy(model)
    ids = draw_ids()
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    with reference(), float64() if exactly else contextlib.nullcontext():
        if exactly:
            widen(theirs)
        right = theirs(input_ids=ids, labels=labels if shifted else ids).loss
        right.backward()
    with contextlib.ExitStack() as stack:
        if exactly:
            stack.enter_context(float64())
        hp.parallelize(ours, hp.Strategy())
        if exactly:
            widen(ours)
        stack.enter_context(hp.sharded(ours).micro_batch(seed=0, step=0, rows=torch.arange(ROWS)))
        positions = torch.arange(LENGTH).repeat(ROWS, 1)
        tokens = float((labels != -100).sum())
        got = causal_lm_loss(ours, ids, labels, positions, tokens=tokens, options=LossConfig(chunk=chunk))
        got.backward()
    losses = difference({"loss": right.detach()}, {"loss": got.detach()})
    if losses[0] > TOLERANCE["float64" if exactly else "float32"]:
        return losses[0], f"the loss is {float(got.detach()):.6g}, the owner's {float(right.detach()):.6g}"
    return max(
        losses,
        difference(_gradients(theirs), _gradients(ours)),
        difference(dict(theirs.named_buffers()), dict(ours.named_buffers())),
    )


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Rows.


def rows(family: str) -> Verdict:
    """Logits of two rows together beside those of each alone."""
    return _rows(small_fields(family))


def longer_rows(family: str) -> Verdict:
    """The same where rotary factors follow the longest document of the batch (`dynamic`)."""
    fields = small_fields(family)
    config: Any = AutoConfig.for_model(**fields)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise NoReferenceError("its config has no rotary embedding of one kind for all layers")
    rope = {**rope, "rope_type": "dynamic", "factor": 2.0}
    if "partial_rotary_factor" in rope:  # a quarter of a small head is too little for the formula
        rope["partial_rotary_factor"] = 1.0
    return _rows({**fields, "rope_parameters": rope, "max_position_embeddings": LENGTH}, 3 * LENGTH // 2)


def _rows(fields: Fields, length: int = LENGTH) -> Verdict:
    ids = draw_ids(ROWS, length)
    # The first row is one document. The second holds two; where factors follow the longest, the first is long enough.
    long = LENGTH * 5 // 4 if length > LENGTH else LENGTH * 3 // 4
    positions = torch.stack([torch.arange(length), torch.arange(length) % long])
    with reference(), torch.no_grad():
        model = noisy_model(fields)
        # A model that has seen a long row keeps its factors for the next ones: each call has a model of its own.
        together = logits_of(copy.deepcopy(model), ids, positions)
        by_row = [(ids[i : i + 1], positions[i : i + 1]) for i in range(ROWS)]
        separate = torch.cat([logits_of(copy.deepcopy(model), *row) for row in by_row])
    error, _ = difference({"logits": separate}, {"logits": together})
    # Matrix products of another number of rows round in another order.
    if error <= 10 * TOLERANCE["float32"]:
        return {"verdict": "right", "error": float(f"{error:.2g}")}
    dealt = judged(lambda: _on_two_ranks(fields, ids, positions))
    detail = f"rows depend on each other ({error:.2g}); shard: 2: {dealt.get('detail', 'as one device')}"
    return {
        **dealt,
        "verdict": "adapted" if dealt["verdict"] == "right" else dealt["verdict"],
        "detail": detail,
    }


def _on_two_ranks(fields: Fields, ids: Tensor, positions: Tensor) -> Verdict:
    """What two data ranks compute with a row each, if they are not refused, beside one device with both: processes,
    since ranks that are simulated go without the checks before training."""
    labels = ids.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100
    with reference():
        model = noisy_model(fields)
        logits = logits_of(model, ids, positions).float()
        right = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right.backward()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as place:
        rows = (fields, ids, labels, positions, f"file://{place}/store", sending)
        ranks = [context.Process(target=_rank, args=(rank, *rows), daemon=True) for rank in range(ROWS)]
        for process in ranks:
            process.start()
        try:
            if not receiving.poll(RANKS_S):
                return {"verdict": "traceback", "detail": f"two ranks took more than {RANKS_S} s"}
            got = receiving.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if isinstance(got, Exception):
        raise got
    return verdict(*max(difference({"loss": right.detach()}, got[0]), difference(_gradients(model), got[1])))


def _rank(
    rank: int, fields: Fields, ids: Tensor, labels: Tensor, positions: Tensor, store: str, results: Connection
) -> None:
    """One data rank, with one row; the first tells the loss and the gradients of all, or what it raised."""
    try:
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ROWS)
        model = noisy_model(fields)
        hp.parallelize(model, hp.Strategy(axes={"shard": ROWS}))
        handle, mine = hp.sharded(model), torch.tensor([rank])
        with handle.micro_batch(seed=0, step=0, rows=mine):
            tokens = float((labels != -100).sum())
            loss = causal_lm_loss(model, ids[mine], labels[mine], positions[mine], tokens=tokens)
            loss.backward()
        total = handle.all_reduce(loss.detach(), ("replicate", "shard"))
        gradients = {
            p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None
        }
        if rank == 0:
            results.send(({"loss": total}, gradients))
    except Exception as error:
        if rank == 0:
            results.send(error if isinstance(error, HyperParallelError) else RuntimeError(one_line(error)))
    finally:
        results.close()
    time.sleep(RANKS_S)  # until it is ended: another rank may still need it


def comparisons(family: str) -> Iterator[tuple[str, Verdict]]:
    """(name, verdict) of each comparison of a family, as they are done."""
    yield "loss", judged(lambda: loss(family))
    yield "rows", judged(lambda: rows(family))
    yield "longer rows", judged(lambda: longer_rows(family))
    for name, comparison in from_folder(family):
        yield name, judged(comparison)
