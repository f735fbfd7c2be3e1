"""Ids of the Hub in a run: downloaded before anything heavy starts, and pinned to their commits in what runs.

A run that goes on takes the commits that it began with, which its folder's ``run.yaml`` has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hyper_parallel.errors import ConfigError
from hyper_parallel.hub.hub_id import HubId, fetched_folder, parse, parse_explicit

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig
    from hyper_parallel.config.data import DataConfig, HubData
    from hyper_parallel.config.generate import GenerationRun
    from hyper_parallel.config.rl import RLConfig
    from hyper_parallel.hub.download import Wanted

Run = TypeVar("Run", "RunConfig", "RLConfig", "GenerationRun")
RUN_FILE = "run.yaml"


def say(line: str) -> None:
    """A line on standard error, by the first of a machine's processes."""
    from hyper_parallel.launch.external_launcher import speaks

    if speaks(os.environ):
        click.echo(f"hyper-parallel: {line}", err=True)


def fetched(run: RunConfig, wanted: Wanted) -> RunConfig:
    """The run with its model's and tokenizer's ids pinned; their files are in the cache. `wanted`: of the model.

    Raises ConfigError as `hub.pinned` does, and where a run goes on with other commits than it began with.
    """
    from hyper_parallel.hub.download import Wanted

    recorded = _recorded(Path(run.out).expanduser()) if wanted is Wanted.MODEL else {}
    run = _replaced(run, ("model", "path"), wanted, recorded)
    if wanted is not Wanted.CONFIG:
        from hyper_parallel.data.hub_data import prepared

        run = _replaced(run, ("data", "tokenizer", "path"), Wanted.ASSETS, recorded)
        run = run.model_copy(update={"data": prepared(_data_as_begun(run.data, recorded), say)})
    return run


def fetched_rl(run: RLConfig) -> RLConfig:
    """As `fetched`, with the reward model."""
    from hyper_parallel.hub.download import Wanted

    recorded = _recorded(Path(run.out).expanduser())
    run = _replaced(run, ("model", "path"), Wanted.MODEL, recorded)
    return _replaced(run, ("roles", "reward", "model"), Wanted.MODEL, recorded)


def with_config(run: GenerationRun) -> GenerationRun:
    """A prediction of generation whose model's id is pinned; its config is in the cache."""
    from hyper_parallel.hub.download import Wanted

    return _replaced(run, ("model", "path"), Wanted.CONFIG, {})


def fetched_model(given: str, wanted: Wanted, key: str) -> Path | None:
    """The folder of a model that an argument names by an id; None where it is no id."""
    from hyper_parallel.hub.download import pinned

    found = parse(given, key)
    if found is None:
        return None
    return fetched_folder(pinned(found, wanted, key, bare=parse_explicit(given, key) is None, tell=say))


def _replaced(run: Run, where: tuple[str, ...], wanted: Wanted, recorded: dict[str, Any]) -> Run:
    """The run with the id at a key pinned."""
    from hyper_parallel.hub.download import pinned

    key = ".".join(where)
    given: Any = run
    for name in where:
        given = None if given is None else getattr(given, name)
    found = None if given is None else parse(given, key)
    if found is None:
        return run
    found = _as_begun(found, key, recorded)
    bare = parse_explicit(given, key) is None
    changed: Run = _with(run, where, str(pinned(found, wanted, key, bare=bare, tell=say)))
    return changed


def _data_as_begun(data: DataConfig, recorded: dict[str, Any]) -> DataConfig:
    """The section with the commits that the run began with, of the data sets that it names."""
    changed: dict[str, Any] = {}
    for key in ("train", "eval"):
        declared, before = getattr(data, key), (recorded.get("data") or {}).get(key)
        if declared is None:
            continue
        earlier = _listed(before)
        entries = [_entry_as_begun(one, f"data.{key}", earlier) for one in _listed(declared)]
        changed[key] = entries if isinstance(declared, list) else entries[0]
    return data.model_copy(update=changed)


def _listed(declared: Any) -> list[Any]:
    return declared if isinstance(declared, list) else [declared]


def _entry_as_begun(entry: str | HubData, key: str, earlier: list[Any]) -> str | HubData:
    from hyper_parallel.config.data import HubData, as_hub
    from hyper_parallel.hub.download import current_commit

    hub_id = as_hub(entry, key)
    if hub_id is None or hub_id.hub_id.commit is not None:
        return entry
    for one in earlier:
        if not isinstance(one, dict) or one.get("name") != hub_id.name:
            continue
        begun, split = parse_explicit(str(one.get("path")), key), one.get("split")
        if begun is None or begun.name != hub_id.hub_id.name or hub_id.split not in (None, split):
            continue
        now = current_commit(hub_id.hub_id, data=True)
        if now not in (None, begun.commit):
            say(
                f"{key}: {hub_id.hub_id.shown} is now at {str(now)[:12]}; the run goes on with "
                f"{str(begun.commit)[:12]}, with which it began (another 'out' begins with the new one)"
            )
        return HubData(path=str(begun), name=hub_id.name, split=split)
    return entry


def _with(section: Any, where: tuple[str, ...], value: Any) -> Any:
    name, *rest = where
    inner = _with(getattr(section, name), tuple(rest), value) if rest else value
    return section.model_copy(update={name: inner})


def _as_begun(hub_id: HubId, key: str, recorded: dict[str, Any]) -> HubId:
    """The id with the commit that the run began with, where it goes on with the same repository."""
    from hyper_parallel.hub.download import current_commit

    before: Any = recorded
    for name in key.split("."):
        before = before.get(name) if isinstance(before, dict) else None
    begun = parse_explicit(before, key) if isinstance(before, str) else None
    if begun is None or begun.commit is None or begun.name != hub_id.name or begun.commit == hub_id.commit:
        return hub_id
    if hub_id.commit is not None:
        raise ConfigError(
            f"{key}: is commit {hub_id.commit[:12]} of {hub_id.name}, and the run in 'out' began with "
            f"{begun.commit[:12]}; write {begun}, or {hub_id.name}, to go on, or name another 'out' to begin anew"
        )
    now = current_commit(hub_id)
    if now not in (None, begun.commit):
        say(
            f"{key}: {hub_id.shown} is now at {str(now)[:12]}; the run goes on with {begun.commit[:12]}, with which it "
            "began (another 'out' begins with the new one)"
        )
    return begun


def _recorded(out: Path) -> dict[str, Any]:
    """The content of `run.yaml` of a run with checkpoints; empty where there is none."""
    from hyper_parallel.config import yaml12
    from hyper_parallel.config.load import LARGEST
    from hyper_parallel.untrusted_files import open_regular, read_bytes

    if next((out / "checkpoints").glob("step-*"), None) is None:
        return {}
    try:
        found = yaml12.parse(read_bytes(open_regular(out / RUN_FILE), LARGEST).decode(), str(out / RUN_FILE))
    except (OSError, ValueError, ConfigError):
        return {}
    return found if isinstance(found, dict) else {}
