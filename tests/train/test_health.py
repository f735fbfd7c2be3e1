"""Ruined weights and steps that are not finite: what a checkpoint says of itself, and what a run does about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Bigram, metrics, run, run_config

from harness import run_ranks
from hyper_parallel.checkpoint import file_format, newest
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.verify import reason_to_pass_over
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import CheckpointError, ConfigError, NonFiniteError
from hyper_parallel.step import recipe
from hyper_parallel.train.checkpoint_state import RunState

ENGINES = pytest.mark.parametrize("engine", ["graph", "eager"])
BUDGET = {"memory": {"device": 700_000, "host": 50_000_000}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("health")


def config_of(folder: Path, name: str, **sections: Any) -> RunConfig:
    train = {
        "steps": 6,
        "batch": 8,
        "eval": {"batches": 1},
        "sample": {"tokens": 0},
        **sections.pop("train", {}),
    }
    checkpoint = {"every": 1, "keep": 9, **sections.pop("checkpoint", {})}
    config = run_config(folder, name, train=train, checkpoint=checkpoint, **sections)
    # Left out, it is what a check of the model says, in which a Bigram may break, too.
    return config.model_copy(update={"data": config.data.model_copy(update={"pack": False})})


def saved(config: RunConfig) -> list[str]:
    return [str(name) for name in reversed(file_format.committed(Path(config.out) / "checkpoints"))]


def passed_over(config: RunConfig) -> list[str]:
    folder = Path(config.out) / "checkpoints"
    return [name for name in saved(config) if reason_to_pass_over(folder / name) is not None]


def tensors(config: RunConfig, name: str) -> bytes:
    return (Path(config.out) / "checkpoints" / name / "rank-00000.safetensors").read_bytes()


@pytest.fixture
def ruin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the update of a step, counted from 1, multiply its learning rate, the first times that it is done."""

    def at(step: int, factor: float, times: int = 1) -> None:
        usual, left = recipe.schedule, [step] * times

        def schedule(*arguments: Any) -> Callable[[int], float]:
            scale = usual(*arguments)

            def disturbed(index: int) -> float:
                if left and left[0] == index + 1:
                    left.pop()
                    return factor
                return scale(index)

            return disturbed

        monkeypatch.setattr(recipe, "schedule", schedule)

    return at


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("graph", {}), ("eager", {}), ("graph", BUDGET)],
    ids=["graph", "eager", "budget"],
)
def test_weights_of_1e38_are_passed_over_by_the_next_start(
    engine: str, strategy: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], request: Any
) -> None:
    name = f"large-{request.node.callspec.id}"
    run(config_of(folder, name, strategy=strategy, train={"engine": engine, "steps": 3}))
    bad = config_of(
        folder,
        name,
        strategy=strategy,
        train={"engine": engine, "optimizer": {"lr": 1e38}, "schedule": {"name": "constant"}},
    )
    with pytest.raises(
        NonFiniteError, match=r"step 5: .*The weights are ruined \(not finite, or beyond .*on_nonfinite"
    ):
        run(bad)
    assert saved(bad)[-1] == "step-00000004" and passed_over(bad) == ["step-00000004"]
    assert "step-00000004 is passed over from now on" not in capsys.readouterr().err
    good = config_of(folder, name, strategy=strategy, train={"engine": engine})
    summary = run(good)
    assert summary.resumed_from == 3 and summary.steps == 6
    said = capsys.readouterr().out
    assert "passed over step-00000004: ruined: not finite, or beyond what a step can compute with: " in said
    assert max(metrics(good).values()) < 7


