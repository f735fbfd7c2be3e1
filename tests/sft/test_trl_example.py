"""examples/integrations/trl_sft.py runs on two ranks, and leaves a folder that Transformers loads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.runner import ROOT, run, script

SCRIPT = str(ROOT / "examples/integrations/trl_sft.py")


def losses(shown: str) -> list[float]:
    [line] = re.findall(r"^losses (.*)$", shown, re.M)
    return [float(one) for one in line.split(", ")]


def test_it_runs_as_its_comment_says(tmp_path: Path) -> None:
    script(tmp_path, str(ROOT / "examples/sft/make_model.py"), "model")
    chats = str(ROOT / "examples/sft/chats.jsonl")
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT)
    found = {
        strategy: losses(run(tmp_path, sys.executable, *several, strategy, "model", chats, f"out-{at}", "6"))
        for at, strategy in enumerate(("{axes: {shard: 2}}", "{axes: {tensor: 2}}"))
    }
    shard, tensor = found.values()
    assert len(shard) == len(tensor) == 6
    assert shard[-1] < shard[0] - 0.5
    assert shard[0] == pytest.approx(tensor[0], abs=0.2)  # other rows: shard sees eight a step, tensor four
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out-0").num_parameters() > 0
