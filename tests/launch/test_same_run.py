"""Ranks that do not run the same are ended at admission, with the keys and both values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import admission
from hyper_parallel.launch.admission import Agreement, agree, difference, facts_of, identity
from hyper_parallel.launch.rendezvous import WorkerPlace

PLACE = WorkerPlace("torchrun", 0, 2, 0, 1, "127.0.0.1", 29500)


def _config(text: Path, **sections: object) -> RunConfig:
    model = {"config": {"model_type": "llama"}}
    return from_dict({"version": 1, "out": "out", "model": model, "data": {"train": str(text)}, **sections})


def _reach(*facts: dict[str, str], worlds: tuple[int, ...] = (), seconds: float = 30) -> list[str]:
    """The error of each rank, empty where there is none."""
    store = HashStore()

    def reach(rank: int) -> str:
        world = worlds[rank] if worlds else len(facts)
        try:
            Agreement(store, rank, world, timedelta(seconds=seconds)).reach(facts[rank])
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(reach, range(len(facts))))


def test_equal_ranks_go_on_and_one_that_differs_ends_all_with_one_line() -> None:
    same = {"seed": "0", "train.optimizer.lr": "0.1"}
    assert _reach(same, same, same) == ["", "", ""]
    lines = _reach(same, same, {**same, "train.optimizer.lr": "0.3"})
    assert len(set(lines)) == 1 and "train.optimizer.lr (0.1 on rank 0, 0.3 on rank 2)" in lines[0]
    assert "\n" not in lines[0] and "seed" not in lines[0]


def test_ranks_that_disagree_about_their_number_are_found_without_waiting_for_the_missing() -> None:
    lines = _reach({"axes": "4"}, {"axes": "2"}, worlds=(4, 2))
    assert all("axes (4 on rank 0, 2 on rank 1)" in line for line in lines)


def test_a_rank_that_does_not_come_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = _reach({}, worlds=(2,), seconds=0.1)
    assert line.startswith("1 of 2 ranks did not compare their files")


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [
        ("seed", 3, "seed"),
        ("train", {"optimizer": {"lr": 0.1}}, "train.optimizer.lr"),
        ("train", {"loss": {"label_smoothing": 0.5}}, "train.loss.label_smoothing"),
        ("strategy", {"axes": {"shard": 2}}, "strategy.axes.shard"),
    ],
)
def test_a_configuration_differs_by_its_keys(tmp_path: Path, section: str, value: object, key: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text")
    first, other = (
        facts_of(config, files=True) for config in (_config(text), _config(text, **{section: value}))
    )
    assert f"{key} (" in difference(first, other, 1)
    assert difference(first, first, 1) == ""


def test_what_belongs_to_a_machine_may_differ(tmp_path: Path) -> None:
    def facts(node: int) -> dict[str, str]:
        launch = {"nodes": 2, "node_rank": node, "threads": node + 1, "rendezvous": f"10.0.0.{node}:29500"}
        data = {"train": "text.txt", "cache": f"/local/{node}"}
        return facts_of(_config(tmp_path, launch=launch, data=data), files=False)

    assert facts(0) == facts(1)


def test_packages_and_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_bytes(b"x" * 300_000)
    assert identity([str(folders[0])]) == identity([str(folders[1])])  # wherever they lie
    before = facts_of(_config(folders[0]), files=True)
    (folders[0] / "text.txt").write_bytes(b"x" * 299_999 + b"y")
    monkeypatch.setattr(admission.importlib.metadata, "version", lambda name: "9.9")
    line = difference(before, facts_of(_config(folders[0]), files=True), 5)
    assert "files of data.train (1 files, 293.0 KiB, digest" in line and "package torch (" in line
    assert "9.9 on rank 5" in line
    # One rank of a machine looks at files.
    assert "files of" not in difference(before, facts_of(_config(folders[0]), files=False), 5)


def test_workers_of_one_command_on_one_machine_are_not_asked(tmp_path: Path) -> None:
    agree(
        HashStore(), replace(PLACE, launcher="local", local_world=2), _config(tmp_path), timedelta(seconds=1)
    )
    with pytest.raises(LaunchError, match="did not compare"):
        agree(HashStore(), replace(PLACE, launcher="local"), _config(tmp_path), timedelta(seconds=0.1))
