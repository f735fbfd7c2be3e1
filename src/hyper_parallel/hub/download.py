"""Downloads the files of a model of the Hub into its cache, once, and pins their commit.

Only plain files in the repository's top folder are taken: JSON files, safetensors, and the tokenizer's; no pickled
weights and no code. The small files come first and the weights last, so that an interrupted download is seen. Of the
processes of a machine one downloads, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError, one_line
from hyper_parallel.hub.hub_id import DEFAULT, HubId, cache_folder, snapshot_folder
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import is_plain_name, read_json


def explain(error: BaseException, hub_id: HubId, key: str, *, bare: bool = False, data: bool = False) -> str:
    """The line for a failure to find or download `hub_id`, which `key` names. `bare`: it was written without ``hub:``,
    and could have meant a folder. `data`: it is a data set.
    """
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    what, shown = ("data set" if data else "model"), hub_id.shown
    page = f"{constants.ENDPOINT}/{'datasets/' if data else ''}{hub_id.name}"
    causes = list(_causes(error))
    command = hub_id.download_command + (" --repo-type dataset" if data else "")
    there = f"where there is a network, type: {command}"
    copied = f"{there}; the cache {constants.HF_HOME} (HF_HOME) may be copied here"
    for one in causes:
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{key}: {shown}: {full()}"
        if isinstance(one, hub.GatedRepoError):
            return (
                f"{key}: {shown} is gated: accept its terms on {page}, then log in with: hf auth login (or set "
                "HF_TOKEN)"
            )
        if isinstance(one, hub.RevisionNotFoundError):
            return (
                f"{key}: {hub_id.name} has no revision {hub_id.revision!r}; {page}/tree/main lists its branches and "
                "tags, or leave '@…' out"
            )
        if isinstance(one, hub.RepositoryNotFoundError):
            which = f"neither a folder here nor a {what}" if bare else f"no {what}"
            return (
                f"{key}: {shown} is {which} on the Hub ({constants.ENDPOINT}) that may be read; check the name, or if "
                "it is private, log in with: hf auth login"
            )
        if isinstance(one, hub.OfflineModeIsEnabled):
            folder = "no folder here, and " if bare else ""
            return (
                f"{key}: {shown} is {folder}not in the cache of the Hub, and HF_HUB_OFFLINE is set; unset it, or "
                f"{copied}"
            )
    for one in causes:
        if isinstance(one, hub.HfHubHTTPError):
            status = getattr(getattr(one, "response", None), "status_code", None)
            if status in (401, 403):
                return f"{key}: {shown}: the Hub refuses it ({status}); log in with: hf auth login (or set HF_TOKEN)"
            return f"{key}: {shown}: {constants.ENDPOINT} answers with status {status}; try again later, or {copied}"
    last = causes[-1]
    words = " ".join(f"{type(one).__name__} {one}" for one in causes)
    folder = "no folder here, and " if bare else ""
    if "Timeout" in words or "timed out" in words:
        return f"{key}: {shown} is {folder}not in the cache, and {constants.ENDPOINT} does not answer in time; {copied}"
    if isinstance(last, PermissionError):
        return (
            f"{key}: {shown}: cannot write to {last.filename}; set HF_HOME to a folder that may be written to"
        )
    if "Connect" in words or "Network" in words or "Protocol" in words or isinstance(last, ConnectionError):
        return f"{key}: {shown} is {folder}not in the cache, and {constants.ENDPOINT} cannot be reached; {copied}"
    return f"{key}: {shown} cannot be downloaded: {type(last).__name__}: {one_line(last)}; {there}"


def full(needed: int | None = None, free: int | None = None) -> str:
    """The words for a disk that is full, or will be."""
    from huggingface_hub import constants

    sizes = (
        ""
        if needed is None or free is None
        else f" ({format_bytes(needed)} needed, {format_bytes(free)} free)"
    )
    return f"the disk of {constants.HF_HUB_CACHE} is full{sizes}; free some, or set HF_HOME to a folder elsewhere"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The failure, and what it came from; the root is last."""
    found: BaseException | None = error
    seen = 0
    while found is not None and seen < 10:
        yield found
        found, seen = found.__cause__ or found.__context__, seen + 1


