"""Data sets of the Hub: prepared once by the library datasets, and read as its Arrow files in every process.

`prepared` downloads before workers start, and notes in the cache of datasets which Arrow files hold a split at a
commit. `tables_of` finds them again without the network. (Without one, datasets itself takes the newest data set
in its cache, whichever commit was named.)
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config.data import DataConfig, HubData, as_hub
from hyper_parallel.errors import DataError
from hyper_parallel.hub import download
from hyper_parallel.hub.download import TIMEOUT_S, bars, one_at_a_time
from hyper_parallel.hub.hub_id import DEFAULT, HubId
from hyper_parallel.untrusted_files import read_json

_FORMAT = 1
_LARGEST = 16 * 2**20
SPLITS = {"train": ("train",), "eval": ("validation", "eval", "test")}
"""Names of the splits that `data.train` and `data.eval` mean, the first that is there."""


def named_split(splits: Collection[str], wanted: Sequence[str], *, or_only: bool = True) -> str | None:
    """The first of the wanted splits that is there; `or_only`: else the only one, whatever its name."""
    found = next((name for name in wanted if name in splits), None)
    return next(iter(splits)) if found is None and or_only and len(splits) == 1 else found


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A split at a commit."""

    files: tuple[Path, ...]
    """Arrow files with its rows, in order."""
    split: str


def prepared(config: DataConfig, say: Callable[[str], object]) -> DataConfig:
    """The section with the commit and the split of each data set of the Hub; their rows are then in the cache.

    `say`: is given a line about what is done. Raises DataError, with the mend, where one cannot be had.
    """
    changed: dict[str, Any] = {}
    for key in ("train", "eval"):
        declared = getattr(config, key)
        if declared is None:
            continue
        entries = [
            _pinned(entry, key, say) for entry in (declared if isinstance(declared, list) else [declared])
        ]
        changed[key] = entries if isinstance(declared, list) else entries[0]
    return config.model_copy(update=changed)


def tables_of(data: HubData, key: str) -> Tables:
    """The Arrow files of a data set with its commit and split. Raises DataError where they are not in the cache."""
    found = _noted(_note(data, key))
    if found is None:
        raise DataError(
            f"data.{key}: {data.hub_id.shown} is not in the cache of datasets on this machine; the command that "
            "starts the run downloads it"
        )
    return found


def _pinned(entry: str | HubData, key: str, say: Callable[[str], object]) -> str | HubData:
    data = as_hub(entry, f"data.{key}")
    if data is None:
        return entry
    _require_datasets(key)
    hub_id = data.hub_id
    with one_at_a_time(hub_id.name):
        if hub_id.commit is not None and (found := _noted(_note(data, key))) is not None:
            return _at(data, hub_id.commit, found.split)
        ref = _folder() / f"{_digest(hub_id.name, hub_id.revision or DEFAULT)}.ref"
        try:
            commit = hub_id.commit or _commit(hub_id)
        except (
            Exception
        ) as error:  # huggingface_hub raises its own, httpx's and the system's exceptions alike
            last = _last(ref)
            found = None if last is None else _noted(_note(_at(data, last, data.split), key))
            if last is None or found is None:
                raise DataError(download.explain(error, hub_id, f"data.{key}", data=True)) from error
            say(f"data.{key}: {hub_id.shown} as the cache has it ({last[:7]}): the Hub was not reached")
            return _at(data, last, found.split)
        data = _at(data, commit, data.split)
        found = _noted(_note(data, key))
        if found is None:
            say(f"data.{key}: downloading the data set {hub_id.shown} at {commit[:7]}")
            found = _load(data, hub_id, key)
        ref.write_text(commit)
        return _at(data, commit, found.split)


def _at(data: HubData, commit: str, split: str | None) -> HubData:
    return HubData(path=str(data.hub_id.at(commit)), name=data.name, split=split)


def _commit(hub_id: HubId) -> str:
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(hub_id.name, revision=hub_id.revision or DEFAULT, timeout=TIMEOUT_S).sha)


