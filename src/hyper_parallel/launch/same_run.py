"""Agreement of the ranks at admission: every rank runs the same configuration, packages and files as rank 0.

Under a launcher each machine reads its own run file, its own packages and its own data. Ranks that differ would train
together without a word, since collectives only see shapes. So before the process group is made, rank 0 publishes its
facts in the store, every other rank compares its own with them, and the first difference ends all ranks with one line:

    rank 0 → all      facts of rank 0 (key → value)
    rank r → rank 0   one more rank agrees, or the difference
    rank 0 → all      all agree, or the difference

A rank that has another idea of the number of ranks is found too: nobody waits for a rank by its number. Files are
compared by name, size and their first and last bytes, once for each machine; a changed byte between is not seen here
(the digest of all bytes is the key of the cache of tokens).
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel._version import __version__
from hyper_parallel.config.launched import Launched
from hyper_parallel.errors import FollowsError, LaunchError
from hyper_parallel.launch.launcher_env import WorkerPlace
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted import open_regular, printable

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Facts = dict[str, str]
"""Key to value as text: dotted keys of the configuration, `package NAME`, `files of KEY`."""

OF_A_MACHINE = frozenset(
    {
        "launch.node_rank",
        "launch.rendezvous",
        "launch.threads",
        "launch.token",
        "data.cache",
        "strategy.memory.flash",
    }
)
"""Keys that may differ between machines: results do not depend on them."""
_FILE_KEYS = frozenset({"path", "train", "eval", "chat_template", "prompts", "source", "folder"})
"""Last parts of keys that name files to read."""
_PACKAGES = ("torch", "transformers")
_EDGE = 1 << 16
"""Bytes at each end of a file that are compared."""
_SHOWN = 6
"""Differing keys in a message."""
_WIDTH = 60
"""Characters of a value in a message."""
_POLL_S = 0.02
_SETTLE_S = 2.0
"""Seconds for which rank 0, whose process may serve the store, waits until all have read a difference."""


def agree(store: Store, place: WorkerPlace, config: Launched, timeout: timedelta, attempt: str = "0") -> None:
    """Return once all ranks run the same. Raise LaunchError on all of them otherwise, with the keys and both values.

    `attempt` is as of `membership.admitted`. Raises LaunchError too if the others do not come within `timeout`.
    """
    if place.world == 1 or (place.launcher == "local" and place.one_machine):
        return  # one command has read one file for all
    facts = facts_of(config, files=place.local_rank == 0 and not place.one_machine)
    Agreement(store, place.rank, place.world, timeout, attempt).reach(facts)


class Agreement:
    """The exchange of one rank's facts with rank 0's."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta, attempt: str = "0") -> None:
        self._store, self._rank, self._world = store, rank, world
        self._timeout = timeout.total_seconds()
        self._place = f"hyper_parallel/same_run/{attempt}"

    def reach(self, facts: Facts) -> None:
        """Raise LaunchError with the first difference that a rank found from rank 0's `facts`."""
        verdict = self._lead(facts) if self._rank == 0 else self._follow(facts)
        if verdict:
            raise LaunchError(verdict)

    def _lead(self, facts: Facts) -> str:
        self._store.set(f"{self._place}/facts", json.dumps(facts))
        deadline = time.monotonic() + self._timeout
        while self._count("agreed") < self._world - 1:
            if self._store.check([f"{self._place}/difference"]):
                verdict = self._text("difference")
                self._store.set(f"{self._place}/verdict", verdict)
                until = time.monotonic() + _SETTLE_S
                while self._count("read") < self._world - 1 and time.monotonic() < until:
                    time.sleep(_POLL_S)
                return verdict
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._world - 1 - self._count('agreed')} of {self._world} ranks did not compare their files "
                    f"with rank 0's within {self._timeout:.0f} s; see whether all run the same hyper-parallel"
                )
            time.sleep(_POLL_S)
        self._store.set(f"{self._place}/verdict", "")
        return ""

    def _follow(self, facts: Facts) -> str:
        differing = difference(json.loads(self._awaited("facts")), facts, self._rank)
        if differing:
            # The first one stands; all ranks show the same.
            self._store.compare_set(f"{self._place}/difference", "", differing)
        else:
            self._store.add(f"{self._place}/agreed", 1)
        verdict = self._awaited("verdict")
        self._store.add(f"{self._place}/read", 1)
        return verdict

    def _awaited(self, key: str) -> str:
        from torch.distributed import DistError

        begun = time.monotonic()
        try:
            self._store.wait([f"{self._place}/{key}"], timedelta(seconds=self._timeout))
            return self._text(key)
        except (DistError, RuntimeError) as error:
            if time.monotonic() - begun < self._timeout:
                raise FollowsError("rank 0 has left, and its store with it") from error
            raise LaunchError(
                f"rank 0 did not compare files within {self._timeout:.0f} s; see whether all ranks run the same "
                "hyper-parallel"
            ) from error

    def _text(self, key: str) -> str:
        return bytes(self._store.get(f"{self._place}/{key}")).decode(errors="replace")

    def _count(self, key: str) -> int:
        return int(self._store.add(f"{self._place}/{key}", 0))


def difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    """One line with the keys that differ and both values; empty if none does.

    Files are compared where both have looked at them: one rank of a machine does.
    """
    files = [key for key in (first.keys() | other.keys()) if key.startswith("files of ")]
    apart = {key for key in files if key not in first or key not in other}
    keys = sorted(key for key in (first.keys() | other.keys()) - apart if first.get(key) != other.get(key))
    if not keys:
        return ""
    named = [
        f"{key} ({_short(first.get(key))} on rank 0, {_short(other.get(key))} on rank {rank})"
        for key in keys[:_SHOWN]
    ]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (
        f"rank {rank} does not run what rank 0 runs: {', '.join(named)}{more}; give all machines the same run file, "
        "packages and data"
    )


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    text = printable(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def facts_of(config: Launched, *, files: bool) -> Facts:
    """What decides a run's results on this rank. `files`: look at the files that the configuration names, too."""
    values = dict(_leaves(json.loads(config.model_dump_json(context=None))))
    if not config.keeps_logs:
        values.pop("out", None)  # a folder of this process's own
    facts = {key: json.dumps(value) for key, value in values.items() if not _of_a_machine(key)}
    facts["package python"] = platform.python_version()
    facts["package hyper-parallel"] = __version__
    for name in _PACKAGES:
        facts[f"package {name}"] = importlib.metadata.version(name)
    if files:
        for key, value in values.items():
            entries = [
                entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, str)
            ]
            if key.rpartition(".")[2] in _FILE_KEYS and not _of_a_machine(key) and entries:
                facts[f"files of {key}"] = identity(entries)
    return facts


def _of_a_machine(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in OF_A_MACHINE)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; a list is a value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def identity(entries: list[str]) -> str:
    """The number, the bytes and a digest of the files that paths, folders or globs name, wherever they lie."""
    digest, count, total = hashlib.blake2b(digest_size=6), 0, 0
    for entry in entries:
        for name, path in _files(Path(entry).expanduser()):
            try:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    edges = file.read(_EDGE)
                    if size > 2 * _EDGE:
                        file.seek(size - _EDGE)
                    edges += file.read(_EDGE)
            except OSError as error:
                return f"{name}: {error.strerror}"
            digest.update(json.dumps([name, size]).encode() + edges)
            count, total = count + 1, total + size
    return f"{count} files, {format_bytes(total)}, digest {digest.hexdigest()}"


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Files below a path with their names in it, sorted, without hidden ones and compiled code."""
    if not path.is_dir():
        found = [path] if path.exists() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        yield from ((file.name, file) for file in found if file.is_file())
        return
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(name for name in names if not name.startswith(".")):
            file = Path(parent, name)
            yield str(file.relative_to(path)), file
