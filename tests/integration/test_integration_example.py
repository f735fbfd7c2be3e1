"""The example script trains alike on one process and on several; importing an integration imports no trainer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import as_torchrun

from harness import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"


def _losses(rank: int, world: int, axes: dict[str, Any] | None, data: int) -> list[float]:
    as_torchrun(rank, world)
    spec = importlib.util.spec_from_file_location("transformers_trainer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[float] = module.train(axes, data)
    return found


def test_the_example_trains_alike_on_one_process_and_on_two() -> None:
    alone = run_ranks(_losses, 1, None, 1)[0]
    assert alone[-1] < alone[0]
    assert run_ranks(_losses, 2, None, 2)[0] == pytest.approx(alone, abs=1e-4)


def test_importing_an_integration_imports_no_trainer() -> None:
    code = (
        "import sys, hyper_parallel.integration, hyper_parallel.integration.transformers\n"
        "print([name for name in ('torch', 'transformers', 'accelerate') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
