"""Random families of Transformers in odd shapes under random strategies, judged by PyTorch and Transformers alone.

    python benchmarks/attack_random.py [--cells 1000] [--seed 1] [--workers 2] [--resume]

A cell is one training step of real workers over gloo. It is right if its loss and every gradient are those of the
model's own forward pass on one device, which is given each document by itself: `model(input_ids).logits`, PyTorch's
cross-entropy, `backward`; in float64, or in float32 where the model itself differs between the two. Documents share
rows where a run would let them (`hyper_parallel.shard.owner_check`). What a run refuses is refused. A cell depends on
its seed and number alone. Exits with 1 when one is wrong, crashes or hangs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
import transformers
from attack_models import _by_processes, _checked, _outcome
from campaigns import Rows, in_processes, limited
from commandline import run
from measure import quiet
from pages import Benchmark
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness import equivalence as matrix
from harness.random_files import _strategy
from harness.small_models import causal_families, small_fields
from hyper_parallel import Strategy, init_weights, parallelize, sharded
from hyper_parallel.compat.dispatch import float64
from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.shard.owner_check import compare
from hyper_parallel.verify.step import StepOutcome, has_experts

LIMIT_S = 180
TOLERANCE = 1e-4
"""Of a gradient in float32 beside one in float64."""
MOST_RANKS = 8
SPECIAL = 8
"""Ids below are special tokens of some family."""
_KEYS = ("input_ids", "labels", "position_ids")
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "shared_expert_intermediate_size",
)


def drawn(seed: int, number: int) -> tuple[str, dict[str, Any], dict[str, Any], int, int]:
    """Family, the fields of its small config, strategy, rows and positions of a cell."""
    draw = random.Random(f"{seed} {number}")
    family = draw.choice(causal_families())
    fields = dict(small_fields(family))
    if "vocab_size" in fields:
        fields["vocab_size"] += draw.choice((0, 1, 3, 11))
    for key in _WIDTHS:
        if isinstance(fields.get(key), int):
            fields[key] += draw.choice((0, 0, 1, 3, 8))
    heads = fields.get("num_key_value_heads")
    latent = "kv_lora_rank" in fields  # every head has keys of its own
    if isinstance(heads, int) and heads == fields.get("num_attention_heads") and not latent:
        fields["num_key_value_heads"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if isinstance(fields.get("tie_word_embeddings"), bool):
        fields["tie_word_embeddings"] = draw.random() < 0.5
    while True:
        strategy = _strategy(draw, experts=any("expert" in key for key in fields))
        if draw.random() < 0.2:
            strategy = {"axes": {"pipeline": 2, **draw.choice(({}, {"shard": 2}, {"tensor": 2}))}}
        world = 1
        for axis, degree in strategy["axes"].items():
            world *= 1 if axis == "expert" else degree
        if 1 < world <= MOST_RANKS:
            break
    axes = strategy["axes"]
    rows = axes.get("replicate", 1) * axes.get("shard", 1) * draw.choice((1, 1, 2))
    return family, fields, strategy, max(rows, 2), draw.choice((24, 32, 40))


def judge(
    fields: Mapping[str, Any], batch: Mapping[str, Tensor], seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Gradients of the unmodified model on one device, each document by itself.

    Its values are those that a run with this seed draws.
    """
    drawn_model = matrix.build_model(fields)
    parallelize(drawn_model, Strategy(check=False))
    init_weights(drawn_model, seed)
    values = {parameter.name: parameter.local.detach() for parameter in sharded(drawn_model).parameters()}
    model: Any = matrix.build_model(fields, "cpu")
    unknown = model.load_state_dict(values, strict=False).unexpected_keys
    assert not unknown, f"the model has no {unknown}"
    model.to(dtype)
    tokens = int((batch["labels"] != -100).sum())
    with float64() if dtype == torch.float64 else contextlib.nullcontext():
        for ids, labels, positions in zip(*(batch[key] for key in _KEYS), strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                logits = model(input_ids=ids[None, start:stop], use_cache=False).logits[0]
                summed = cross_entropy(logits, labels[start:stop], reduction="sum", ignore_index=-100)
                if summed.requires_grad:
                    (summed / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(ours: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient, of its largest element or a thousandth of that of all, and whose it is."""
    floor = max(float(x.abs().max()) for x in right.values()) / 1000
    zero = torch.zeros(())
    return max(
        (
            float((ours.get(name, zero).double() - right.get(name, zero)).abs().max())
            / max(float(right.get(name, zero).abs().max()), floor),
            name,
        )
        for name in ours.keys() | right.keys()
    )


def attacked(seed: int, number: int) -> dict[str, Any]:
    """One cell, as the result file has it."""
    family, fields, strategy, rows, length = drawn(seed, number)
    cell: dict[str, Any] = {"family": family, "strategy": strategy, "rows": rows, "length": length}
    began = time.monotonic()
    try:
        model = matrix.build_model(fields)
        if not has_experts(model.config) and "expert" in strategy["axes"]:
            strategy = {**strategy, "axes": {k: n for k, n in strategy["axes"].items() if k != "expert"}}
        report = compare(model, kinds=("loss", "packing", "padding"))
        batch = _text(matrix.draw_batch(fields, rows, length, number))
        if report["packing"].verdict != "right":
            batch["position_ids"] = torch.arange(length).repeat(rows, 1)
            batch["labels"] = torch.cat([batch["input_ids"][:, 1:], torch.full((rows, 1), -100)], 1)
        config = matrix.family_config(fields, {}, {"batch": rows}, length)
        gradients = judge(fields, batch, config.seed)
        one = matrix.one_device(fields, {}, batch, {"batch": rows}, length)
    except HyperParallelError as refusal:
        return {**cell, "outcome": "refused", "detail": str(refusal)[:300]}
    except Exception as error:
        return {**cell, "outcome": "no reference", "detail": f"{type(error).__name__}: {error}"[:300]}
    for kind in ("loss", "padding"):
        if not report[kind].right:
            return {
                **cell,
                "outcome": "refused",
                "detail": f"the {kind} differs: {report[kind].detail}"[:300],
            }
    off_by, name = difference(one.gradients, gradients)
    if off_by > TOLERANCE:
        # In float32 a token that is between two experts may go to the other one.
        off_by, name = difference(one.gradients, judge(fields, batch, config.seed, torch.float32))
    if off_by > TOLERANCE:
        return {
            **cell,
            "outcome": "WRONG",
            "detail": f"on one device the gradient of {name} is off by {off_by:.1e}",
        }
    made = _outcome(functools.partial(_step, fields, strategy, batch, one, rows, length))
    if made["outcome"] in ("WRONG", "traceback"):
        made = _checked(fields, strategy, "meta", rows) or made
    return {
        **cell,
        **made,
        "packed": report["packing"].verdict == "right",
        "seconds": round(time.monotonic() - began, 1),
    }


def _text(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch without ids that mean padding, beginning or end to a family."""
    ids = batch["input_ids"].clamp(min=SPECIAL)
    labels = torch.where(batch["labels"] < 0, batch["labels"], batch["labels"].clamp(min=SPECIAL))
    return {**batch, "input_ids": ids, "labels": labels}


def _step(
    fields: Mapping[str, Any],
    strategy: Mapping[str, Any],
    batch: Any,
    one: StepOutcome,
    rows: int,
    length: int,
) -> Any:
    train: dict[str, Any] = {"batch": rows}
    if "pipeline" in strategy["axes"]:
        train["micro_batch"] = 1
    config = matrix.family_config(fields, strategy, train, length)
    share = config.strategy.axes.data
    if rows % share:
        raise StrategyError(f"{rows} rows does not divide over {share} data ranks")
    return _by_processes(config, fields, "meta", batch, one)


def counted(rows: Mapping[str, Any]) -> dict[str, Any]:
    """How many cells came to what, and how many families and strategies they have."""
    outcomes = collections.Counter(row["outcome"] for row in rows.values())
    return {
        "cells": len(rows),
        "families": len({row["family"] for row in rows.values()}),
        "strategies": len({str(row["strategy"]) for row in rows.values()}),
        **dict(sorted(outcomes.items())),
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    counts = collections.Counter(result["counts"])
    yield (
        f"{counts['cells']} random cells (`benchmarks/attack_random.py`, seed {result['seed']}): {counts['families']} "
        f"families in odd shapes under {counts['strategies']} strategies of 2 to {MOST_RANKS} real workers, each "
        "gradient beside that of the unmodified model, document by document: "
        f"**{counts['right']} right, {counts['WRONG']} wrong, {counts['traceback']} crashes**, "
        f"{counts['arithmetic']} refused because numbers do not divide, "
        f"{counts['refused']} refused for another reason, "
        f"{counts['no reference']} that the model itself cannot compute."
    )


def main(
    cells: Annotated[int, "how many"] = 1000,
    seed: int = 1,
    resume: Annotated[bool, "only cells without a result, or with a wrong one"] = False,
    workers: int = 2,
) -> bool:
    """Run the cells; whether one is wrong or crashes."""

    def summary(found: Mapping[str, Any]) -> dict[str, Any]:
        return {"seed": seed, "transformers": transformers.__version__, "counts": counted(found)}

    rows = Rows(BENCHMARK, again=not resume, summary=summary)
    names = [f"{seed}-{number}" for number in range(cells)]
    wanted = [
        *rows.missing(names),
        *(name for name in names if resume and _is_fault(rows.rows.get(name, {}))),
    ]
    cases = in_processes(_numbered, wanted, workers, begin=functools.partial(quiet, threads=1))
    for done, (name, row) in enumerate(cases, 1):
        rows.rows[name] = row
        if done % 20 == 0 or done == len(wanted):
            rows.write()
        if _is_fault(row):
            print(f"{name}: {row['family']} {row['strategy']}: {row['outcome']} {row['detail']}", flush=True)
    counts = counted(rows.rows)
    print(counts)
    return bool(counts.get("WRONG") or counts.get("traceback"))


def _is_fault(row: Mapping[str, Any]) -> bool:
    return row.get("outcome") in ("WRONG", "traceback")


def _numbered(name: str) -> dict[str, Any]:
    seed, _, number = name.partition("-")
    with limited(LIMIT_S):
        row = attacked(int(seed), int(number))
    # No folder of this machine.
    return {**row, "detail": re.sub(r"\S*/site-packages/", "", row.get("detail", ""))}


BENCHMARK = Benchmark("attack_random", {"families.md": page}, key="cells")

if __name__ == "__main__":
    run(main)
