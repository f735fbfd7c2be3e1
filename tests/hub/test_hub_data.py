"""Data sets of the Hub: prepared once, pinned, read as a datasets folder is, and never mistaken for a path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from harness.hub_server import HubServer
from hyper_parallel import config
from hyper_parallel.config.data import DataConfig, HubData
from hyper_parallel.data.document import Chat, Text
from hyper_parallel.data.hub_data import prepared
from hyper_parallel.data.read_documents import documents
from hyper_parallel.data.sources import digests, find
from hyper_parallel.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(autouse=True)
def own_cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What datasets read when it was imported."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "home" / "modules"))
    datasets.disable_progress_bars()


def push(hub: HubServer, commit: str = "a", **files: bytes) -> str:
    named = {name.replace("__", "/").replace("_jsonl", ".jsonl"): content for name, content in files.items()}
    return hub.repository("acme/rows", "datasets").push(commit, named)


def read(train: Any, key: str = "train", say: Callable[[str], Any] = lambda line: None) -> list[Any]:
    section = prepared(DataConfig(**{"train": "python-stdlib", key: train}), say)
    return list(documents(find(getattr(section, key), "auto", key), key))


def test_chats_and_texts_are_read_once(hub: HubServer) -> None:
    commit = push(
        hub, train_jsonl=lines({"messages": CHAT}, {"messages": CHAT}), test_jsonl=lines({"messages": CHAT})
    )
    said: list[str] = []
    section = prepared(DataConfig(train="hub:acme/rows", eval=HubData(path="acme/rows")), said.append)
    assert section.train == HubData(path=f"hub:acme/rows@{commit}", split="train")
    assert section.eval == HubData(path=f"hub:acme/rows@{commit}", split="test")
    assert f"data.train: downloading the data set acme/rows at {commit[:7]}" in said
    found = list(documents(find(section.train, "auto", "train"), "train"))
    assert len(found) == 2
    assert isinstance(found[0], Chat)
    assert found[0].messages == CHAT
    assert found[0].where == f"acme/rows@{commit}, row 0"
    hub.asked.clear()
    assert prepared(section, said.append) == section
    assert not hub.asked
    # Beside files, in the order that is written; the digest names the commit, not a path.
    both = find([section.train, section.eval], "auto", "train")
    assert len(list(documents(both, "train"))) == 3
    assert digests(both).content != digests(both[:1]).content


def test_a_commit_is_kept_and_the_cache_serves_it(hub: HubServer) -> None:
    first = push(hub, "a", train_jsonl=lines({"text": "one"}))
    assert read("hub:acme/rows") == [Text(f"acme/rows@{first}, row 0", "one")]
    second = push(hub, "b", train_jsonl=lines({"text": "two"}))
    assert read("hub:acme/rows")[0].text == "two"
    hub.status = 503
    said: list[str] = []
    assert read(f"hub:acme/rows@{first}")[0].text == "one"
    assert read("hub:acme/rows", say=said.append)[0].text == "two"
    assert said == [f"data.train: acme/rows as the cache has it ({second[:7]}): the Hub was not reached"]
    with pytest.raises(DataError, match=r"answers with status 503; .*--revision v1 --repo-type dataset"):
        read("hub:acme/rows@v1")


def test_subsets_and_splits(hub: HubServer) -> None:
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("en", "de")]
    card = f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()
    files = {"README.md": card, "en.jsonl": lines({"text": "yes"}), "de.jsonl": lines({"text": "ja"})}
    hub.repository("acme/rows", "datasets").push("a", files)
    assert read(HubData(path="acme/rows", name="de"))[0].text == "ja"
    with pytest.raises(
        DataError, match=r"needs one of its subsets: .*'en', 'de'.*write \{path: .*, name: SUBSET"
    ):
        read("hub:acme/rows")
    with pytest.raises(
        DataError, match=r"none of them 'trian'; name one: \{path: acme/rows, name: de, split: train\}"
    ):
        read(HubData(path="acme/rows", name="de", split="trian"))


def test_columns_that_are_not_understood_are_named(hub: HubServer) -> None:
    push(hub, train_jsonl=lines({"question": "2+2?", "answer": "4"}))
    with pytest.raises(
        DataError, match=r"row 0: none of the keys 'text', .*; its keys are 'question', 'answer'"
    ):
        read("hub:acme/rows")


def test_missing_gated_and_empty(hub: HubServer) -> None:
    with pytest.raises(DataError, match=r"data\.train: acme/none is no data set on the Hub"):
        read("hub:acme/none")
    push(hub, train_jsonl=lines({"text": "a"}))
    hub.repository("acme/rows", "datasets").gated = True
    with pytest.raises(DataError, match=r"is gated: accept its terms on .*/datasets/acme/rows"):
        read("hub:acme/rows")
    hub.repository("acme/code", "datasets").push("c", {"code.py": b"raise SystemExit"})
    with pytest.raises(DataError, match=r"acme/code (is a script|has no files)"):
        read("hub:acme/code")


def test_a_path_is_never_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"'acme/rows' does not exist.*hub:acme/rows"):
        find("acme/rows", "auto", "train")
    with pytest.raises(ConfigError, match="is no id of the Hub"):
        find("hub:rows", "auto", "train")
    assert not hub.asked
    base = {"version": 1, "out": "o", "model": {"config": {"model_type": "llama"}}}
    run = config.from_dict({**base, "data": {"train": [{"path": "acme/rows", "split": "train"}, "a.txt"]}})
    assert run.data.train == [HubData(path="acme/rows", split="train"), "a.txt"]
    assert config.from_dict(json.loads(json.dumps(run.model_dump(mode="json")))) == run
    for wrong, line in (
        ({"path": "acme/rows", "revision": "v1"}, "path: org/name@revision"),
        ({"path": "./rows"}, "is no id of the Hub"),
        ({"path": "acme/rows", "split": "train[:10]"}, "must be the name of one split"),
    ):
        with pytest.raises(ConfigError) as caught:
            config.from_dict({**base, "data": {"train": wrong}})
        assert line in str(caught.value)
        assert os.linesep not in str(caught.value)
