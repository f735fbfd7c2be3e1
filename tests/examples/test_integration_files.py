"""examples/integrations without TRL and LlamaFactory: what can be known without them.

With them the files run in tests/sft/test_trl_example.py and tests/llamafactory/test_llamafactory_example.py.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json

import yaml

from examples.runner import ROOT
from hyper_parallel.errors import IntegrationError

FOLDER = ROOT / "examples/integrations"


def test_the_script_for_trl_parses_and_imports_our_name() -> None:
    tree = ast.parse((FOLDER / "trl_sft.py").read_text())
    ours = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyper_parallel")
        for alias in node.names
    ]
    assert ours == [("hyper_parallel.integration.trl", "HyperParallelSFTTrainer")]
    with contextlib.suppress(IntegrationError):  # where TRL is not installed
        assert hasattr(importlib.import_module(ours[0][0]), ours[0][1])


def test_the_files_for_llamafactory_name_each_other() -> None:
    run = yaml.safe_load((FOLDER / "llamafactory/train.yaml").read_text())
    assert run["use_hyper_parallel"] is True
    about = json.loads((ROOT / run["dataset_dir"] / "dataset_info.json").read_text())[run["dataset"]]
    assert (ROOT / run["dataset_dir"] / about["file_name"]).resolve() == ROOT / "examples/sft/chats.jsonl"
    ours = json.loads((ROOT / run["hyper_parallel_args"]).read_text())
    assert ours == {"tp_size": 2}
