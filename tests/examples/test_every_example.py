"""Each file of examples/ is known here, says what it does, and is run, inspected or verified in small."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from examples.runner import ROOT, folder_with_examples
from harness.examples import EXAMPLES, run_files
from hyper_parallel.cli.main import main
from hyper_parallel.config import load

ELSEWHERE = {
    "README.md": "tests/examples/test_every_example.py",
    "cluster/slurm.sbatch": "tests/examples/test_several_machines.py",
    "draw_images.py": "tests/train/test_multimodal.py",
    "first_steps.ipynb": "tests/examples/test_notebook.py",
    "images.yaml": "tests/train/test_multimodal.py",
    "integrations/llamafactory/data/dataset_info.json": "tests/examples/test_integration_files.py",
    "integrations/llamafactory/hyper_parallel.json": "tests/examples/test_integration_files.py",
    "integrations/llamafactory/train.yaml": "tests/examples/test_integration_files.py",
    "integrations/trl_sft.py": "tests/examples/test_integration_files.py",
    "offload_loop.py": "tests/offloading_autograd/test_eager_bits.py",
    "own_loop.py": "tests/train/test_ranks.py",
    "own_step.py": "tests/integration/test_own_step.py",
    "own_submodels.py": "tests/submodels/test_submodel_example.py",
    "rl/grpo-reward-model.yaml": "tests/config/test_json_schema.py",
    "rl/grpo-sort.yaml": "tests/cli/test_cli_rl.py",
    "rl/simulate-verl.yaml": "tests/cli/test_cli_simulate_rl.py",
    "sft/chat.yaml": "tests/examples/test_fine_tune_files.py",
    "sft/chats.jsonl": "tests/examples/test_fine_tune_files.py",
    "sft/lora.yaml": "tests/examples/test_fine_tune_files.py",
    "sft/make_model.py": "tests/examples/test_fine_tune_files.py",
    "sft/questions.jsonl": "tests/examples/test_fine_tune_files.py",
    "sft/yes_or_no.jsonl": "tests/examples/test_fine_tune_files.py",
    "tiered_cache.py": "tests/inference/test_tiered_cache.py",
    "tiny_step.py": "tests/examples/test_tiny_step.py",
    "transformers_trainer.py": "tests/integration/test_integration_example.py",
}
"""Files that another test runs. Every run file with a model's config and axes is also verified in small there:
tests/verify/test_examples.py."""
FEW_LAYERS = "model.config.num_hidden_layers=2"
SHORT = ("train.steps=2", "train.eval.every=0", "train.batch=2", "trackers=[]", "checkpoint.every=0")
TINY = (
    *("model.config.hidden_size=64", "model.config.intermediate_size=96", FEW_LAYERS, "data.sequence=64"),
    *("data.train=text.txt", "data.tokenizer.vocab_size=300", "data.holdout=0", *SHORT),
)
HERE = {
    "cluster/ascend_node.yaml": ("simulate", "--cluster", "910bx8", FEW_LAYERS),
    "cluster/nvidia_node.yaml": ("simulate", "--cluster", "h100x8", FEW_LAYERS),
    "cluster/several_machines.yaml": ("simulate", "--cluster", "h100x16", FEW_LAYERS),
    "deepseek-v3.yaml": ("inspect", "model.config.num_hidden_layers=4"),
    "llama-405b.yaml": ("inspect", FEW_LAYERS),
    "long_context.yaml": ("inspect", FEW_LAYERS),
    "memory_budget.yaml": ("train", *TINY, "strategy.memory.device=2MiB", "strategy.memory.host=100KiB"),
    "moe.yaml": ("inspect", FEW_LAYERS),
    "pipeline.yaml": ("simulate", "--cluster", "h100x4"),
    "quickstart.yaml": (
        "train",
        *TINY,
        "launch.workers=1",
        "train.sample.tokens=4",
        "train.schedule.warmup=0",
    ),
    "simulate/llama-70b.yaml": ("inspect", FEW_LAYERS, "strategy.memory.recompute_layers=1"),
    "simulate/llama-8b-pipeline.yaml": ("load",),
    "simulate/llama-8b.yaml": ("inspect", FEW_LAYERS),
    "simulate/mixtral-8x7b.yaml": ("inspect", FEW_LAYERS),
}
"""Files that the test here gives to a command, with what follows the file's name."""


def files() -> set[str]:
    return {
        str(file.relative_to(EXAMPLES))
        for file in EXAMPLES.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def header(file: Path) -> str:
    """The comment, or the docstring, that a file begins with."""
    text = file.read_text().removeprefix("#!/usr/bin/env bash\n")
    if file.suffix == ".py":
        return text.split('"""')[1]
    return "\n".join(line for line in re.split(r"\n(?!#)", text)[0].splitlines())


def test_a_file_without_a_test_is_seen() -> None:
    assert files() == {*ELSEWHERE, *HERE}
    assert not ELSEWHERE.keys() & HERE.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_other_test_names_the_file(name: str) -> None:
    text = (ROOT / ELSEWHERE[name]).read_text()
    assert Path(name).stem in text or "RL_EXAMPLES" in text


@pytest.mark.parametrize("name", HERE)
def test_the_command_takes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = HERE[name]
    monkeypatch.chdir(folder_with_examples(tmp_path))
    (tmp_path / "text.txt").write_text("a line of text, and another one.\n" * 400)
    if command == "load":
        load(f"examples/{name}")
        return
    code: object = 0
    try:
        main([command, f"examples/{name}", *rest])
    except SystemExit as ended:
        code = ended.code
    assert not code, capsys.readouterr().err


@pytest.mark.parametrize(
    "name", sorted(name for name in files() if name.endswith((".yaml", ".py", ".sbatch")))
)
def test_it_says_what_it_does_and_the_command(name: str) -> None:
    said = header(EXAMPLES / name)
    assert len(said.splitlines()) >= 2
    assert f"examples/{name}" in said


COMMANDS = [
    (name, command)
    for name in sorted(files())
    if name.endswith((".yaml", ".sbatch", ".py"))
    for command in re.findall(
        r"^#? *(hyper-parallel (?:train|verify|inspect|simulate) .*)$",
        header(EXAMPLES / name).replace("\\\n#", ""),
        re.M,
    )
]


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_the_overrides_that_a_header_shows_are_taken(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--rl" in command:
        return
    monkeypatch.chdir(folder_with_examples(tmp_path))
    words = shlex.split(command, comments=True)[2:]
    overrides = [word for word in words[1:] if "=" in word]
    assert load(words[0], overrides)


def test_shell_scripts_parse() -> None:
    scripts = [file for file in EXAMPLES.rglob("*") if file.suffix in (".sh", ".sbatch")]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(script)], check=True)


def test_the_table_has_every_file_but_data() -> None:
    table = (EXAMPLES / "README.md").read_text()
    missing = [
        name
        for name in sorted(files() - {"README.md"})
        if not name.endswith((".json", ".jsonl")) and f"]({name})" not in table
    ]
    assert missing == []


def test_run_files_name_folders_of_their_own() -> None:
    outs = [yaml.safe_load(file.read_text())["out"] for file in run_files()]
    assert len(outs) == len(set(outs))
    assert all(out.startswith("runs/") for out in outs)


def test_data_is_whole() -> None:
    for file in EXAMPLES.rglob("*.jsonl"):
        for line in file.read_text().splitlines():
            assert {message["role"] for message in json.loads(line)["messages"]} <= {"user", "assistant"}
