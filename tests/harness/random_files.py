"""Fuzzing with random strategies on small models and with run files: each must be right, or refused with a reason.

A case is a pure function of its number (and a file of its folder), so that a failing one can be repeated alone.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.equivalence import (
    Cell,
    Settings,
    build_model,
    draw_batch,
    family_config,
    judged,
    one_device,
    run_cell,
)
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.load import from_dict
from hyper_parallel.config.run import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.engine import check_length
from hyper_parallel.strategy import AXIS_NAMES
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.strategy.pipeline import ScheduleName
from hyper_parallel.verify.run import describe, verify_file
from hyper_parallel.verify.step import EXPERT_COUNTS

Draw = random.Random


@dataclass(frozen=True)
class Case:
    """One drawn model and strategy."""

    number: int
    family: Settings
    strategy: Settings
    train: Settings
    length: int

    def run(self) -> Cell:
        """One step under the strategy against one device. Never raises."""

        def report() -> Any:
            config = family_config(self.family, self.strategy, self.train, self.length)
            batch = draw_batch(self.family, config.train.batch, self.length, self.number)
            one = one_device(self.family, self.strategy, batch, self.train, self.length)
            return run_cell(config, build_model(self.family), batch, one)

        return judged(str(self.family["model_type"]), str(self.strategy), report)


def draw_case(number: int) -> Case:
    """Case `number`: a model of one or two layers, in a pipeline up to four, and axes of at most 16 ranks."""
    draw = random.Random(number)
    family = dict(draw.choice(list(_FAMILIES.values()))(draw))
    strategy = _strategy(draw, experts=any(family.get(key) for key in EXPERT_COUNTS))
    axes = strategy["axes"]
    data = axes.get("replicate", 1) * axes.get("shard", 1)
    share = draw.choice([1, 1, 2])
    train: dict[str, Any] = {"batch": data * share, "clip": draw.choice([None, 1.0])}
    if share == 2 and draw.random() < 0.5:
        train["micro_batch"] = 1
    elif family["model_type"] in ("mixtral", "qwen3_moe") and not family.get("mlp_only_layers"):
        # The auxiliary loss of one batch is not that of its halves, on one device either; and Transformers cannot
        # compute that of a model without experts.
        family |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    if draw.random() < 0.3:
        train["loss"] = {
            "chunk": draw.choice([5, 16, "none"]),
            "label_smoothing": draw.choice([0.0, 0.1]),
            "z_loss": draw.choice([0.0, 0.01]),
        }
    length = draw.choice([16, 24, 32])
    _pipeline(random.Random(f"pipeline {number}"), family, strategy, train)
    return Case(number, family, strategy, train, length)


def _pipeline(draw: Draw, family: dict[str, Any], strategy: dict[str, Any], train: dict[str, Any]) -> None:
    """Make a third of the cases of at most four ranks pipelines, of two or four device groups at any place among the
    axes: each rank of a pipeline is captured by itself, so that more would take minutes."""
    mesh = [degree for axis, degree in strategy["axes"].items() if axis != "expert"]
    if math.prod(mesh) > 4 or draw.random() >= 0.35:
        return
    ranks = 4 if math.prod(mesh) <= 2 and draw.random() < 0.3 else 2
    axes = list(strategy["axes"].items())
    axes.insert(draw.randint(0, len(mesh)), ("pipeline", ranks))
    strategy["axes"] = dict(axes)
    # Its levels name every axis.
    strategy.pop("placement", None)
    schedule = draw.choice([*ScheduleName, AUTO, AUTO])
    pipeline: dict[str, Any] = {"schedule": str(schedule)}
    strategy["pipeline"] = pipeline
    if draw.random() < 0.5:
        pipeline["schedule"] = str(draw.choice(["1f1b", "interleaved-1f1b", "zb-h2", "dualpipev", AUTO]))
        pipeline["overlap_forward_backward"] = True
    layers = "n_layer" if family["model_type"] == "gpt2" else "num_hidden_layers"
    more = draw.choice([0, 1, 2])
    family[layers] += more
    if "layer_types" in family:
        family["layer_types"] = [*family["layer_types"], *draw.choices(family["layer_types"], k=more)]
    # An auxiliary loss of the whole batch is not that of its micro-batches, on one device either.
    family.pop("output_router_logits", None)
    data = strategy["axes"].get("replicate", 1) * strategy["axes"].get("shard", 1)
    train |= {"batch": data * ranks * draw.choice([1, 2, 2, 2]), "micro_batch": 1}


# Models.


def _dense(draw: Draw, family: str, **more: Any) -> dict[str, Any]:
    heads = draw.choice([2, 4, 4, 8, 8])
    size = draw.choice([4, 8])
    return {
        "model_type": family,
        "vocab_size": draw.randint(60, 140),
        "hidden_size": heads * size,
        "intermediate_size": draw.randint(20, 60),
        "num_hidden_layers": draw.choice([1, 1, 2]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw.random() < 0.4,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _head(settings: dict[str, Any]) -> dict[str, Any]:
    """With the head size said, for families whose default is that of a large model."""
    return {**settings, "head_dim": settings["hidden_size"] // settings["num_attention_heads"]}


def _windows(draw: Draw, settings: dict[str, Any]) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    layers = [draw.choice(kinds) for _ in range(settings["num_hidden_layers"])]
    return {**settings, "sliding_window": draw.choice([3, 6, 10]), "layer_types": layers}


def _experts(draw: Draw) -> dict[str, Any]:
    count = draw.choice([4, 8, 8])
    return {"num_local_experts": count, "num_experts_per_tok": draw.choice([1, 2, 3])}


def _qwen3_moe(draw: Draw) -> dict[str, Any]:
    experts = _experts(draw)
    return {
        **_head(_dense(draw, "qwen3_moe")),
        "num_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": draw.choice([8, 12, 16]),
        "mlp_only_layers": [0] if draw.random() < 0.2 else [],
    }


def _deepseek(draw: Draw) -> dict[str, Any]:
    settings = _dense(draw, "deepseek_v3")
    return {
        **settings,
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": draw.choice([None, 12]),
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": draw.choice([6, 8]),
        "n_routed_experts": draw.choice([4, 8]),
        "n_shared_experts": draw.choice([1, 2]),
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": draw.choice([1, 2]),
        "moe_intermediate_size": draw.choice([8, 12]),
        "first_k_dense_replace": draw.choice([0, 1]),
    }


def _gpt2(draw: Draw) -> dict[str, Any]:
    heads = draw.choice([2, 4, 8])
    return {
        "model_type": "gpt2",
        "vocab_size": draw.randint(60, 140),
        "n_embd": heads * draw.choice([4, 8]),
        "n_layer": draw.choice([1, 2]),
        "n_head": heads,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **({"resid_pdrop": 0.1} if draw.random() < 0.3 else {}),
    }


_FAMILIES: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "llama": lambda d: _dense(d, "llama", attention_bias=d.random() < 0.5, mlp_bias=d.random() < 0.5),
    "mistral": lambda d: _dense(d, "mistral", sliding_window=d.choice([None, 3, 8])),
    "qwen2": lambda d: _dense(d, "qwen2"),
    "qwen3": lambda d: _head(_dense(d, "qwen3")),
    "gemma2": lambda d: _windows(
        d, {**_head(_dense(d, "gemma2")), "final_logit_softcapping": d.choice([None, 5.0])}
    ),
    "gemma3": lambda d: _windows(d, _head(_dense(d, "gemma3_text"))),
    "phi3": lambda d: _dense(d, "phi3", resid_pdrop=d.choice([0.0, 0.1])),
    "gpt2": _gpt2,
    "mixtral": lambda d: {**_dense(d, "mixtral"), **_experts(d)},
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": lambda d: {**_windows(d, _head(_dense(d, "gpt_oss"))), **_experts(d)},
    "deepseek_v3": _deepseek,
}


# Strategies.


def _strategy(draw: Draw, experts: bool) -> dict[str, Any]:
    degrees = dict.fromkeys(AXIS_NAMES, 1)
    ranks = draw.choice([2, 2, 4, 4, 4, 8, 8, 16])
    while ranks > 1:
        axis = draw.choice(AXIS_NAMES)
        degrees[axis] *= 2
        ranks //= 2
    if draw.random() < 0.1:
        axis = draw.choice(AXIS_NAMES)
        degrees[axis] = 3 if degrees[axis] == 1 else degrees[axis]
    order = [axis for axis in AXIS_NAMES if degrees[axis] > 1]
    draw.shuffle(order)
    axes = {axis: degrees[axis] for axis in order}
    tensor = degrees["tensor_x"] * degrees["tensor_y"]
    spanned = tensor * degrees["shard"] * degrees["context"]
    if experts and draw.random() < 0.7:
        axes["expert"] = draw.choice([n for n in (1, 2, 3, 4, 8) if spanned % n == 0])
    strategy: dict[str, Any] = {"axes": axes}
    if tensor > 1 and draw.random() < 0.6:
        strategy["sequence"] = True
    memory: dict[str, Any] = {}
    if draw.random() < 0.3:
        memory["recompute"] = "layer"
    if tensor > 1 and draw.random() < 0.3:
        memory["gathered"] = "again"
    if memory:
        strategy["memory"] = memory
    if degrees["context"] > 1 and draw.random() < 0.7:
        strategy["context"] = {"method": draw.choice(["ring", "ulysses", "hybrid"])}
    if len(order) > 1 and draw.random() < 0.15:
        at = draw.randrange(1, len(order))
        strategy["placement"] = {"node": order[at:], "network": order[:at]}
    if draw.random() < 0.05:
        strategy["rules"] = {"model.layers.*.mlp*": "replicate"}
    return strategy


# Fuzzing with random run files: `verify` must pass for each file that `train` accepts, and refuse only what it
# refuses.
#
# A file is a pure function of its number and its folder.

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
