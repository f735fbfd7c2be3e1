"""The doctor's report, its warnings, and the bundle."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hyper_parallel.compat import unused_accelerators
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch import doctor


@pytest.fixture(scope="module")
def report() -> dict:
    return doctor.collect()


def test_the_report_is_json_and_names_what_matters(report: dict) -> None:
    assert json.loads(json.dumps(report)) == report
    assert {"python", "torch", "transformers", "tokenizers", "safetensors", "pydantic"} <= set(
        report["versions"]
    )
    assert report["devices"][-1]["device"] == "cpu" and report["devices"][-1]["memory"] > 0
    assert report["network"]["loopback rendezvous"] == "works"
    assert 0 < report["network"]["free port"] < 65536
    assert report["launcher"]["seen"].startswith("none")


def test_the_table_shows_every_section_and_warning(report: dict) -> None:
    text = doctor.render({**report, "warnings": [{"what": "a [b] is broken", "mend": "mend it"}]})
    for word in ("versions", "devices", "machine", "network", "launcher", report["versions"]["torch"]):
        assert word in text
    assert text.endswith("warning: a [b] is broken; mend it")
    assert doctor.render({**report, "warnings": []}).endswith("nothing stands in the way of a run")


def test_secrets_in_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    report = doctor.collect()
    assert "s3cret" not in json.dumps(report)
    assert report["environment"]["GLOO_SOCKET_IFNAME"] == "nowhere0"
    assert any("nowhere0 is no interface" in warning["what"] for warning in report["warnings"])


def test_what_is_missing_old_or_scarce_is_a_warning_with_its_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.1", "pydantic": "2.9"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))

    def refuse(*args: object, **kwargs: object) -> socket.socket:
        raise OSError("loopback is down")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = doctor.collect()
    said = {warning["what"]: warning["mend"] for warning in report["warnings"]}
    assert said["torch 2.10.1 is not supported"] == "pip install 'torch>=2.11,<2.14'"
    assert said["transformers is not installed"] == "pip install transformers"
    assert "only 1000 B of disk are free here" in said
    assert any("workers on this machine cannot meet" in what for what in said)
    assert any("nothing says where the workers meet" in what for what in said)
    assert report["network"]["loopback rendezvous"] == "fails"


def test_devices_without_their_pytorch_are_told(tmp_path: Path) -> None:
    assert unused_accelerators(tmp_path) == []
    (tmp_path / "davinci0").touch()
    (tmp_path / "davinci_manager").touch()
    ((what, mend),) = unused_accelerators(tmp_path)
    assert what.startswith("1 npu devices are there") and "torch_npu" in mend


def _a_run(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "run.yaml").write_text("version: 1\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "logs/rank-0.log").write_text("".join(f"line {number:07}\n" for number in range(50_000)))
    (folder / "weights.safetensors").write_text("not for a report")
    return folder


@pytest.mark.parametrize("name", ["report.zip", "report.tar.gz"])
def test_the_bundle_has_the_report_the_settings_and_the_tails_and_nothing_else(
    tmp_path: Path, name: str
) -> None:
    path = doctor.bundle(tmp_path / name, _a_run(tmp_path / "run"))
    if name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            members = {member: archive.read(member).decode() for member in archive.namelist()}
    else:
        with tarfile.open(path) as archive:
            members = {member.name: archive.extractfile(member).read().decode() for member in archive}
    assert set(members) == {
        "doctor.json",
        "doctor.txt",
        "run/run.yaml",
        "run/metrics.jsonl",
        "run/logs/rank-0.log",
    }
    assert json.loads(members["doctor.json"])["versions"]["torch"]
    log = members["run/logs/rank-0.log"]
    assert log.startswith("line ") and log.endswith("line 0049999\n") and len(log) <= 256 * 1024


def test_a_bundle_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a \.zip or a \.tar\.gz"):
        doctor.bundle(tmp_path / "report.rar")
    with pytest.raises(ConfigError, match="there is no run's folder"):
        doctor.bundle(tmp_path / "report.zip", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot write"):
        doctor.bundle(tmp_path / "nowhere/report.zip")


def test_launch_and_doctor_import_no_torch() -> None:
    script = "import sys; import hyper_parallel.launch, hyper_parallel.launch.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