PROCESSOR_FILES = ("*processor_config.json",)
TOKENIZER_FILES = (
    "*tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Of a tokenizer, its chat template among them."""


TIMEOUT_S = 10.0
"""Seconds that the Hub has to answer the first request."""
INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 64 * 2**20
_SMALL = ("config.json", "generation_config.json", *PROCESSOR_FILES, *TOKENIZER_FILES)


class Wanted(Enum):
    """The files of a repository that are needed."""

    CONFIG = "config"
    """``config.json`` alone."""
    ASSETS = "assets"
    """All but the weights: config, tokenizer, processor, chat template, generation config."""
    MODEL = "model"
    """These and the weights in safetensors."""


def pinned(
    hub_id: HubId,
    wanted: Wanted,
    key: str,
    *,
    bare: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> HubId:
    """The same id with its commit, whose files are then in the cache (`fetched_folder`).

    Uses no network for a commit whose files are there. Where the Hub does not answer, a branch or tag means the commit
    that the cache has for it. `bare`: it was written without ``hub:``. `tell`: is given a line about what is done.

    Raises ConfigError, with the mend, where the files can neither be downloaded nor found.
    """
    if hub_id.commit is not None and _complete(
        snapshot_folder(hub_id.name, hub_id.commit), wanted, tokenizer=True
    ):
        return hub_id
    with one_at_a_time(hub_id.name):
        try:
            return hub_id.at(_download(hub_id, wanted, key, tell))
        except ConfigError:
            raise
        except (
            Exception
        ) as error:  # huggingface_hub raises its own, httpx's and the system's exceptions alike
            cached = _cached_commit(hub_id)
            if cached is None or not _complete(snapshot_folder(hub_id.name, cached), wanted, tokenizer=False):
                raise ConfigError(explain(error, hub_id, key, bare=bare)) from error
            if hub_id.commit is None:
                tell(f"{key}: {hub_id.shown} as the cache has it ({cached[:7]}): the Hub was not reached")
            return hub_id.at(cached)


def current_commit(hub_id: HubId, *, data: bool = False, seconds: float = 3.0) -> str | None:
    """The commit that a branch or tag is at now; None where the Hub does not say within some seconds.
    `data`: it is a data set.
    """
    from huggingface_hub import HfApi

    try:
        kind = "dataset" if data else "model"
        info = HfApi().repo_info(hub_id.name, repo_type=kind, revision=hub_id.revision, timeout=seconds)
        found = info.sha
    except Exception:  # as above; the answer is only shown
        return None
    return None if found is None else str(found)


def _download(hub_id: HubId, wanted: Wanted, key: str, tell: Callable[[str], object]) -> str:
    """Download what is missing; the commit."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(
        hub_id.name, revision=hub_id.revision or DEFAULT, timeout=TIMEOUT_S, files_metadata=True
    )
    sizes = {one.rfilename: one.size or 0 for one in found.siblings or [] if is_plain_name(one.rfilename)}
    names = [name for name in sizes if _is_wanted(name, wanted)]
    there = snapshot_folder(hub_id.name, str(found.sha))
    if wanted is not Wanted.ASSETS and "config.json" not in names:
        raise ConfigError(
            f"{key}: {hub_id.shown} has no config.json on the Hub, so it is no model of Transformers; give one that is"
        )
    weights = _weights(hub_id, sizes, key) if wanted is Wanted.MODEL else []
    missing = sum(sizes[name] for name in (*names, *weights) if not (there / name).exists())
    if missing:
        _room(hub_id, missing, key)
        tell(f"{key}: downloading {hub_id.shown} at {str(found.sha)[:7]}, {format_bytes(missing)}")
    commit = _fetch(hub_id, names, quiet=not missing)
    if wanted is not Wanted.MODEL:
        return commit
    at = hub_id.at(commit)
    if INDEX in weights:
        _fetch(at, [INDEX], quiet=True)
        shards = _shards(snapshot_folder(at.name, commit))
        if strange := next((one for one in shards if one not in sizes), None):
            raise ConfigError(
                f"{key}: {hub_id.shown}: {INDEX} names {strange!r}, which the repository does not have"
            )
        weights = shards
    _fetch(at, weights, quiet=not missing)
    return commit


def _is_wanted(name: str, wanted: Wanted) -> bool:
    if wanted is Wanted.CONFIG:
        return name == "config.json"
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SMALL)


def _weights(hub_id: HubId, sizes: Mapping[str, int], key: str) -> list[str]:
    """The index with all that may be its shards, or the one file, of files with their bytes. Raises ConfigError where
    there are none."""
    names = sorted(name for name in sizes if name.endswith(".safetensors"))
    if INDEX in sizes:
        return [INDEX, *(name for name in names if fnmatch.fnmatchcase(name, "*-of-*"))]
    if "model.safetensors" in names:
        return ["model.safetensors"]
    others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
    if names:
        return names
    only = f"only {', '.join(sorted(others)[:3])}" if others else "no weights"
    raise ConfigError(
        f"{key}: {hub_id.shown} has no safetensors on the Hub ({only}), and nothing else is loaded; give a repository "
        "or a revision with safetensors (often @refs/pr/N), or a folder that save_pretrained wrote from it"
    )


def _fetch(hub_id: HubId, names: Sequence[str], *, quiet: bool) -> str:
    """Download files by their names; the commit."""
    from huggingface_hub import snapshot_download, utils

    with bars(utils, hidden=quiet or not sys.stderr.isatty()):
        folder = snapshot_download(
            hub_id.name,
            revision=hub_id.revision or DEFAULT,
            allow_patterns=[glob.escape(name) for name in names],
        )
    return Path(folder).name


def _shards(folder: Path) -> list[str]:
    """The files that the index of a folder names. Raises ConfigError where it cannot be read."""
    try:
        found = read_json(folder / INDEX, _LARGEST_INDEX)
        names = sorted(set(found["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX}: cannot be read as an index of safetensors: {error}") from error
    if strange := next((name for name in names if not is_plain_name(name)), None):
        raise ConfigError(f"{folder / INDEX}: names {strange!r}, which is no file of its folder")
    return names


def _complete(folder: Path, wanted: Wanted, *, tokenizer: bool) -> bool:
    """Whether a folder of the cache has the files. `tokenizer`: also that of a whole model."""
    if wanted is Wanted.ASSETS:
        return (folder / "tokenizer.json").exists()
    if not (folder / "config.json").exists():
        return False
    if wanted is Wanted.CONFIG:
        return True
    if tokenizer and not (folder / "tokenizer.json").exists():
        return False
    if (folder / INDEX).exists():
        try:
            return all((folder / name).exists() for name in _shards(folder))
        except ConfigError:
            return False
    return any(folder.glob("*.safetensors"))


def _cached_commit(hub_id: HubId) -> str | None:
    """The commit that the cache has for a revision."""
    if hub_id.commit is not None:
        return hub_id.commit
    try:
        found = (cache_folder(hub_id.name) / "refs" / (hub_id.revision or DEFAULT)).read_text().strip()
    except OSError:
        return None
    return hub_id.at(found).commit


def _room(hub_id: HubId, needed: int, key: str) -> None:
    """Raise ConfigError where the disk of the cache has too little room."""
    there = cache_folder(hub_id.name)
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(f"{key}: {hub_id.shown}: {full(needed, free)}")


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Of the processes that use this cache, one is inside. In a cache that cannot be written to, all are."""
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"hyper-parallel--{name.replace('/', '--')}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(lock))
        yield


@contextlib.contextmanager
def bars(utils: Any, *, hidden: bool) -> Iterator[None]:
    """Inside, a library of Hugging Face shows no progress bars if they are `hidden`. `utils`: that module of it."""
    if not hidden or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
