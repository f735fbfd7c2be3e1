"""Ids of the Hub: which texts are ids, and which folder of the cache holds the files of one.

- ``hub:org/name`` and ``hub:org/name@revision`` always mean the Hub.
- ``org/name`` means the Hub where neither ``org/name`` nor the folder ``org`` exists here. An existing folder wins, and
  a misspelt name in an existing folder (``runs/quickstrat``) is not looked for on the Hub.
- Everything else is a path.

Once its files are there, an id is written with its commit: ``hub:org/name@<40 hexadecimal digits>``. Such an id names
one folder of the cache, which every worker finds without the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.errors import ConfigError

PREFIX = "hub:"
DEFAULT = "main"
"""The revision of an id that names none."""
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
_FORM = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_][\w./+-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = (".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".parquet")
_LONGEST = 96


@dataclass(frozen=True, kw_only=True)
class HubId:
    """A repository of the Hub, at a revision."""

    name: str
    """``org/name``."""
    revision: str | None = None
    """A branch, a tag or a commit; None: the default branch."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.shown}"

    @property
    def shown(self) -> str:
        """As a user writes it."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The revision, where it is a commit, which never changes."""
        return self.revision if self.revision is not None and _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> HubId:
        """The same repository at a commit."""
        return HubId(name=self.name, revision=commit)

    @property
    def download_command(self) -> str:
        """The command that downloads it on a machine with a network."""
        return f"hf download {self.name}" + ("" if self.revision is None else f" --revision {self.revision}")


def parse(text: str, key: str) -> HubId | None:
    """The id that a text means (see the module), or None where it means a path. `key` names the text in messages.

    Raises ConfigError for ``hub:`` before something else than an id.
    """
    if text.startswith(PREFIX):
        return parse_explicit(text, key)
    found = _form(text)
    path = Path(text)
    if found is None or path.exists() or path.is_symlink() or path.parent.is_dir():
        return None
    return found


def parse_explicit(text: str, key: str) -> HubId | None:
    """The id of ``hub:org/name``, or None without this prefix. Raises ConfigError as `parse` does."""
    if not text.startswith(PREFIX):
        return None
    found = _form(text.removeprefix(PREFIX))
    if found is None:
        raise ConfigError(
            f"{key}: {text} is no id of the Hub; write {PREFIX}org/name, or {PREFIX}org/name@revision for a branch, a "
            "tag or a commit"
        )
    return found


def reading(text: str, what: str = "model") -> str:
    """For the message that a path does not exist: how to mean the Hub, where the text has the form of an id."""
    return f"; a {what} of the Hub is written {PREFIX}{text} here" if _form(text) is not None else ""


def _form(text: str) -> HubId | None:
    match = _FORM.fullmatch(text)
    if match is None or match[1].lower().endswith((*_FILES, ".git")) or len(match[1]) > _LONGEST:
        return None
    if "--" in match[1] or ".." in (match[2] or "") or match[1].endswith((".", "-")):
        return None
    return HubId(name=match[1], revision=match[2])


def local_folder(path: str | None) -> str | None:
    """The folder of a path, or of an id with its commit, whose files `pinned` has downloaded. Uses no network.

    Raises ConfigError for an id without a commit.
    """
    if path is None or not path.startswith(PREFIX):
        return path
    found = parse_explicit(path, "path")
    assert found is not None
    if found.commit is None:
        raise ConfigError(
            f"{path}: nothing has downloaded it; the commands of hyper-parallel do, and in Python "
            f"str(hyper_parallel.hub.pinned(...)) does, or {found.download_command} and its folder"
        )
    return str(snapshot_folder(found.name, found.commit))


def fetched_folder(found: HubId) -> Path:
    """The folder of a model id with its commit."""
    assert found.commit is not None
    return snapshot_folder(found.name, found.commit)


def cache_folder(name: str) -> Path:
    """The folder of a model's repository in the Hub's cache (HF_HOME), which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def snapshot_folder(name: str, commit: str) -> Path:
    """The folder of a model's files at a commit, which need not exist."""
    return cache_folder(name) / "snapshots" / commit
