"""What the ranks of a pipeline keep and send adds up to what one stage's mesh keeps and sends without one."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate import Inspection, inspect_run

MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def _config(axes: dict[str, int], **strategy: Any) -> RunConfig:
    return from_dict(
        {
            "version": 1,
            "out": "unused",
            "model": {"config": MODEL},
            "data": {"train": ["unused"], "sequence": 64},
            "train": {"batch": 16, "micro_batch": 1},
            "strategy": {"version": 1, "axes": axes, "check": False, **strategy},
        }
    )


def _sums(found: list[Inspection]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in found:
        total.update({name: one.totals[name] for name in ("parameters", "gradients", "optimizer")})
    return total


SHARED: dict[str, Any] = {"memory": {"shard": "optimizer"}}


@functools.cache
def _whole() -> Inspection:
    """Without a pipeline."""
    return inspect_run(_config({"shard": 2}, **SHARED))


@pytest.mark.parametrize("pipeline", [{}, {"schedule": "zb-v"}, {"layers": [1, 3]}])
def test_the_stages_parameters_add_up_to_the_models(pipeline: dict[str, Any]) -> None:
    whole = _whole()
    run = _config({"pipeline": 2, "shard": 2}, pipeline=pipeline, **SHARED)
    parts = [inspect_run(run, rank) for rank in (0, 2)]
    assert _sums(parts) == _sums([whole])
    layers = [
        row.count
        for one in parts
        for row in one.rows
        if row.module == "model.layers.*.mlp.up_proj" and row.parameter == "weight"
    ]
    assert sum(layers) == 4
    # What is gathered and reduced once a step is counted once; two sums, the norm's and the loss's, are of all ranks.
    calls = sum(one.count for part in parts for one in part.collectives if one.axis == "shard")
    assert calls == sum(one.count for one in whole.collectives if one.axis == "shard") - 2


def test_the_report_names_the_stage_and_what_crosses() -> None:
    found = inspect_run(_config({"pipeline": 2, "shard": 2}, pipeline={"layers": [3, 1]}), rank=3)
    assert found.axes["pipeline"] == 2
    assert any(
        "stage 1: 1 layers; sends 16.0 KiB back in each micro-batch" in line for line in found.explanations()
    )
    assert not any(row.module == "model.embed_tokens" for row in found.rows)
    assert found.to_json()["peak"] is None
    assert "pipeline 2" in found.table()


def test_a_rank_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="--rank: 4 is none of the 4 ranks"):
        inspect_run(_config({"pipeline": 2, "shard": 2}), rank=4)