@ENGINES
def test_ruined_but_finite_weights_are_found_by_the_step_after(
    engine: str, folder: Path, ruin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ruin(3, 3e3)
    config = config_of(folder, f"ruined-{engine}", train={"engine": engine}, checkpoint={"keep": 2})
    assert run(config).steps == 6, "a run is not ended by a loss that is finite"
    assert "the weights are ruined" in capsys.readouterr().out
    # The one before the ruin stays although as many newer ones are there, and of the ruined ones the newest two.
    assert saved(config) == [f"step-0000000{step}" for step in (2, 5, 6)]
    assert passed_over(config) == ["step-00000005", "step-00000006"]
    health = Checkpoint(Path(config.out) / "checkpoints" / "step-00000006").state["health"]
    assert health["loss"] > 14 and "a loss of" in health["ruined"] and max(health["recent_losses"]) < 7
    found = newest(Path(config.out) / "checkpoints")
    assert (
        found is not None
        and found.step == 2
        and [path.name for path, _ in found.skipped]
        == [
            "step-00000006",
            "step-00000005",
        ]
    )
    again = run(config)
    assert again.resumed_from == 2 and max(metrics(config).values()) < 7


def test_the_checkpoint_just_before_is_judged_by_the_step_after(
    folder: Path, ruin: Callable[..., None]
) -> None:
    ruin(3, 3e3)
    config = config_of(folder, "after", checkpoint={"every": 3}, train={"steps": 4})
    run(config)
    path = Path(config.out) / "checkpoints" / "step-00000003"
    assert Checkpoint(path).state["health"]["ruined"] is None, "when it was written, nothing told"
    assert "a loss of" in str(reason_to_pass_over(path))
    (path / "verdict.json").write_text("{}")
    assert "verdict.json: its own sha256 is missing" in str(reason_to_pass_over(path))


def test_the_last_update_is_judged_too(folder: Path, ruin: Callable[..., None]) -> None:
    ruin(6, 3e3)
    config = config_of(folder, "last", checkpoint={"every": 2})
    run(config)
    assert passed_over(config) == ["step-00000006"]
    ruin(6, 3e3)
    config = config_of(folder, "last-back", train={"on_nonfinite": "rollback"})
    assert (run(config).steps, saved(config)[-2:]) == (6, ["step-00000006", "step-00000006-r1"])
    assert passed_over(config) == ["step-00000006"]


def test_one_strange_batch_ruins_nothing(folder: Path) -> None:
    # Its loss is many times as large as usual, and that of the batch before is as it was.
    config = config_of(folder, "strange", train={"engine": "eager"})
    run(config, Bigram(broken_at=3, mended_at=4, factor=1e4))
    assert metrics(config)[3] > 14 and passed_over(config) == []


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_a_step_to_go_back_to_is_chosen(
    engine: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, f"chosen-{engine}", train={"engine": engine})
    run(config)
    expected = metrics(config)
    back = config_of(folder, f"chosen-{engine}", train={"engine": engine}, checkpoint={"resume_from": 2})
    assert run(back).resumed_from == 2
    assert metrics(back) == expected
    said = capsys.readouterr().out
    assert "passed over from now on: step-00000003, step-00000004, step-00000005, step-00000006" in said
    # What is left of the run file goes on, and so does the same command: it was taken back already.
    assert (
        "resume_from" not in (Path(back.out) / "run.yaml").read_text()
        or "resume_from: null" in (Path(back.out) / "run.yaml").read_text()
    )
    assert run(back).resumed_from == 6
    assert "taken back to step 2 before" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; there are those of 6, 6, 5"):
        run(config_of(folder, f"chosen-{engine}", checkpoint={"resume_from": 9}))


def test_a_ruined_one_is_taken_by_name_only(folder: Path, ruin: Callable[..., None], capsys: Any) -> None:
    ruin(1, 3e3)
    config = config_of(folder, "by-name", checkpoint={"every": 0}, train={"steps": 2})
    run(config)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint .*step-00000002: ruined: .*checkpoint\.resume_from"
    ):
        run(config_of(folder, "by-name"))
    assert run(config_of(folder, "by-name", checkpoint={"resume_from": 2, "every": 0})).resumed_from == 2
    assert "its health is not good" in capsys.readouterr().out


def test_resume_from_a_step_of_a_run_that_may_not_resume_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'resume_from' names a step to go on from, and 'resume' is false"):
        config_of(folder, "refused", checkpoint={"resume": False, "resume_from": 2})


@ENGINES
def test_a_batch_is_skipped(engine: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folder, f"skip-{engine}", train={"engine": engine, "on_nonfinite": "skip"})
    summary = run(config, Bigram(broken_at=3, mended_at=4))
    assert (summary.steps, summary.skipped) == (6, 1)
    said = capsys.readouterr().out
    assert (
        "step 3: the loss is nan" in said and "Skipped, as train.on_nonfinite says; 1 skipped so far" in said
    )
    assert sorted(metrics(config)) == [1, 2, 4, 5, 6]
    assert metrics(config, "skipped") == {3: 1.0}
    assert tensors(config, "step-00000003") == tensors(config, "step-00000002"), "nothing was updated"
    last = Checkpoint(Path(config.out) / "checkpoints" / "step-00000006").state
    assert last["optimizer"]["step"] == 5 and last["run"]["consumed"] == 48 and last["run"]["skipped"] == 1
    # Going on from the skipped step is going on as if nothing had stopped.
    for name in saved(config)[3:]:
        shutil.rmtree(Path(config.out) / "checkpoints" / name)
    before = metrics(config)
    assert run(config, Bigram()).resumed_from == 3
    assert metrics(config) == before


