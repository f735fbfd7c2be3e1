"""How every failure of the command line ends: the exit code, and one line where the user can mend it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from hyper_parallel.cli.main import command, main
from hyper_parallel.errors import ConfigError

RL_EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "grpo-sort.yaml"
RUN = """\
version: 1
out: {out}
model: {{config: {{model_type: llama, max_position_embeddings: 64}}}}
data: {{train: {text}, sequence: 32}}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(out="runs/x", text="text.txt"))
    return path


@pytest.fixture
def failing() -> object:
    """Makes a subcommand that raises what it is given; the group has it for one test."""

    def add(error: BaseException) -> None:
        @click.command("fail")
        def fail() -> None:
            raise error

        command.add_command(fail)

    yield add
    command.commands.pop("fail", None)


def end(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_a_mistake_is_one_line_and_2(failing: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    failing(ConfigError("run.yaml: a: wrong\nrun.yaml: b: wrong too"))
    assert end("fail") == 2
    assert capsys.readouterr().err.splitlines() == [
        "hyper-parallel: error: run.yaml: a: wrong",
        "hyper-parallel: error: run.yaml: b: wrong too",
    ]


def test_ctrl_c_is_130(failing: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    assert end("fail") == 130
    assert capsys.readouterr().err.strip() == "hyper-parallel: interrupted"


def test_a_signal_before_the_run_is_there_ends_it_as_ctrl_c_does(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(run: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # nothing to save yet
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("hyper_parallel.cli.preflight.check", check)
    before = signal.getsignal(signal.SIGTERM)
    assert end("train", str(run_file)) == 130
    assert capsys.readouterr().err.strip() == "hyper-parallel: interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_defect_keeps_its_traceback(failing: Callable) -> None:
    failing(RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        main(["fail"])


@pytest.mark.parametrize(
    "arguments", [("trian",), ("train",), ("train", "run.yaml", "--steps=3"), ("verify", "--driver=x", "f")]
)
def test_a_wrong_command_line_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert end(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hyper-parallel: error: ")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train=texd.txt"], "data.train: 'texd.txt' does not exist; did you mean 'text.txt'?"),
        (["data.eval=none*.txt"], "data.eval: no file matches 'none*.txt'"),
        (["data.train=empty.txt"], "data.train: 'empty.txt' holds no text: every file of it is empty"),
        (["data.sequence=65"], "data.sequence: 65 tokens are more than the 64 positions of the model (model.config); "
         "shorten the sequence or give the model more positions"),
        (["out=text.txt/run"], "out: {here}/text.txt is a file, not a folder; name another folder"),
        (["data.tokenizer.path=."], "data.tokenizer.path: . holds no tokenizer.json; name a folder that does, or "
         "leave the path out"),
        (["model.config=null", "model.path=."], "model.path: config.json does not exist; give a folder as "
         "save_pretrained writes it"),
        (["model.config=null", "model.path=hub"], "data.sequence: 32 tokens are more than the 16 positions of the "
         "model (hub/config.json); shorten the sequence or give the model more positions"),
        (["strategy.axes.shard=3", "train.batch=3", "launch.nodes=2", "launch.rendezvous=h:1"], "launch.nodes: the 3 "
         "workers of the strategy do not divide by 2 nodes; change the axes or the nodes"),
        (["train.stpes=3"], "override train.stpes=3: train.stpes: unknown key; did you mean 'steps'?"),
        (["strategy.axes.tensor=2", "launch.workers=3"], "run.yaml: the strategy's axes multiply to 2 (tensor_x 2), "
         "but 'launch.workers' is 3; make them equal, leave 'launch.workers' out, or set it to 1 "
         "for the one-device run"),
    ],
)  # fmt: skip
def test_cheap_mistakes_are_found_before_anything_is_written(
    run_file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], told: str
) -> None:
    here = run_file.parent
    (here / "empty.txt").touch()
    (here / "hub").mkdir()
    (here / "hub" / "config.json").write_text('{"model_type": "gpt2", "n_positions": 16}')
    before = sorted(here.rglob("*"))
    assert end("train", "run.yaml", *overrides) == 2
    told = told.replace("{here}", str(here))
    assert capsys.readouterr().err == f"hyper-parallel: error: {told}\n"
    assert sorted(here.rglob("*")) == before


def test_a_tracker_that_is_not_installed(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else find_spec(name))
    assert end("train", "run.yaml", "trackers=[wandb]") == 2
    assert "which is not installed; pip install 'hyper-parallel[wandb]'" in capsys.readouterr().err


def test_an_export_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert end("export", str(tmp_path / "none"), str(tmp_path / "out")) == 2
    assert "no such folder; give a run's folder" in capsys.readouterr().err
    assert end("export", str(tmp_path), str(tmp_path / "out")) == 2
    assert "holds no checkpoint; give a run's folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_doctor_needs_a_bundle_for_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert end("doctor", "--run", "runs/x") == 2
    assert capsys.readouterr().err.startswith("hyper-parallel: error: --run goes with --bundle FILE")


def test_a_step_to_resume_from_is_a_key_of_the_run(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel import launch

    found = []
    monkeypatch.setattr(launch, "run", lambda config, target: found.append(config) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file), "train.steps=7", "--resume-from", "30"])
    assert ended.value.code == 0
    assert (found[0].checkpoint.resume_from, found[0].train.steps) == (30, 7)


@pytest.mark.parametrize(("rank", "said"), [("0", "hyper-parallel: interrupted"), ("1", "")])
def test_of_a_launchers_workers_the_first_says_that_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, said: str
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("hyper_parallel.config.load", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == said


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out.startswith("Usage: hyper-parallel [OPTIONS] COMMAND")


@pytest.mark.parametrize("override", ["out=text.txt", "out=text.txt/runs", 'trackers=["wandb"]'])
def test_rl_and_train_say_the_same_of_their_results(
    override: str, run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = []
    for arguments in (("train", str(run_file)), ("rl", str(RL_EXAMPLE))):
        assert end(*arguments, override) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and said[0].count("\n") == 1
