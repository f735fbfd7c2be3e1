"""A step that is predicted from steps of few layers, beside the same step ordered whole."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import cluster_of, predict_run, predicted_step
from hyper_parallel.estimate.extrapolated_order import _through


def _run(layers: int, **more: Any) -> RunConfig:
    return config.from_dict(
        {
            "version": 1,
            "out": "runs/few",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 512,
                    "intermediate_size": 1024,
                    "num_hidden_layers": layers,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "vocab_size": 1024,
                    "max_position_embeddings": 1024,
                }
            },
            "data": {"train": "python-stdlib", "sequence": 1024},
            "train": {"batch": 16, "micro_batch": 2},
            "strategy": {"axes": {"shard": 8}, **more},
        }
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "strategy",
    [{}, {"axes": {"shard": 4, "tensor": 2}, "sequence": True}, {"memory": {"recompute": "layer"}}],
)
def test_few_layers_tell_what_the_whole_ordered_step_takes(strategy: dict[str, Any]) -> None:
    run = _run(12, **strategy)
    cluster = cluster_of("h100x8", run)
    found, whole = predicted_step(run, cluster), predict_run(run, cluster, ordered=True)
    unordered = predict_run(run, cluster)
    assert "of 12 repeated layers" in found.how
    assert found.seconds == pytest.approx(whole.timeline.step, rel=0.03)
    assert whole.timeline.step < unordered.timeline.step  # there was something to hide
    assert found.fits is True


def test_one_device_has_nothing_to_order() -> None:
    run = _run(1, axes={"replicate": 1})
    cluster = cluster_of("h100", run)
    assert predicted_step(run, cluster).seconds == predict_run(run, cluster).timeline.step


def test_a_line_goes_through_two_points_and_one_is_all_there_is() -> None:
    assert _through({3: 10.0, 4: 12.0}, 32) == 68.0
    assert _through({2: 5.0}, 2) == 5.0
