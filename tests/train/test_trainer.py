"""A run on one worker, from the file to its checkpoint, with real components."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import LLAMA, Bigram, metrics, run, run_config

from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.writer import open_folder
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import CheckpointError, ConfigError, LaunchError, NonFiniteError
from hyper_parallel.train import Summary, Trainer, register_tracker, run_parts
from hyper_parallel.train.run_parts import SaveInterval
from hyper_parallel.train.trackers import RunInfo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the tokenizer is trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[RunConfig, Summary]:
    """An uninterrupted run of six steps."""
    config = run_config(folder, "whole", checkpoint={"every": 2, "keep": 9}, trackers=["tensorboard"])
    return config, run(config)


class Interrupt:
    """A tracker that sends this process a signal once it has seen a step, as Ctrl-C would."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def __call__(self, run: RunInfo) -> Interrupt:
        return self

    def log(self, step: int, record: dict[str, float]) -> None:
        if step == self.step and "loss" in record:
            os.kill(os.getpid(), self.number)

    def text(self, step: int, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _interrupted(config: RunConfig, step: int, number: int = signal.SIGINT) -> Summary:
    register_tracker("interrupt", Interrupt(step, number))
    return run(config.model_copy(update={"trackers": ["interrupt"]}))


def test_a_save_that_is_asked_for_comes_after_the_next_step_also_right_after_another(
    folder: Path, whole: tuple[RunConfig, Summary], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(folder, "asked", checkpoint={"every": 3, "keep": 9})
    # Seen when the ranks have agreed on what step 3 saves.
    summary = _interrupted(config, 3, signal.SIGUSR1)
    assert not summary.stopped and summary.final_loss == whole[1].final_loss
    saved = sorted(path.name for path in (Path(config.out) / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000004", "step-00000006"]
    assert "saved step 4, as asked" in capsys.readouterr().out


def _tensors(checkpoint: str | Path) -> dict[str, bytes]:
    """What a checkpoint's data files hold, as bytes."""
    return {path.name: path.read_bytes() for path in Path(checkpoint).glob("*.safetensors")}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_trains_and_leaves_what_it_promises(whole: tuple[RunConfig, Summary]) -> None:
    config, summary = whole
    assert summary.steps == 6 and not summary.stopped and summary.resumed_from is None
    assert abs(summary.initial_loss / math.log(summary.vocabulary) - 1) < 0.02
    assert summary.final_loss < summary.initial_loss - 0.1
    assert summary.eval_after < summary.eval_before - 0.1
    assert summary.tokens == 6 * 8 * 32
    assert summary.sample.startswith("def ")
    out = Path(config.out)
    assert Summary.read(out) == summary
    assert list(metrics(config)) == [1, 2, 3, 4, 5, 6]
    assert metrics(config, "eval_loss") == {0: summary.eval_before, 6: summary.eval_after}
    assert metrics(config, "lr")[1] == pytest.approx(1.5e-3)
    assert metrics(config, "tokens")[6] == summary.tokens
    assert list((out / "tensorboard").iterdir())
    assert summary.checkpoint == str(out / "checkpoints" / "step-00000006")
    found = Checkpoint(Path(summary.checkpoint))
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(found.assets)
    assert found.state["model_config"]["vocab_size"] == 300
    assert found.state["run"]["consumed"] == 48


def test_what_is_shown_has_the_losses_and_what_to_do_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(run_config(folder, "shown", train={"steps": 2, "batch": 8, "sample": {"tokens": 2}}))
    shown = capsys.readouterr().out
    assert "step 1/2  loss" in shown and "tok/s" in shown
    assert f"held-out loss     {summary.eval_before:.4f} → {summary.eval_after:.4f}" in shown
    assert "ln 300 = 5.7038" in shown
    # The test runs with or without the environment on the search path; the command is shown as it can be typed.
    assert f"hyper-parallel export {summary.checkpoint}" in shown
    assert f"hyper-parallel train {folder}/shown/run.yaml train.steps=4" in shown


def test_the_run_file_that_is_left_is_the_run(whole: tuple[RunConfig, Summary]) -> None:
    from hyper_parallel.config import load

    config, _ = whole
    assert load(Path(config.out) / "run.yaml", []) == config


def test_an_interrupted_run_saves_and_goes_on_bit_for_bit(
    folder: Path, whole: tuple[RunConfig, Summary]
) -> None:
    _, expected = whole
    config = run_config(folder, "interrupted")
    first = _interrupted(config, 2)
    # The request comes while step 2 is recorded, so that step 3 is the last.
    assert first.stopped and first.steps == 3 and first.sample is None
    assert first.checkpoint.endswith("step-00000003")
    second = run(config)
    assert second.resumed_from == 3 and second.steps == 6
    assert metrics(config) == metrics(whole[0])
    assert metrics(config, "grad_norm") == metrics(whole[0], "grad_norm")
    assert _tensors(second.checkpoint) == _tensors(expected.checkpoint)
    assert (second.initial_loss, second.eval_before) == (expected.initial_loss, expected.eval_before)
    assert second.eval_after == expected.eval_after


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_a_checkpoint_is_due_after_a_length_of_time(
    engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that goes on by a second with each look: one a step, and one a save.
    seconds = itertools.count()
    monkeypatch.setattr(
        run_parts, "SaveInterval", functools.partial(SaveInterval, clock=lambda: next(seconds))
    )
    train = {"steps": 6, "batch": 8, "engine": engine, "sample": {"tokens": 0}}
    config = run_config(folder, f"timed-{engine}", checkpoint={"every": "2s", "keep": 9}, train=train)
    run(config)
    saved = sorted(path.name for path in (Path(config.out) / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_run_into_the_folder_of_one_that_is_live_is_refused_before_it_touches_anything(
    folder: Path, whole: tuple[RunConfig, Summary]
) -> None:
    config = run_config(folder, "live", seed=8)
    shutil.copytree(whole[0].out, config.out)
    before = _contents(Path(config.out))
    lock = open_folder(Path(config.out) / "checkpoints")
    with pytest.raises(CheckpointError, match="another run is writing checkpoints into"):
        run(config)
    os.close(lock)
    with pytest.raises(ConfigError, match="of another run: seed was 7 and is 8"):
        run(config)
    assert _contents(Path(config.out)) == before
    # Neither refusal holds the folder: the next run in this process has it.
    assert run(config.model_copy(update={"seed": 7})).steps == 6


@pytest.mark.parametrize("file", ["run.yaml", "checkpoints", "tensorboard"])
def test_a_file_system_that_refuses_is_one_line(file: str, folder: Path) -> None:
    config = run_config(folder, f"refused-{file}", trackers=["tensorboard"])
    (Path(config.out) / file / "in-the-way").mkdir(parents=True)
    if file != "run.yaml":
        shutil.rmtree(Path(config.out) / file)
        (Path(config.out) / file).touch()
    with pytest.raises(
        CheckpointError, match=r"a (file|folder) is in the way .*; move it or put 'out'"
    ) as caught:
        run(config)
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_named_and_passed_over(
    folder: Path, whole: tuple[RunConfig, Summary], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(folder, "damaged")
    shutil.copytree(whole[0].out, config.out)
    data = Path(config.out) / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    summary = run(config)
    assert summary.resumed_from == 4
    assert "passed over step-00000006: rank-00000.safetensors: sha256 differs" in capsys.readouterr().out
    assert metrics(config) == metrics(whole[0])


def test_a_finished_run_is_not_trained_again(
    folder: Path, whole: tuple[RunConfig, Summary], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(folder, "finished")
    shutil.copytree(whole[0].out, config.out)
    again = run(config)
    assert "nothing left to train: step 6 of 6 is done" in capsys.readouterr().out
    assert again.eval_after == whole[1].eval_after and again.sample == whole[1].sample
    assert again.initial_loss == whole[1].initial_loss
    assert again.checkpoint == str(Path(config.out) / "checkpoints" / "step-00000006")
    assert metrics(config) == metrics(whole[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"model": {"config": {**LLAMA, "intermediate_size": 64}}}, "intermediate_size was 48 and is 64"),
        ({"data": {"sequence": 16}}, "data.sequence was 32 and is 16"),
        ({"train": {"optimizer": {"name": "muon"}}}, "train.optimizer.name was 'adamw' and is 'muon'"),
    ],
)
def test_another_run_is_not_resumed(
    change: dict, said: str, folder: Path, whole: tuple[RunConfig, Summary]
) -> None:
    config = run_config(folder, "whole", **change)
    before = sorted(Path(config.out).rglob("*"))
    with pytest.raises(ConfigError, match=said):
        run(config)
    assert sorted(Path(config.out).rglob("*")) == before


def _two_texts(folder: Path) -> tuple[Path, Path]:
    """A file, and one whose tokens are others, but as many."""
    one, other = folder / "one.txt", folder / "other.txt"
    one.write_text("".join(f"alpha beta {i}\n" for i in range(400)))
    other.write_text(one.read_text().replace("alpha beta", "beta alpha"))
    return one, other


def test_the_text_is_known_by_its_content_and_not_by_its_path(folder: Path, tmp_path: Path) -> None:
    one, other = _two_texts(tmp_path)
    first = run_config(folder, "text", data={"train": str(one), "eval": None})
    built = run(first)
    tokenizer = {"path": str(Path(built.checkpoint) / "assets")}
    moved = tmp_path / "elsewhere" / "renamed.txt"
    moved.parent.mkdir()
    shutil.copy(one, moved)
    more = {"steps": 8, "batch": 8, "sample": {"tokens": 0}}

    def with_text(text: Path, **checkpoint: object) -> RunConfig:
        data = {"train": str(text), "eval": None, "tokenizer": tokenizer}
        return run_config(folder, "text", data=data, train=more, checkpoint=checkpoint)

    with pytest.raises(ConfigError, match=r"the text of data\.train was .*checkpoint\.allow_other_data=true"):
        run(with_text(other))
    assert run(with_text(moved.parent)).resumed_from == 6
    more["steps"] = 9
    again = run(with_text(other, allow_other_data=True))
    assert again.resumed_from == 8
    assert Checkpoint(Path(again.checkpoint)).state["run"]["consumed"] == 8


def test_a_run_that_may_not_resume_leaves_an_earlier_one_alone(whole: tuple[RunConfig, Summary]) -> None:
    config = whole[0].model_copy(
        update={"checkpoint": whole[0].checkpoint.model_copy(update={"resume": False})}
    )
    with pytest.raises(ConfigError, match=r"step 6 and checkpoint\.resume is false"):
        run(config)


def test_batch_and_steps_may_change_on_resume(folder: Path, whole: tuple[RunConfig, Summary]) -> None:
    config = run_config(folder, "longer", train={"steps": 8, "batch": 4, "micro_batch": 2})
    shutil.copytree(whole[0].out, config.out)
    summary = run(config)
    assert summary.resumed_from == 6 and summary.steps == 8
    assert Checkpoint(Path(summary.checkpoint)).state["run"]["consumed"] == 48 + 2 * 4


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_not_finite_stops_before_the_optimizer(engine: str, folder: Path) -> None:
    train = {"steps": 6, "batch": 8, "engine": engine}
    config = run_config(folder, f"broken-{engine}", checkpoint={"every": 1}, train=train)
    model = Bigram(broken_at=3)
    with pytest.raises(NonFiniteError) as caught:
        run(config, model)
    said = str(caught.value)
    assert said.startswith(
        "step 3: the loss is nan and the gradient norm nan; the worst gradient is that of "
    )
    assert "of 4 parameters have such elements; the batch is rows " in said and "\n" not in said
    assert any(f"{name!r}" in said for name, _ in model.named_parameters())
    saved = Checkpoint(Path(config.out) / "checkpoints" / "step-00000002")
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all()
        blocks = saved.tensors[f"model.{name}"].blocks
        data = (saved.path / blocks[0].file).read_bytes()[blocks[0].start : blocks[0].stop]
        assert data == parameter.detach().numpy().tobytes()
    assert list(metrics(config)) == [1, 2]


def test_a_model_of_ones_own_cannot_be_sent_to_other_processes(folder: Path) -> None:
    config = run_config(folder, "own", strategy={"axes": {"shard": 2}})
    with pytest.raises(LaunchError, match="torchrun"):
        Trainer(config, Bigram()).run()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({**LLAMA, "model_type": "lama"}, "knows no 'lama'; did you mean 'llama'"),
        ({**LLAMA, "hiden_size": 3}, "llama has no 'hiden_size'; did you mean 'hidden_size'"),
        ({**LLAMA, "vocab_size": 100}, "vocab_size is 100, but the tokenizer has ids up to 299"),
        ({**LLAMA, "max_position_embeddings": 16}, "data.sequence is 32, but the model has 16 positions"),
        ({**LLAMA, "hidden_size": 33}, "model"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(model: dict, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        run(run_config(folder, "refused", model={"config": model}))
    assert "\n" not in str(caught.value)


def test_the_sample_is_what_transformers_generates(whole: tuple[RunConfig, Summary], folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hyper_parallel.checkpoint import export

    _, summary = whole
    out = export(Path(summary.checkpoint), folder / "exported")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompt = torch.tensor([tokenizer("def ", add_special_tokens=False)["input_ids"]])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == summary.sample


def test_metrics_that_are_not_numbers_do_not_break_the_files(tmp_path: Path) -> None:
    summary = Summary(
        "x", 1, False, None, 10, 10, float("nan"), None, None, None, 1, 0.0, None, None, None, None
    )
    assert json.loads(json.dumps(summary.to_json(), allow_nan=False))["initial_loss"] is None


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        ({"memory": {"recompute": "layer"}}, 0.0),
        ({"precision": {"compute": "bfloat16"}}, 0.02),
        (
            {"precision": {"compute": "bfloat16", "modules": {"*norm*": "float32", "lm_head": "float32"}}},
            0.02,
        ),
    ],
    ids=["recompute", "bfloat16", "bfloat16-but-some"],
)
def test_recompute_changes_nothing_and_bfloat16_little(
    strategy: dict,
    tolerance: float,
    folder: Path,
    whole: tuple[RunConfig, Summary],
    request: pytest.FixtureRequest,
) -> None:
    config = run_config(folder, request.node.callspec.id, strategy=strategy)
    run(config)
    assert metrics(config) == pytest.approx(metrics(whole[0]), abs=tolerance, rel=0)
    assert (metrics(config) == metrics(whole[0])) == (tolerance == 0)