@ENGINES
def test_skipping_ends(engine: str, folder: Path) -> None:
    train = {"engine": engine, "on_nonfinite": "skip", "steps": 30}
    config = config_of(folder, f"skips-{engine}", train=train, checkpoint={"every": 0})
    with pytest.raises(NonFiniteError, match=r"step 9: .* It is the 9th time in a row"):
        run(config, Bigram(broken_at=1))


@ENGINES
def test_ruined_weights_are_not_skipped(engine: str, folder: Path, ruin: Callable[..., None]) -> None:
    ruin(3, 1e38)
    config = config_of(folder, f"no-skip-{engine}", train={"engine": engine, "on_nonfinite": "skip"})
    with pytest.raises(
        NonFiniteError, match=r"weights are ruined .*, so that skipping .* train\.on_nonfinite=rollback"
    ):
        run(config)


@pytest.mark.parametrize(
    ("engine", "strategy", "factor"),
    [("graph", {}, 3e3), ("graph", {}, 1e38), ("eager", {}, 3e3), ("graph", BUDGET, 3e3)],
    ids=["graph", "not finite", "eager", "budget"],
)
def test_a_run_goes_back_to_a_healthy_checkpoint(
    factor: float,
    engine: str,
    strategy: dict[str, Any],
    folder: Path,
    ruin: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    request: Any,
) -> None:
    ruin(3, factor)
    name = f"back-{request.node.callspec.id}"
    config = config_of(folder, name, strategy=strategy, train={"engine": engine, "on_nonfinite": "rollback"})
    summary = run(config)
    assert (summary.steps, summary.skipped) == (6, 1)
    assert (
        "Back at step 2, as train.on_nonfinite says; rows 16 to 24 of the data's order are left out"
        in capsys.readouterr().out
    )
    assert max(metrics(config).values()) < 7 and sorted(metrics(config)) == [1, 2, 3, 4, 5, 6]
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, lines) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    last = Checkpoint(Path(summary.checkpoint)).state
    assert last["run"]["consumed"] == 7 * 8 and last["optimizer"]["step"] == 6
    assert "step-00000003-r1" in saved(config)


@ENGINES
def test_a_bad_batch_is_left_out_on_the_way(engine: str, folder: Path) -> None:
    config = config_of(folder, f"way-{engine}", train={"engine": engine, "on_nonfinite": "rollback"})
    summary = run(config, Bigram(broken_at=3, mended_at=4))
    assert (summary.steps, summary.skipped) == (6, 1)
    assert passed_over(config) == [], "the weights were healthy"
    state = RunState(**Checkpoint(Path(summary.checkpoint)).state["run"])
    assert state.left_out == [[16, 24]] and state.consumed == 56


@ENGINES
def test_going_back_ends(engine: str, folder: Path, ruin: Callable[..., None]) -> None:
    ruin(3, 1e38, times=9)
    config = config_of(folder, f"backs-{engine}", train={"engine": engine, "on_nonfinite": "rollback"})
    with pytest.raises(NonFiniteError, match=r"step 4: .* It is the 4th time in a row"):
        run(config)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(folder: Path) -> None:
    config = config_of(folder, "nothing", train={"on_nonfinite": "rollback"}, checkpoint={"every": 0})
    with pytest.raises(
        NonFiniteError, match=r"No rollback: .* no checkpoint to go back to; make checkpoint\.every shorter"
    ):
        run(config, Bigram(broken_at=3))


def test_rows_that_are_left_out() -> None:
    state = RunState(left_out=[[24, 32], [16, 24], [100, 108]])
    assert [state.leave_out(consumed, 8) for consumed in (0, 8, 9, 16, 24, 32, 92, 93)] == [
        0,
        8,
        32,
        32,
        32,
        32,
        92,
        108,
    ]


def _two(rank: int, folder: Path, how: str) -> tuple[int, int, float]:
    config = config_of(
        folder, f"two-{how}", strategy={"axes": {"shard": 2}}, train={"on_nonfinite": how, "engine": "eager"}
    )
    summary = run(config, Bigram(broken_at=3, mended_at=4))
    return summary.steps, summary.skipped, float(summary.final_loss or 0)


def _ranks(rank: int, world: int, folder: Path) -> list[tuple[int, int, float]]:
    return [_two(rank, folder, how) for how in ("skip", "rollback")]


def test_ranks_skip_and_go_back_alike(folder: Path) -> None:
    first, second = run_ranks(_ranks, 2, folder)
    assert first == second and [one[:2] for one in first] == [(6, 1), (6, 1)]


def test_data_that_was_taken_back_is_refused_for_another_run(folder: Path) -> None:
    run(config_of(folder, "other", train={"steps": 2}))
    with pytest.raises(ConfigError, match="seed was 7 and is 8"):
        run(config_of(folder, "other", seed=8, checkpoint={"resume_from": 1}))
    assert passed_over(config_of(folder, "other")) == []
