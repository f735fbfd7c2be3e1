"""Commands with an id of the Hub: the download comes before the workers, and a run keeps the commit it began with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.forked_command import run_command
from harness.hub_server import HubServer
from hyper_parallel.cli.hub_models import fetched_rl
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.role_split import write_run


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, folder=folder)


def run_file(folder: Path, model: str = "acme/tiny") -> None:
    (folder / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400)))
    run = {
        "version": 1,
        "out": "out",
        "model": {"path": model},
        "data": {"train": "text.txt", "sequence": 32, "holdout": 0, "cache": "cache"},
        "train": {"steps": 2, "batch": 2, "engine": "eager"},
        "strategy": {"axes": {"shard": 2}},
        "checkpoint": {"every": 1},
        "trackers": [],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def test_a_run_from_an_id_keeps_its_commit(hub: HubServer, small_model: Path, tmp_path: Path) -> None:
    first = hub.push_folder("acme/tiny", small_model, "a")
    run_file(tmp_path)
    done = command(tmp_path, "train", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert f"model.path: downloading acme/tiny at {first[:7]}" in done.stderr
    assert hub.downloads().count("model.safetensors") == 1
    pinned = f"hub:acme/tiny@{first}"
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text())["model"]["path"] == pinned

    second = hub.push_folder("acme/tiny", small_model, "b", generation_config__json=b"{}")
    hub.asked.clear()
    more = command(tmp_path, "train", "run.yaml", "train.steps=3")
    assert more.returncode == 0, more.stderr
    assert f"acme/tiny is now at {second[:12]}; the run goes on with {first[:12]}" in more.stderr
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text())["model"]["path"] == pinned
    assert not hub.downloads()

    refused = command(tmp_path, "train", "run.yaml", f"model.path=acme/tiny@{second}")
    assert refused.returncode == 2
    assert (
        f"the run in 'out' began with {first[:12]}; write {pinned}, or acme/tiny, to go on" in refused.stderr
    )

    # Without the server: the same command, and the run's own file.
    hub.status = 503
    for file in ("run.yaml", "out/run.yaml"):
        offline = command(tmp_path, "train", file, "train.steps=4", "train.engine=eager")
        assert offline.returncode == 0, offline.stderr


def test_a_run_on_a_data_set(hub: HubServer, small_model: Path, tmp_path: Path) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    rows = "".join(json.dumps({"prompt": f"f{i}", "response": f"x + {i}"}) + "\n" for i in range(100))
    data = hub.repository("acme/rows", "datasets")
    first = data.push("d", {"train.jsonl": rows.encode()})
    run_file(tmp_path)
    arguments = ("train", "run.yaml", "data.train={path: acme/rows}")
    done = command(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"data.train: downloading the data set acme/rows at {first[:7]}" in done.stderr
    kept = {"path": f"hub:acme/rows@{first}", "name": None, "split": "train"}
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text())["data"]["train"] == kept
    second = data.push("e", {"train.jsonl": b"{}"})
    more = command(tmp_path, *arguments, "train.steps=3")
    assert more.returncode == 0, more.stderr
    assert f"data.train: acme/rows is now at {second[:12]}; the run goes on with {first[:12]}" in more.stderr
    hub.status = 503
    offline = command(tmp_path, "train", "out/run.yaml", "train.steps=4")
    assert offline.returncode == 0, offline.stderr


def test_generation_from_an_id(hub: HubServer, small_model: Path, tmp_path: Path) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    arguments = ("--prompt", "def f1(x):", "inference.max_tokens=4")
    done = command(tmp_path, "generate", "acme/tiny", *arguments)
    assert done.returncode == 0, done.stderr
    from_folder = command(tmp_path, "generate", str(small_model), *arguments)
    assert done.stdout == from_folder.stdout
    # As written: a path's own beginning is not taken off, so that it does not become an id.
    missing = command(tmp_path, "simulate", "--generate", "./acme/tiny", "--cluster", "h100x1")
    assert missing.returncode == 2
    assert "./acme/tiny" in missing.stderr
    typo = command(tmp_path, "generate", "./acme/tiny", *arguments)
    assert typo.returncode == 2
    assert "acme/tiny: no such folder" in typo.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "run.yaml"),
        ("simulate", "run.yaml", "--cluster", "h100x2", "--json"),
        ("plan", "--model", "acme/tiny", "--cluster", "h100x2", "--batch", "2", "--sequence", "32"),
        ("simulate", "--generate", "acme/tiny", "--cluster", "h100x1"),
    ],
    ids=" ".join,
)
def test_predictions_download_the_config_alone(
    arguments: tuple[str, ...], hub: HubServer, small_model: Path, tmp_path: Path
) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    run_file(tmp_path)
    done = command(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == ["config.json"]
    if arguments[0] == "plan":
        hub.status = 503
        assert command(tmp_path, *arguments).returncode == 0


def test_workers_of_a_launcher_download_once(hub: HubServer, small_model: Path, tmp_path: Path) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    run_file(tmp_path)
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "hyper_parallel")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "train", "run.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert hub.downloads().count("model.safetensors") == 1


def test_a_tokenizer_and_a_misspelt_folder(hub: HubServer, small_model: Path, tmp_path: Path) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    run_file(tmp_path, model="runs/tiny")
    (tmp_path / "runs").mkdir()
    missing = command(tmp_path, "train", "run.yaml")
    assert missing.returncode == 2
    assert "runs/tiny/config.json does not exist" in missing.stderr
    assert "a model of the Hub is written hub:runs/tiny here" in missing.stderr
    assert not hub.asked
    both = command(tmp_path, "train", "run.yaml", "model.path=acme/nothing")
    assert both.returncode == 2
    assert both.stderr.count("\n") == 1
    assert "model.path: acme/nothing is neither a folder here nor a model on the Hub" in both.stderr
    config = json.loads((small_model / "config.json").read_text())
    fields = {
        key: config[key] for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    own = json.dumps({**fields, "num_attention_heads": 4})
    verified = command(
        tmp_path,
        "verify",
        "run.yaml",
        "model.path=null",
        f"model.config={own}",
        "data.tokenizer.path=acme/tiny",
    )
    assert verified.returncode == 0, verified.stderr
    assert "tokenizer.json" in hub.downloads()
    assert "model.safetensors" not in hub.downloads()


def test_roles_of_reinforcement_learning_keep_their_commits(
    hub: HubServer, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = hub.push_folder("acme/tiny", small_model, "a")
    hub.push_folder("acme/reward", small_model, "r")
    given = {"version": 1, "out": "out", "model": {"path": "acme/tiny"}}
    given |= {
        "task": {"prompts": "p.jsonl", "reward": "model"},
        "roles": {"reward": {"model": "acme/reward"}},
    }
    config = RLConfig.model_validate(given)
    run = fetched_rl(config)
    assert run.model.path == f"hub:acme/tiny@{first}"
    assert run.roles.rewards is not None
    assert (Path(run.roles.rewards.folder) / "model.safetensors").exists()
    (tmp_path / "out/checkpoints/step-00000001").mkdir(parents=True)
    write_run(run, None)
    hub.push_folder("acme/tiny", small_model, "b")
    assert fetched_rl(config) == run
