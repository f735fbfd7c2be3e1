"""Captured steps are read back from a folder, and priced as they were when they were captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_captures
import pytest
from published_captures import kept_in

from hyper_parallel import config
from hyper_parallel.estimate import cluster_of, predict, predict_pipeline, predict_run


def _seconds(axes: dict[str, int], folder: Path, cluster: str = "h100", schedule: str = "usual") -> float:
    data: dict[str, Any] = {
        "version": 1,
        "out": "runs/small",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        },
        "data": {"train": "python-stdlib", "sequence": 64},
        "train": {"batch": 4, "micro_batch": 1},
        "strategy": {"axes": axes},
    }
    if "pipeline" not in axes:
        data["strategy"]["overlap"] = {"schedule": schedule}
    run = config.from_dict(data, source="test")
    with kept_in(folder, "S00:1"):
        return predict_run(run, cluster_of(cluster, run)).timeline.step


@pytest.mark.parametrize(
    ("axes", "module", "name"),
    [({"shard": 2}, predict, "trace_of"), ({"pipeline": 2}, predict_pipeline, "capture_stages")],
)
def test_a_capture_is_read_and_priced_on_other_machines(
    axes: dict[str, int], module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, other = _seconds(axes, tmp_path), _seconds(axes, tmp_path / "other", "a100")
    assert len(list(tmp_path.glob("*.pickle"))) == 1

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("captured anew")

    monkeypatch.setattr(module, name, refuse)
    assert _seconds(axes, tmp_path) == captured
    assert _seconds(axes, tmp_path, "a100") == other
    # Another step, and code that captures otherwise, have captures of their own.
    with pytest.raises(AssertionError, match="captured anew"):
        _seconds({**axes, "replicate": 2}, tmp_path)
    monkeypatch.setattr(published_captures, "_code", lambda: "other")
    with pytest.raises(AssertionError, match="captured anew"):
        _seconds(axes, tmp_path)


def test_an_order_that_is_searched_by_prices_is_not_kept(tmp_path: Path) -> None:
    _seconds({"shard": 2}, tmp_path, schedule="auto")
    assert not list(tmp_path.iterdir())
