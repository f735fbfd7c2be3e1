"""The strategies of the equivalence matrix: single axes, and products of up to five."""

from __future__ import annotations

from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate 2": {"axes": {"replicate": 2}},
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 4 sequence": {"axes": {"tensor": 4}, "sequence": True},
    "tensor_x 2 tensor_y 2": {"axes": {"tensor_x": 2, "tensor_y": 2}},
    "context 2": {"axes": {"context": 2}},
    "context 4 ring": {"axes": {"context": 4}, "context": {"method": "ring"}},
    "replicate 2 shard 2": {"axes": {"replicate": 2, "shard": 2}},
    "tensor 2 shard 2 sequence recompute": {
        "axes": {"tensor": 2, "shard": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
    },
    "context 2 tensor 2": {"axes": {"context": 2, "tensor": 2}},
    "shard 2 context 2 tensor 2 sequence": {
        "axes": {"shard": 2, "context": 2, "tensor": 2},
        "sequence": True,
    },
    "replicate 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "context": 2, "tensor_x": 2, "tensor_y": 2},
        "memory": {"gathered": "again"},
    },
    "shard 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "replicate 2 shard 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "shard 2 expert 2": {"axes": {"shard": 2, "expert": 2}},
    "shard 4 tensor 2 expert 4": {"axes": {"shard": 4, "tensor": 2, "expert": 4}},
    "replicate 2 shard 2 tensor 2 expert 4": {"axes": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 4}},
    "shard 2 context 2 tensor_x 2 tensor_y 2 expert 8": {
        "axes": {"shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2, "expert": 8}
    },
    "pipeline 2": {"axes": {"pipeline": 2}},
    "pipeline 2 interleaved tensor 2": {
        "axes": {"pipeline": 2, "tensor": 2},
        "pipeline": {"schedule": "interleaved-1f1b"},
    },
    "pipeline 2 in pairs tensor 2 sequence recompute": {
        "axes": {"pipeline": 2, "tensor": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
        "pipeline": {"schedule": "1f1b", "overlap_forward_backward": True},
    },
    "shard 2 pipeline 2 zb-h1 optimizer": {
        "axes": {"shard": 2, "pipeline": 2},
        "memory": {"shard": "optimizer"},
        "pipeline": {"schedule": "zb-h1"},
    },
    "pipeline 2 dualpipev context 2 tensor 2": {
        "axes": {"pipeline": 2, "context": 2, "tensor": 2},
        "pipeline": {"schedule": "dualpipev"},
    },
    "replicate 2 pipeline 2 shard 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "pipeline": 2, "shard": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "pipeline 2 shard 2 tensor 2 expert 4": {
        "axes": {"pipeline": 2, "shard": 2, "tensor": 2, "expert": 4},
        "pipeline": {"schedule": "1f1b-split", "overlap_forward_backward": True},
    },
}
"""Name to the fields of a Strategy. The world is at most 32 ranks."""
