"""Predictions, the schema, a DeepSpeed file and the documents, as a newcomer meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.person import Person
from hyper_parallel.config import yaml12

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64}"
)


def test_a_plan_says_how_many_tie_and_its_file_is_accepted(newcomer: Person) -> None:
    shown = newcomer.types(
        "hyper-parallel plan --model llama-3-8b --cluster h100x64 --batch 256 --out run.yaml"
    )
    assert re.search(r"ties +\d+ sets? of axes within 2%", shown)
    written = yaml12.parse((newcomer.folder / "run.yaml").read_text(), "run.yaml")
    axes = written["strategy"]["axes"]
    assert axes.get("context", 1) == 1, "the plain strategy comes first"
    newcomer.writes("text.txt", "some words to train on, and some more\n" * 200)
    split = "{shard: 2}"  # on this machine, in place of the 64 devices
    small = (
        f"model.config='{TINY}' data='{{train: text.txt, sequence: 32, tokenizer: {{vocab_size: 300}}}}' "
        f"train.batch=4 train.micro_batch=1 strategy.axes='{split}' strategy.placement='{{}}'"
    )
    assert "right: " in newcomer.types(f"hyper-parallel verify run.yaml {small}")
    shown = newcomer.types(
        f"hyper-parallel train run.yaml {small} train.steps=2 train.schedule.warmup=0 out=run"
    )
    assert "step 2/2" in shown


def test_a_deepspeed_file_becomes_a_run(newcomer: Person) -> None:
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
    }
    newcomer.writes("ds_config.json", json.dumps(config))
    newcomer.types("hyper-parallel convert ds_config.json --devices 2 --out base.yaml")
    newcomer.writes("text.txt", "some words to train on, and some more\n" * 200)
    newcomer.writes(
        "run.yaml",
        f"extends: base.yaml\nversion: 1\nout: run\nmodel: {{config: {TINY}}}\n"
        "data: {train: text.txt, sequence: 32, tokenizer: {vocab_size: 300}}\ntrain: {steps: 2}\n",
    )
    assert "step 2/2" in newcomer.types("hyper-parallel train run.yaml")
    kept = yaml12.parse((newcomer.folder / "run/run.yaml").read_text(), "run.yaml")
    assert kept["train"]["optimizer"]["lr"] == 1e-3
    assert kept["strategy"]["memory"]["shard"] == "gradients"


def test_the_documents_build(tmp_path: Path) -> None:
    """Strictly, as `make docs` does; its environment is made if the machine reaches a package index."""
    venv = ROOT / ".venv-docs"
    if not (venv / "bin" / "mkdocs").exists():
        venv = tmp_path / "venv"
        made = subprocess.run(
            ["tools/venv_docs.sh", str(venv)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"the environment of make docs cannot be made here: {made.stderr.strip()[-200:]}")
    built = subprocess.run(
        [str(venv / "bin" / "mkdocs"), "build", "--strict", "--clean", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    assert (tmp_path / "site" / "index.html").is_file()
