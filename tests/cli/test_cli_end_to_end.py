"""The commands, as a person types them, one after the other on one tiny run."""

from __future__ import annotations

import json
import resource
import subprocess
import tarfile
from pathlib import Path

import pytest

from harness.forked_command import run_command
from hyper_parallel.config import load

RUN = """\
version: 1
out: runs/tiny
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
data: {train: text.txt, sequence: 32, tokenizer: {vocab_size: 300}}
train: {steps: 2, batch: 4, eval: {batches: 1}, sample: {tokens: 2}}
strategy: {axes: {tensor: 2}}
"""


def hyper_parallel(
    folder: Path, *arguments: str, largest_file: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, folder=folder, largest_file=largest_file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two workers have trained two steps."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "run.yaml").write_text(RUN)
    (folder / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(500)))
    done = hyper_parallel(folder, "train", "run.yaml", "train.log_every=2")
    assert done.returncode == 0, done.stderr
    return folder


def test_train_leaves_the_run_that_was_asked_for(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert any(record.get("step") == 2 for record in records)
    assert load(folder / "runs/tiny/run.yaml") == load(folder / "run.yaml", ["train.log_every=2"])


def test_export_writes_what_transformers_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = hyper_parallel(folder, "export", "runs/tiny", "exported")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("exported")
    assert AutoModelForCausalLM.from_pretrained(folder / "exported").config.hidden_size == 32


def test_verify_prints_json_and_its_verdict(folder: Path) -> None:
    done = hyper_parallel(folder, "verify", "run.yaml", "--json", "out=runs/verified")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert not (folder / "runs/verified").exists()


def test_doctor_shows_and_packs(folder: Path) -> None:
    done = hyper_parallel(folder, "doctor", "--json", "--bundle", "report.tar.gz", "--run", "runs/tiny")
    assert done.returncode == 0, done.stderr
    assert "torch" in json.dumps(json.loads(done.stdout))
    with tarfile.open(folder / "report.tar.gz") as archive:
        assert any("rank-0" in name for name in archive.getnames())


def test_a_disk_that_takes_no_checkpoint_says_why_and_what_is_lost_and_leaves_no_half_of_one(
    folder: Path,
) -> None:
    settings = ["out=runs/full", "checkpoint.every=1", "train.sample.tokens=0"]
    done = hyper_parallel(folder, "train", "run.yaml", *settings, largest_file=60_000)
    assert done.returncode == 2
    why, lost = done.stderr.splitlines()
    assert why.startswith("hyper-parallel: error: cannot write ")
    assert lost.startswith("hyper-parallel: lost: all ")
    assert "larger than a file may be here" in done.stderr
    assert [path.name for path in (folder / "runs/full/checkpoints").iterdir()] == [".writer.lock"]
    assert hyper_parallel(folder, "train", "run.yaml", *settings).returncode == 0
