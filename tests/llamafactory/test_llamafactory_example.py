"""examples/integrations/llamafactory as its comment says."""

from __future__ import annotations

from pathlib import Path

from runs import command, losses
from transformers import AutoModelForCausalLM

from examples.runner import folder_with_examples, script


def test_it_runs_as_its_comment_says(tmp_path: Path) -> None:
    folder_with_examples(tmp_path)
    script(tmp_path, "examples/sft/make_model.py")
    file = "examples/integrations/llamafactory/train.yaml"
    words = f"FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train {file} max_steps=6"
    done = command(["bash", "-c", words], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = losses(tmp_path / "runs/llamafactory")
    assert sorted(found) == list(range(1, 7))
    assert found[6] < found[1] - 0.5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs/llamafactory").num_parameters() > 0
