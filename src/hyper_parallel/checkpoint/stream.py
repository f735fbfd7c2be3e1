"""The safetensors format, written as a stream: the header first, then the tensors one after the other.

Eight bytes give the length of the header, which is JSON: the name of each tensor to its element type, shape
and the range of its bytes in what follows (https://github.com/huggingface/safetensors, "Format"). The library
writes only from tensors that are all in memory, and gives no digest of what it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from hyper_parallel.checkpoint.shard import SAFETENSORS_NAMES

METADATA = "__metadata__"
"""The header's key for metadata; no tensor can have this name."""
Entry = tuple[torch.dtype, tuple[int, ...]]


def header(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file in which `tensors` (element type and shape) follow in their order."""
    entries: dict[str, object] = {METADATA: dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        assert at % dtype.itemsize == 0, "wider element types come first"
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def values(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `raw`: a tensor of one dim over the bytes, without a copy."""
    return torch.frombuffer(data, dtype=dtype)
