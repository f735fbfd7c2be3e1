"""What a user types, as docs/llamafactory.md has it, runs; and what is wrong is one clear line."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import made
import pytest
import yaml
from runs import command, losses

from hyper_parallel.errors import PREFIX

PAGE = Path(__file__).parents[2] / "docs" / "llamafactory.md"
LAUNCHED = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}


def run_file(place: Path, folder: Path, fields: Any, model: str = "llama", **more: Any) -> Path:
    folder.mkdir()
    (folder / "hp.json").write_text(json.dumps(fields))
    options = made.options(place, model, folder / "out", 2, max_steps=2, save_steps=2, **more)
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**options, "use_hyper_parallel": True, "hyper_parallel_args": "hp.json"}))
    return file


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of ours; see that there is no traceback of a worker."""
    assert done.returncode != 0
    assert "hyper_parallel/" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if PREFIX in line]


def blocks(language: str) -> list[str]:
    """The blocks of the page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def as_on_the_page(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page has, and what they name."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "model").symlink_to(place / "llama")
    (folder / "data").symlink_to(place / "data")
    (folder / "train.yaml").write_text(blocks("yaml")[0])
    (folder / "hp.json").write_text(blocks("json")[0])
    return folder


COMMANDS = [block.strip() for block in blocks("bash") if not block.startswith("pip ")]


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_of_the_page(words: str, as_on_the_page: Path) -> None:
    """In their order: the second and third go on with what the first wrote."""
    done = command(["bash", "-c", words], as_on_the_page)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_commands_of_the_page_wrote(as_on_the_page: Path) -> None:
    whole, again = losses(as_on_the_page / "out"), losses(as_on_the_page / "out-3")
    assert len(whole) == made.ROWS // 4 and losses(as_on_the_page / "out-2") == whole
    assert sorted(again) == [step for step in whole if step > 10]
    assert all(abs(again[step] - whole[step]) < 1e-3 for step in again)
    for folder in ("out", "out-3", "model-10"):
        assert (as_on_the_page / folder / "model.safetensors").is_file()


def test_torchrun_of_the_command(place: Path, tmp_path: Path) -> None:
    run_file(place, tmp_path / "run", {"cp_size": 2})
    done = command(
        ["torchrun", "--nproc-per-node", "2", "-m", "llamafactory.cli", "train", "train.yaml"],
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(losses(tmp_path / "run/out")) == [1, 2]


@pytest.mark.parametrize(
    ("fields", "model", "line"),
    [
        ({"tp_sise": 2}, "llama", "hp.json: unknown field 'tp_sise'; did you mean 'tp_size'?"),
        (
            {"tp_size": 4},
            "llama",
            "hyper_parallel_args: tp_size 4 = 4 does not divide the number of workers, 2; start a multiple of 4 "
            "workers, or make the sizes divide 2",
        ),
        (
            {"cp_size": 2},
            "openai-gpt",
            "attn_pdrop is 0.1, and attention that is spread over ranks drops no weights",
        ),
        ({"ep_size": 2}, "llama", "axes.expert is 2, but LlamaForCausalLM has no experts"),
        (
            {"pp_size": 2, "activation_mode": "swap"},
            "llama",
            "hp.json: pp_size 2 cannot be used with memory or activation_mode 'swap'",
        ),
    ],
    ids=[
        "a bad field",
        "a world that does not fit",
        "dropout in attention",
        "no experts",
        "stages that swap",
    ],
)
def test_what_is_wrong_is_one_line(
    fields: dict[str, Any], model: str, line: str, place: Path, tmp_path: Path
) -> None:
    run_file(place, tmp_path / "run", fields, model)
    found = told(command(["llamafactory-cli", "train", "train.yaml"], tmp_path / "run", **LAUNCHED))
    # On a busy machine another worker's progress bar, which has no end of line, may stand before it.
    assert len(found) == 1 and PREFIX in found[0] and line in found[0].partition(PREFIX)[2], found
