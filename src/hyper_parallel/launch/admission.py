"""Admission of workers before the process group is made: the same token, and the same run on every rank.

Tokens are proved by mutual challenge and response. The rendezvous store accepts any connection. With `launch.token` K
(or the variable `HYPER_PARALLEL_TOKEN`), H = HMAC-SHA256 and random 256-bit numbers n₀ of rank 0 and nᵣ of each other
rank:

    rank 0 → all     n₀
    rank r → rank 0  nᵣ, H(K, "worker" r world n₀ nᵣ)
    rank 0 → rank r  H(K, "accepted" r world n₀ nᵣ)

Rank 0 begins only when every rank has proved that it knows K, every rank only when rank 0 has. After that all keys of
the store begin with H(K, "keys" n₀). So a process without K, of another job or of anybody who can reach the port,
cannot join the workers or guess the names of their keys. This is not encryption: an eavesdropper sees those names, and
PyTorch's store and the connections between workers are not authenticated (SECURITY.md).
"""

from __future__ import annotations

import glob
import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel._version import __version__
from hyper_parallel.config import LaunchConfig
from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import FollowsError, LaunchError
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import open_regular, printable

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

VARIABLE = "HYPER_PARALLEL_TOKEN"
"""The environment variable for the token, if it should not be in a file."""
LEAST = 16
"""Minimum number of characters of a token."""
_OPEN = "no token"


def token_of(launch: LaunchConfig, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """This process's token, if it has one. Raises LaunchError if the token is too short."""
    token = launch.token or environ.get(VARIABLE) or None
    if token is not None and len(token) < LEAST:
        raise LaunchError(
            f"{VARIABLE} has {len(token)} characters and needs {LEAST}; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return None if token is None else token.encode()


def admitted(
    store: Store, rank: int, world: int, token: bytes | None, timeout: timedelta, attempt: str = "0"
) -> Store:
    """The store for workers with the token, after all of them have proved that they have it.

    Without a token it is `store` itself, once it is known that rank 0 has none either. `attempt` identifies one of
    several starts that share a store. Raises LaunchError on the refused rank and on rank 0, with the rank.
    """
    if world == 1:
        return store
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    place = f"hyper_parallel/admission/{attempt}"
    if rank == 0:
        challenge = _OPEN if token is None else secrets.token_hex(32)
        store.set(f"{place}/challenge", challenge)
        if token is not None:
            _examine(store, place, world, token, challenge, timeout)
    else:
        challenge = _wait(store, f"{place}/challenge", timeout, "rank 0 did not say whether it has a token")
        if (challenge == _OPEN) != (token is None):
            has, has_not = ("this one", "rank 0") if token is not None else ("rank 0", "this one")
            raise LaunchError(
                f"rank {rank}: {has} was given a launch.token and {has_not} was not; give all machines the same"
            )
        if token is not None:
            _prove(store, place, rank, world, token, challenge, timeout)
    if token is None:
        return store
    return PrefixStore(_mac(token, "keys", challenge)[:32], store)


def _examine(store: Store, place: str, world: int, token: bytes, challenge: str, timeout: timedelta) -> None:
    for rank in range(1, world):
        answer = _wait(
            store, f"{place}/proof/{rank}", timeout, f"rank {rank} did not prove that it has the token"
        )
        nonce, _, proof = answer.partition(" ")
        who = f"{rank} {world}"
        if not _same(proof, _mac(token, "worker", who, challenge, nonce)):
            store.set(f"{place}/verdict/{rank}", "refused")
            raise LaunchError(
                f"rank {rank} does not have the launch.token of rank 0, or is no worker of this run; give all "
                "machines the same token"
            )
        store.set(f"{place}/verdict/{rank}", _mac(token, "accepted", who, challenge, nonce))


def _prove(
    store: Store, place: str, rank: int, world: int, token: bytes, challenge: str, timeout: timedelta
) -> None:
    nonce, who = secrets.token_hex(32), f"{rank} {world}"
    store.set(f"{place}/proof/{rank}", nonce + " " + _mac(token, "worker", who, challenge, nonce))
    verdict = _wait(store, f"{place}/verdict/{rank}", timeout, "rank 0 did not prove that it has the token")
    if not _same(verdict, _mac(token, "accepted", who, challenge, nonce)):
        raise LaunchError(
            f"rank {rank} and rank 0 do not have the same launch.token; give all machines the same token"
        )


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str, mend: str = "") -> str:
    """The text of a key, once it is there. Raises LaunchError, which begins with `otherwise` and ends with `mend`."""
    from torch.distributed import DistError

    begun = time.monotonic()
    try:
        store.wait([key], timeout)
        return bytes(store.get(key)).decode(errors="replace")
    except (DistError, RuntimeError) as error:
        if time.monotonic() - begun < timeout.total_seconds():
            raise FollowsError("rank 0 has left, and its store with it") from error
        raise LaunchError(f"{otherwise} within {timeout.total_seconds():.0f} s{mend}") from error


def _same(one: str, other: str) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(one.encode(), other.encode())


def _mac(token: bytes, *parts: str) -> str:
    """HMAC of parts, each with its length, so that no two lists of parts are one text."""
    encoded = [part.encode() for part in parts]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
    return hmac.new(token, text, hashlib.sha256).hexdigest()


# Agreement of the ranks at admission: every rank runs the same configuration, packages and files as rank 0.
#
# Under a launcher each machine reads its own run file, its own packages and its own data. Ranks that differ would train
# together without a word, since collectives only see shapes. So before the process group is made, rank 0 publishes its
# facts in the store, every other rank compares its own with them, and the first difference ends all ranks with one
# line:
#
#     rank 0 → all      facts of rank 0 (key → value)
#     rank r → rank 0   one more rank agrees, or the difference
#     rank 0 → all      all agree, or the difference
#
# A rank that has another idea of the number of ranks is found too: nobody waits for a rank by its number. Files are
# compared by name, size and their first and last bytes, once for each machine; a changed byte between is not seen here
# (the digest of all bytes is the key of the cache of tokens).

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
                verdict = bytes(self._store.get(f"{self._place}/difference")).decode(errors="replace")
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
        return _wait(
            self._store,
            f"{self._place}/{key}",
            timedelta(seconds=self._timeout),
            "rank 0 did not compare files",
            "; see whether all ranks run the same hyper-parallel",
        )

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
    """Facts that decide a run's results on this rank. `files`: look at the files that the configuration names, too."""
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
