"""A shape's parameters, and the sizes that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Shape, Workload


def tiny(**fields: Any) -> Shape:
    given: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return Shape("tiny", **{**given, "ffn": 256, "gated": True, "vocabulary": 1000, **fields})


def test_parameters_by_hand() -> None:
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64
    assert tiny().parameters == 2 * layer + 2 * 64 * 1000 + 64
    assert tiny(tied=True).parameters == tiny().parameters - 64_000
    experts = tiny(experts=8, chosen=2, expert_ffn=32, shared_ffn=16, dense_layers=1)
    sparse = 64 * 8 + 3 * 64 * (8 * 32 + 16)
    assert experts.parameters == tiny().parameters - 3 * 64 * 256 + sparse
    assert experts.active_parameters == experts.parameters - 6 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": 0}, "layers must be 1"),
        ({"hidden": 10**12}, "hidden must be 1 to 1,000,000,000; got 1,000,000,000,000"),
        ({"kv_heads": 3}, "kv_heads 3 of heads 4"),
        ({"experts": 4, "chosen": 5, "expert_ffn": 8}, "5 of 4 experts"),
        ({"experts": 4, "chosen": 2}, "expert_ffn must be 1"),
        ({"dense_layers": 3}, "3 of its 2 layers"),
        ({"windowed": 0.5}, "with window 0"),
        ({"ffn": 0}, "ffn must be 1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": 0}, "batch must be 1"),
        ({"sequence": -4}, "sequence must be 1"),
        ({"precision": "fp9"}, "did you mean 'fp8'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
    ],
)
def test_workloads_that_make_no_step_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Workload(tiny(), **{"batch": 8, "sequence": 128, **fields})
