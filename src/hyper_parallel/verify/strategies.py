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
}
"""Name to the fields of a Strategy. The world is at most 32 ranks."""
