"""Steps of pipelines on real workers: loss, norm, every gradient and every updated value of one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import odd_models
from harness.pipeline_steps import Case, Compared, against_one_device, settings_of

TOLERANCE = 1e-5
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
DROPPED = {"resid_pdrop": 0.3, "embd_pdrop": 0.2}
CHUNKS = {"micro_batch": 2, "loss": {"chunk": 8, "z_loss": 1e-2, "label_smoothing": 0.1}}
SCHEDULES = ("gpipe", "zb-h2", "v-min", "auto")
"""Those that no other case has. `tests/runtime/test_pipeline_schedules.py` proves the bits of every one."""


def _two(family: Any, train: Any = None, change: Any = None, documents: bool = True, **strategy: Any) -> Case:
    """A case of two stages on two workers."""
    settings = settings_of(family) if isinstance(family, str) else family
    return Case(
        settings, {"axes": {"pipeline": 2}, **strategy}, train or {"micro_batch": 1}, change, documents
    )


def _on(axes: dict[str, int], family: Any, train: Any = None, change: Any = None, **strategy: Any) -> Case:
    """A case of these axes, outer to inner."""
    settings = settings_of(family) if isinstance(family, str) else family
    return Case(settings, {"axes": axes, **strategy}, train or {"micro_batch": 1}, change)


def _evaluated(case: Case) -> Case:
    """The held-out loss is compared too."""
    return replace(case, evaluates=True)


LLAMA = settings_of("llama", 4)
TIED = settings_of("llama-tied", 4)
RECOMPUTED = {"recompute": "layer"}

PAIRED = {
    "tied": ("1f1b", _on({"pipeline": 2, "tensor": 2}, TIED)),
    "experts": (
        "1f1b-split",
        _on({"pipeline": 2, "shard": 2, "expert": 2}, settings_of("mixtral", **BALANCED)),
    ),
    "gemma2": ("dualpipev", _on({"pipeline": 2, "tensor": 2}, settings_of("gemma2", 4), sequence=True)),
    "dropout": ("interleaved-1f1b", _on({"pipeline": 2, "tensor": 2}, settings_of("gpt2", 4, **DROPPED))),
    "recompute": ("zb-v", _on({"pipeline": 2, "context": 2}, TIED, memory=RECOMPUTED)),
}
"""A schedule, and a case that runs with and without forward passes beside backward passes."""

CASES: dict[int, dict[str, Case]] = {
    2: {
        **{f"schedule {name}": _two(LLAMA, pipeline={"schedule": name}) for name in SCHEDULES},
        "tied": _evaluated(_two(TIED, pipeline={"schedule": "interleaved-1f1b"})),
        "two micro-batches": _two("llama-tied", {"micro_batch": 4}),
        "gemma2, chunks": _two("gemma2", CHUNKS),
        "gemma3": _two("gemma3", documents=False),
        "gpt2, dropout": _evaluated(_two(settings_of("gpt2", 4, **DROPPED), pipeline={"schedule": "zb-v"})),
        "gpt2, dropout, recompute": _two(settings_of("gpt2", **DROPPED), memory=RECOMPUTED),
        "one layer of uneven stages recomputed": _two(
            TIED, pipeline={"layers": [3, 1]}, memory={**RECOMPUTED, "recompute_layers": 2}
        ),
        "selective, a number for each stage": _two(
            LLAMA,
            pipeline={"schedule": "interleaved-1f1b"},
            memory={"recompute": "selective", "recompute_layers": [1, 0, 1, 1]},
        ),
        "gpt2, dropout, selective": _two(settings_of("gpt2", **DROPPED), memory={"recompute": "selective"}),
        "mixtral, auxiliary loss": _two(settings_of("mixtral", **BALANCED)),
        "mixtral, recompute": _two(settings_of("mixtral", **BALANCED), memory=RECOMPUTED),
        "deepseek-v3, corrected routers": _two(
            settings_of("deepseek-v3", 3),
            {"micro_batch": 1, "router_bias_rate": 0.1},
            pipeline={"schedule": "zb-h1"},
        ),
        "qwen2.5-vl, text": _two("qwen2.5-vl"),
        "layers by hand": _two(TIED, pipeline={"layers": [3, 1]}),
        "no layers at the ends": _two(TIED, pipeline={"layers": [0, 2, 2, 0], "schedule": "v-half"}),
        "adapters": _two(settings_of("llama-tied", 2), change=odd_models.with_adapters),
        "frozen start": _two(LLAMA, change=odd_models.frozen_start),
        "frozen end": _two(LLAMA, change=odd_models.frozen_end),
        "frozen embedding": _two("llama-tied", change=odd_models.frozen_embedding),
        "bfloat16, tied": _two("llama-tied", precision={"compute": "bfloat16"}),
        "muon": _two("llama", {"micro_batch": 2, "optimizer": {"name": "muon"}}),
        "adafactor, tied": _two("llama-tied", {"micro_batch": 2, "optimizer": {"name": "adafactor"}}),
        "weight norms": _two("llama", change=odd_models.weight_norms),
        "repeated layers": _two(LLAMA, change=odd_models.repeated_layers),
        "skip": _two(LLAMA, change=odd_models.skip_over_all),
        "skip, virtual": _two(LLAMA, change=odd_models.skip_over_all, pipeline={"schedule": "zb-v"}),
        "batch norms": _two(LLAMA, change=odd_models.batch_norms, pipeline={"schedule": "zb-v"}),
        "batch norms, recompute": _two("llama", change=odd_models.batch_norms, memory=RECOMPUTED),
        "counters": _two(LLAMA, change=odd_models.counters, pipeline={"schedule": "dualpipev"}),
    },
    4: {
        "4 stages": _on({"pipeline": 4}, TIED),
        "8 stages": _on({"pipeline": 4}, settings_of("gemma3", 8), pipeline={"schedule": "zb-v"}),
        "parameters": _on({"pipeline": 2, "shard": 2}, "llama-tied"),
        "gradients": _on({"pipeline": 2, "shard": 2}, "llama-tied", memory={"shard": "gradients"}),
        "optimizer": _on(
            {"pipeline": 2, "shard": 2}, TIED, memory={"shard": "optimizer"}, pipeline={"schedule": "zb-v"}
        ),
        "optimizer, bfloat16": _on(
            {"pipeline": 2, "shard": 2},
            "llama-tied",
            memory={"shard": "optimizer"},
            precision={"compute": "bfloat16"},
        ),
        "optimizer, repeated layers": _on(
            {"pipeline": 2, "shard": 2},
            LLAMA,
            change=odd_models.repeated_layers,
            memory={"shard": "optimizer"},
        ),
        "adamw in 8 bits": _on(
            {"pipeline": 2, "shard": 2},
            "llama",
            {"micro_batch": 1, "optimizer": {"name": "adamw_8bit", "block": 16}},
        ),
        "replicate outside": _on({"replicate": 2, "pipeline": 2}, "llama-tied"),
        "tensor outside": _evaluated(_on({"tensor": 2, "pipeline": 2}, "qwen3", sequence=True)),
        "ring": _on({"pipeline": 2, "context": 2}, "llama", context={"method": "ring"}),
        "ulysses": _on({"pipeline": 2, "context": 2}, "llama-tied", context={"method": "ulysses"}),
        "experts over shards": _evaluated(
            _on({"pipeline": 2, "shard": 2, "expert": 2}, settings_of("mixtral", **BALANCED))
        ),
        "corrected routers over shards": _on(
            {"pipeline": 2, "shard": 2, "expert": 2},
            "deepseek-v3",
            {"micro_batch": 1, "router_bias_rate": 0.1},
        ),
        "experts over features": _on(
            {"pipeline": 2, "tensor": 2, "expert": 2}, settings_of("mixtral", **BALANCED)
        ),
        "dropout over features": _on({"pipeline": 2, "tensor": 2}, settings_of("gpt2", **DROPPED)),
        "adapters over shards": _on(
            {"pipeline": 2, "shard": 2},
            "llama",
            change=odd_models.with_adapters,
            memory={"shard": "optimizer"},
        ),
        **{
            f"{name}, {word}": replace(case, strategy={**case.strategy, "pipeline": asked})
            for name, (schedule, case) in PAIRED.items()
            for word, asked in (
                ("pairs", {"schedule": schedule, "overlap_forward_backward": True}),
                ("no pairs", {"schedule": schedule}),
            )
        },
        "gathered again": _on(
            {"pipeline": 2, "tensor": 2},
            "llama-tied",
            sequence=True,
            memory={**RECOMPUTED, "gathered": "again"},
        ),
    },
    8: {
        "two dims": _on({"pipeline": 2, "tensor_x": 2, "tensor_y": 2}, "llama-tied"),
        # Ranks of a ring have unequal work, and have to come to one schedule all the same.
        "costs by rank": _on(
            {"pipeline": 4, "context": 2}, settings_of("gemma3", 4), context={"method": "ring"}
        ),
        "three axes": _on(
            {"replicate": 2, "pipeline": 2, "shard": 2}, "llama-tied", memory={"shard": "optimizer"}
        ),
    },
}


@functools.cache
def _found(world: int, name: str) -> Compared:
    (found,) = against_one_device(world, [CASES[world][name]])
    return found


def _judge(world: int, name: str) -> None:
    found = _found(world, name)
    assert found.report is not None, found.refused
    assert found.report.ok, found.report.failures
    if CASES[world][name].config.strategy.precision.compute == "float32":
        assert found.error < TOLERANCE
    assert found.buffers == 0.0


@pytest.mark.parametrize("name", CASES[2])
def test_two_workers(name: str) -> None:
    _judge(2, name)


@pytest.mark.parametrize("name", CASES[4])
def test_four_workers(name: str) -> None:
    _judge(4, name)


@pytest.mark.parametrize("name", CASES[8])
def test_eight_workers(name: str) -> None:
    _judge(8, name)


def test_schedules_give_the_same_bits() -> None:
    first = _found(2, "schedule gpipe").gradients
    assert len(first) > 30
    for name in SCHEDULES:
        other = _found(2, f"schedule {name}").gradients
        assert all(torch.equal(first[key], other[key]) for key in first), name


@pytest.mark.parametrize("name", PAIRED)
def test_forward_passes_beside_backward_passes_give_the_same_bits(name: str) -> None:
    together, apart = _found(4, f"{name}, pairs"), _found(4, f"{name}, no pairs")
    assert "forward passes beside backward passes" in together.plan
    assert "forward passes beside backward passes" not in apart.plan
    assert len(apart.gradients) > 15
    for key in apart.gradients:
        assert torch.equal(together.gradients[key], apart.gradients[key]), key


def test_layers_that_were_given_are_cut_so() -> None:
    assert "2 stages of 3+1 layers" in _found(2, "layers by hand").plan
    assert "4 stages of 0+2+2+0 layers, schedule v-half" in _found(2, "no layers at the ends").plan


def test_a_buffer_that_two_stages_write_is_refused() -> None:
    (found,) = against_one_device(2, [_two(LLAMA, change=odd_models.one_counter)])
    assert "writes to memory that" in found.refused and "put both modules in one stage" in found.refused
