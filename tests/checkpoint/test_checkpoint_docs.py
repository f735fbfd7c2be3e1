"""The reader that docs/checkpoints.md shows is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from checkpoint_worlds import random_tensor, same_bits, save_world

from hyper_parallel.layout import Layout, Mesh

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_a_stranger_reads_it_in_twenty_lines(tmp_path):
    mesh = Mesh(("replicate", 2), ("tensor", 2))
    tensors = {
        "model.qkv": random_tensor((12, 4), torch.bfloat16, 0),
        "model.norm": random_tensor((4,), torch.float32, 1),
        "optimizer.step": random_tensor((), torch.int64, 2),
        "empty": random_tensor((0, 3), torch.float32, 3),
    }
    layouts = {name: Layout.replicated(mesh, tuple(tensor.shape)) for name, tensor in tensors.items()}
    layouts["model.qkv"] = Layout(mesh, (12, 4), (("tensor",), ()), {0: (8, 2, 2)})
    path = save_world(tmp_path, tensors, layouts, mesh, 7, {"seed": 1})[0]
    code = re.search(r"```python\n(import hashlib.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) <= 25
    space: dict = {}
    exec(code, space)
    loaded, state = space["load"](path)
    assert state == {"seed": 1}
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