def _load(data: HubData, hub_id: HubId, key: str) -> Tables:
    """Have datasets download and prepare it, and note its Arrow files."""
    import datasets

    with bars(datasets.utils, hidden=not sys.stderr.isatty()):
        try:
            loaded = datasets.load_dataset(data.hub_id.name, data.name, revision=data.hub_id.commit)
        except Exception as error:  # the library raises its own, Arrow's and the system's exceptions alike
            raise DataError(_refusal(error, data, hub_id, key)) from error
    splits = {name: loaded[name] for name in loaded}
    chosen = _chosen(list(splits), data, key)
    table = splits[chosen]
    files = [Path(one["filename"]) for one in table.cache_files]
    rows = sum(datasets.Dataset.from_file(str(one)).num_rows for one in files)
    if rows != len(table):
        raise DataError(
            f"data.{key}: {hub_id.shown} has rows outside of Arrow files; save it with save_to_disk"
        )
    note = json.dumps({"format": _FORMAT, "split": chosen, "files": [str(one) for one in files]})
    for split in {data.split, chosen}:
        path = _note(HubData(path=data.path, name=data.name, split=split), key)
        path.with_suffix(".tmp").write_text(note)
        path.with_suffix(".tmp").replace(path)
    return Tables(files=tuple(files), split=chosen)


def _refusal(error: Exception, data: HubData, hub_id: HubId, key: str) -> str:
    text = " ".join(str(error).split())
    if "Config name is missing" in text or "BuilderConfig" in text:
        return (
            f"data.{key}: {hub_id.shown} needs one of its subsets: {text[:300]}; write {{path: {hub_id.name}, name: "
            "SUBSET}"
        )
    if "scripts are no longer supported" in text or "trust_remote_code" in text:
        return (
            f"data.{key}: {hub_id.shown} is a script, which is not run; give a data set of files (Parquet, JSON), "
            f"often {hub_id.name}@refs/convert/parquet"
        )
    if type(error).__name__ in ("DataFilesNotFoundError", "EmptyDatasetError"):
        return f"data.{key}: {hub_id.shown} has no files that datasets reads: {text[:200]}"
    return download.explain(error, hub_id, f"data.{key}", data=True)


def _chosen(splits: list[str], data: HubData, key: str) -> str:
    wanted = SPLITS[key] if data.split is None else (data.split,)
    found = named_split(splits, wanted, or_only=data.split is None)
    if found is not None:
        return found
    subset = "" if data.name is None else f", name: {data.name}"
    raise DataError(
        f"data.{key}: {data.hub_id.name} has the splits {', '.join(splits)}, none of them "
        f"{' or '.join(map(repr, wanted))}; name one: {{path: {data.hub_id.name}{subset}, split: {splits[0]}}}"
    )


def _require_datasets(key: str) -> None:
    import importlib.util

    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data.{key} names a data set of the Hub, and the library datasets is not installed; pip install "
            "'hyper-parallel[datasets]'"
        )


def _folder() -> Path:
    """Notes of this module, beside what datasets keeps."""
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hyper-parallel"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _note(data: HubData, key: str) -> Path:
    """The file that notes the tables. Without a split, `data.train` and `data.eval` mean different ones."""
    split = data.split or f"of data.{key}"
    return _folder() / f"{_digest(data.hub_id.name, data.hub_id.commit, data.name, split)}.json"


def _noted(path: Path) -> Tables | None:
    """What a note says, where its files are there."""
    try:
        found = read_json(path, _LARGEST)
        files = tuple(Path(name) for name in found["files"])
        if found["format"] != _FORMAT or not all(one.is_file() for one in files):
            return None
        return Tables(files=files, split=str(found["split"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last(ref: Path) -> str | None:
    """The commit that a branch or tag was at when it was last reached."""
    try:
        return HubId(name="a/b", revision=ref.read_text().strip()).commit
    except OSError:
        return None


def _digest(*parts: str | None) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
