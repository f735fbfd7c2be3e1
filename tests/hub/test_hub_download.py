"""Ids of the Hub with the real client: what is downloaded, what is found again, and what each failure says."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from harness.hub_server import HubServer, commit_of
from hyper_parallel.errors import ConfigError
from hyper_parallel.hub import HubId, Wanted, fetched_folder, parse, pinned

TINY = HubId(name="acme/tiny")


def get(text: str, wanted: Wanted = Wanted.MODEL, tell: Callable[[str], Any] = lambda line: None) -> HubId:
    found = parse(text, "model.path")
    assert found is not None
    return pinned(found, wanted, "model.path", bare=not text.startswith("hub:"), tell=tell)


def test_a_model_is_downloaded_once_without_code_or_pickles(hub: HubServer, small_model: Path) -> None:
    commit = hub.push_folder(
        "acme/tiny", small_model, "a", modeling_tiny__py=b"raise SystemExit", pytorch_model__bin=b"pickle",
        consolidated__safetensors=b"twice", README__md=b"# tiny",
    )  # fmt: skip
    lines: list[str] = []
    found = get("acme/tiny", tell=lines.append)
    assert str(found) == f"hub:acme/tiny@{commit}"
    there = {path.name for path in fetched_folder(found).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= there
    assert not there & {"modeling_tiny.py", "pytorch_model.bin", "consolidated.safetensors", "README.md"}
    assert len(lines) == 1
    assert lines[0].startswith(f"model.path: downloading acme/tiny at {commit[:7]}, ")

    hub.asked.clear()
    assert get("acme/tiny", tell=lines.append) == found
    assert not hub.downloads()
    hub.asked.clear()
    assert get(str(found)) == found
    assert not hub.asked  # a commit that is there needs no network
    assert len(lines) == 1


def test_only_the_config_is_downloaded_where_it_is_enough(hub: HubServer, small_model: Path) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    found = get("acme/tiny", Wanted.CONFIG)
    assert hub.downloads() == ["config.json"]
    assert [path.name for path in fetched_folder(found).iterdir()] == ["config.json"]
    # The folder in the cache is no whole model, and is not taken for one.
    get(str(found), Wanted.ASSETS)
    assert "tokenizer.json" in hub.downloads()
    assert "model.safetensors" not in hub.downloads()
    get(str(found))
    assert "model.safetensors" in hub.downloads()


def test_an_index_brings_the_shards_that_it_names(hub: HubServer, small_model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {
        "config.json": (small_model / "config.json").read_bytes(),
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **dict.fromkeys(index["weight_map"].values(), b"0"),
        "consolidated-00001-of-00001.safetensors": b"0",
    }
    hub.repository("acme/tiny").push("a", files)
    there = fetched_folder(get("acme/tiny"))
    assert sorted(path.name for path in there.glob("*.safetensors")) == sorted(index["weight_map"].values())
    (there / "model-00002-of-00002.safetensors").unlink()
    hub.asked.clear()
    get("acme/tiny")  # an interrupted download goes on
    assert (there / "model-00002-of-00002.safetensors").exists()
    hub.repository("acme/tiny").push("b", {name: files[name] for name in files if "00002" not in name[:12]})
    with pytest.raises(
        ConfigError, match=r"names 'model-00002-of-00002.safetensors', which the repository does not"
    ):
        get("acme/tiny")


def test_revisions(hub: HubServer, small_model: Path) -> None:
    first = hub.push_folder("acme/tiny", small_model, "a", "main", "v1.0")
    pull = hub.push_folder("acme/tiny", small_model, "p", "refs/pr/1")
    second = hub.push_folder("acme/tiny", small_model, "b", "main")
    for revision, commit in (("v1.0", first), ("main", second), ("refs/pr/1", pull), (first, first)):
        assert get(f"acme/tiny@{revision}", Wanted.CONFIG).commit == commit
    assert get("acme/tiny", Wanted.CONFIG).commit == second
    with pytest.raises(ConfigError, match=r"acme/tiny has no revision 'v9'; .*/acme/tiny/tree/main lists"):
        get("acme/tiny@v9")


def test_the_cache_serves_where_the_hub_does_not(hub: HubServer, small_model: Path) -> None:
    commit = hub.push_folder("acme/tiny", small_model, "a")
    get("acme/tiny")
    hub.status = 503
    lines: list[str] = []
    assert get("acme/tiny", tell=lines.append).commit == commit
    assert lines == [f"model.path: acme/tiny as the cache has it ({commit[:7]}): the Hub was not reached"]
    hub.status = None
    get("acme/tiny@main", Wanted.CONFIG)
    # What has the config alone is not taken for the model.
    (fetched_folder(TINY.at(commit)) / "model.safetensors").unlink()
    hub.status = 503
    with pytest.raises(ConfigError, match="answers with status 503"):
        get("acme/tiny")


def test_offline_says_what_to_type(
    hub: HubServer, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push_folder("acme/tiny", small_model, "a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        get("acme/tiny@v2")
    line = str(caught.value)
    assert (
        "acme/tiny@v2 is no folder here, and not in the cache of the Hub, and HF_HUB_OFFLINE is set" in line
    )
    assert "type: hf download acme/tiny --revision v2; the cache" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    get("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert get("acme/tiny").commit == commit
    assert not hub.asked


def test_a_dead_server_is_told_at_once(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer().serving():
        pass
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    begun = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"cannot be reached; where there is a network, type: hf download acme/tiny"
    ):
        get("acme/tiny")
    assert time.monotonic() - begun < 20


def test_a_slow_server_is_not_waited_for(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.delay = 30
    monkeypatch.setattr("hyper_parallel.hub.download.TIMEOUT_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="does not answer in time"):
        get("acme/tiny")
    assert time.monotonic() - begun < 20


def test_missing_and_gated_repositories(
    hub: HubServer, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="acme/nothing is neither a folder here nor a model on the Hub"):
        get("acme/nothing")
    with pytest.raises(ConfigError, match="acme/nothing is no model on the Hub"):
        get("hub:acme/nothing")
    commit = hub.push_folder("acme/gated", small_model, "a")
    hub.repository("acme/gated").gated = True
    with pytest.raises(
        ConfigError, match=r"is gated: accept its terms on http://.*/acme/gated, then .*hf auth login"
    ):
        get("acme/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    assert get("acme/gated").commit == commit


def test_what_is_no_model_is_refused(hub: HubServer, small_model: Path) -> None:
    config = (small_model / "config.json").read_bytes()
    hub.repository("acme/old").push("a", {"config.json": config, "pytorch_model.bin": b"0"})
    with pytest.raises(ConfigError, match=r"no safetensors on the Hub \(only pytorch_model.bin\)"):
        get("acme/old")
    hub.repository("acme/text").push("a", {"README.md": b"#"})
    with pytest.raises(ConfigError, match=r"has no config\.json on the Hub"):
        get("acme/text", Wanted.CONFIG)
    evil = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    hub.repository("acme/evil").push(
        "a", {"config.json": config, "model.safetensors.index.json": evil, "m-1-of-1.safetensors": b"0"}
    )
    with pytest.raises(ConfigError, match="which is no file of its folder"):
        get("acme/evil")


def test_a_full_disk(hub: HubServer, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push_folder("acme/tiny", small_model, "a")
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(
            ConfigError, match=r"is full \(.* needed, 1000 B free\); free some, or set HF_HOME"
        ):
            get("acme/tiny")

    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(ConfigError, match="is full; free some"):
        get("acme/tiny")


def test_what_is_an_id_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "acme" / "here").mkdir(parents=True)
    ids = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@v1.0", "a/b@refs/pr/3", "hub:acme/here", "hub:runs/x")
    for text in ids:
        found = parse(text, "k")
        assert found is not None, text
        assert found.shown == text.removeprefix("hub:")
    paths = (
        "./modles/x", "models/x/y", "../a/b", "/a/b", "~/a/b", "acme/here", "acme/typo", "runs/quickstrat", "gpt2",
        "a/b.json", "a/b.yaml", "a/..", "a//b", "a b/c", "a/b@", "a/b@../c",
    )  # fmt: skip
    for text in paths:
        assert parse(text, "k") is None, text
    for text in ("hub:gpt2", "hub:", "hub:a/b/c", "hub:../x", "hub:a/b@"):
        with pytest.raises(ConfigError, match="is no id of the Hub; write hub:org/name"):
            parse(text, "k")
    assert commit_of("a") == HubId(name="a/b", revision=commit_of("a")).commit
