"""A check is run again when code that the model computes with changes, wherever that is written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.shard.region_check import result_cache
from hyper_parallel.strategy import Strategy

FILES = {
    "cache_test_act": "import torch\ndef act(x):\n    return x.relu()\n",
    "cache_test_base": "from torch import nn\nclass Base(nn.Module):\n    def scaled(self, x):\n        return 2 * x\n",
    "cache_test_model": (
        "from cache_test_act import act\nfrom cache_test_base import Base\n"
        "class Model(Base):\n    def forward(self, x):\n        return self.scaled(act(x))\n"
    ),
    "cache_test_other": "between = lambda x: x.relu()\n",
}


def _digest(folder: Path, changed: str = "", text: str = "") -> str:
    """Of a model of these files, as a new process would make it."""
    for name, written in FILES.items():
        (folder / f"{name}.py").write_text(text if name == changed else written)
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for cached in (result_cache._code_of, result_cache._is_own):
        cached.cache_clear()
    model: Any = importlib.import_module("cache_test_model").Model()
    model.between = importlib.import_module("cache_test_other").between
    return result_cache.digest(model, Strategy(), None)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("cache_test_act", "import torch\ndef act(x):\n    return x.softmax(-1)\n"),
        ("cache_test_base", FILES["cache_test_base"].replace("2 * x", "3 * x")),
        ("cache_test_model", FILES["cache_test_model"].replace("act(x)", "act(act(x))")),
        ("cache_test_other", "from torch import softmax\nbetween = lambda x: softmax(x, -1)\n"),
    ],
)
def test_changed_code_is_checked_again(
    changed: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = _digest(tmp_path)
    assert _digest(tmp_path) == before
    assert _digest(tmp_path, changed, text) != before
