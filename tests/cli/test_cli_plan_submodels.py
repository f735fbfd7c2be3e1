"""`hyper-parallel plan` of a run with images: from its answer to a run that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import run_ranks
from harness.vision_folders import make_place, run_file
from hyper_parallel.cli.main import main
from hyper_parallel.config import load, yaml12
from train.tiny_run import metrics, run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("plan"))
    (place / "run.yaml").write_text(yaml12.write(run_file(place, "llava")))
    return place


def plan(*arguments: str) -> int:
    """The exit code."""
    try:
        main(["plan", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _train(rank: int, world: int, file: Path) -> dict[int, float]:
    config = load(file)
    run(config)
    return metrics(config, "loss")


def test_a_plan_is_a_run_file_that_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = place / "planned.yaml", place / "plan.html"
    code = plan(
        str(place / "run.yaml"),
        "train.batch=8",
        "--cluster",
        "h100x3",
        "--out",
        str(out),
        "--html",
        str(html),
        "--json",
    )
    said = capsys.readouterr()
    assert code == 0, said.err
    answer: dict[str, Any] = json.loads(said.out)
    assert answer["batch"] == 8
    chosen = answer[answer["chosen"]]
    other = answer["colocated" if answer["chosen"] == "disjoint" else "disjoint"]
    if other is not None:
        assert chosen["simulated_step_seconds"] <= other["simulated_step_seconds"]
    config = load(out)
    assert config.train.batch == 8
    assert config.strategy.submodels.keys() == {"vision_tower", "language"}
    assert html.read_text().count("<svg") == 1 + (other is not None)
    losses = run_ranks(_train, config.launch.workers or 1, out, timeout=240.0)[0]
    assert sorted(losses) == [1, 2]
    assert losses[2] < losses[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.yaml"], "give --cluster"),
        (["run.yaml", "--cluster", "h100"], "how many devices"),
        (["run.yaml", "--cluster", "h100x2", "--devices", "4"], "name a larger cluster"),
        (["run.yaml", "--cluster", "h100x2", "--batch", "4"], "set keys of the file"),
        (["run.yaml", "--cluster", "h100x2", "--model", "llava"], "not both"),
        (["run.yaml", "--cluster", "h100x2", "--fit"], "--fit does not go with a run file"),
        (["--images", "1", "--cluster", "h100x2"], "give --model and --batch"),
        (
            ["--images", "3..1", "--model", "llava", "--batch", "2", "--cluster", "h100x2"],
            "a range such as 0..32",
        ),
        (
            ["--generate", "--images", "1", "--model", "llama-3-8b", "--cluster", "h100x2"],
            "--images is of training",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    place: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan(*(str(place / one) if one in ("run.yaml", "llava") else one for one in arguments))
    told = capsys.readouterr().err
    assert code == 2
    assert said in " ".join(told.split())
    assert "Traceback" not in told
