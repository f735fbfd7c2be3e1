"""Fuzzing with random run files: `verify` must pass for each file that `train` accepts, and refuse only what it
refuses.

A file is a pure function of its number and its folder.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hyper_parallel.compat.fake_process_group import fake_ranks
from hyper_parallel.config.load import from_dict
from hyper_parallel.config.run import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.engine import check_length
from hyper_parallel.verify.families import EXPERT_COUNTS
from hyper_parallel.verify.fuzz import draw_case
from hyper_parallel.verify.matrix import Cell, judged
from hyper_parallel.verify.run import describe, verify_file

_OF_TOKENIZERS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_WORDS = (
    "a",
    "the",
    "model",
    "learns",
    "words",
    "that",
    "stand",
    "in",
    "rows",
    "of",
    "text",
    "no",
    "row",
    "knows",
)


def draw_file(number: int, folder: Path) -> dict[str, Any]:
    """Run file `number`: a model and strategy of `fuzz.draw_case`, with random text, optimizer and settings."""
    case, draw = draw_case(number), random.Random(f"file {number}")
    strategy = {**case.strategy, "memory": dict(case.strategy.get("memory", {}))}
    memory = strategy["memory"]
    memory.pop("gathered", None)
    if strategy.get("sequence") or strategy["axes"].get("tensor_y", 1) > 1:
        memory["gathered"] = draw.choice(["keep", "mlp", "again"])
    if strategy["axes"].get("shard", 1) > 1 and draw.random() < 0.3:
        memory["shard"] = draw.choice(["optimizer", "gradients", "parameters"])
    if draw.random() < 0.15:
        strategy["precision"] = {"compute": "bfloat16"}
    return {
        "version": 1,
        "out": str(folder / f"run-{number}"),
        "seed": draw.randrange(100),
        "model": {"config": _even({k: v for k, v in case.family.items() if k not in _OF_TOKENIZERS})},
        "data": {
            "train": str(_text(draw, folder / f"{number}.jsonl")),
            "tokenizer": {"vocab_size": draw.randint(262, 300)},
            "sequence": case.length,
            "pack": draw.random() < 0.8,
            "holdout": draw.choice([0, 0.1]),
            "cache": str(folder / f"cache-{number}"),
        },
        "train": {
            **case.train,
            "engine": draw.choice(["graph", "eager"]),
            "optimizer": {"name": draw.choice(["adamw", "adamw", "muon"]), "lr": draw.choice([1e-3, 2e-2])},
            "schedule": {"name": draw.choice(["cosine", "constant", "wsd"])},
        },
        "strategy": strategy,
    }


def _even(family: dict[str, Any]) -> dict[str, Any]:
    """Experts of widths that PyTorch's grouped matrix product accepts, multiples of 16 bytes; others fail in plain
    PyTorch too.
    """
    if not any(family.get(key) for key in EXPERT_COUNTS):
        return family
    return {key: -(-value // 8) * 8 if "intermediate_size" in key else value for key, value in family.items()}


def run_file(number: int, folder: Path) -> Cell:
    """The verdict of `verify` on file `number`: "right", "wrong", or "refused" if `train` refuses it too.

    Never raises. A file that `train` accepts and `verify` refuses is wrong.
    """
    content = draw_file(number, folder)
    family = str(content["model"]["config"]["model_type"])
    try:
        config = from_dict(content)
    except HyperParallelError as refusal:
        return Cell(family, str(content["strategy"]), "refused", 0.0, 0.0, str(refusal))
    cell = judged(family, describe(config.strategy), lambda: verify_file(config))
    if cell.status == "refused" and (accepted := _accepted(config)):
        return Cell(
            family, cell.strategy, "wrong", 0.0, 0.0, f"{accepted}, and verify refuses it: {cell.detail}"
        )
    return cell


def _accepted(config: RunConfig) -> str:
    """A message if `train` accepts the file, else an empty text."""
    try:
        model, _ = unsharded(config)
        with fake_ranks(config.strategy.axes.world, 0):
            parallelize(model, config.effective_strategy, lowering="fsdp")
            check_length(sharded(model), config)
    except HyperParallelError:
        return ""
    return "train accepts it"


def _text(draw: random.Random, file: Path) -> Path:
    """Documents of all three kinds and many lengths, so that some rows hold one document and some several."""
    lines = []
    for _ in range(draw.randint(40, 60)):
        said = [" ".join(draw.choices(_WORDS, k=draw.choice([1, 3, 8, 40]))) for _ in range(2)]
        turns = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        kinds: list[dict[str, Any]] = [
            {"text": said[0]},
            {"prompt": said[0], "response": said[1]},
            {"messages": turns},
        ]
        lines.append(json.dumps(draw.choice(kinds)))
    file.write_text("\n".join(lines))
    return file
