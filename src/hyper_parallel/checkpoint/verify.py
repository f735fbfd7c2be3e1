"""Finds the newest checkpoint that passes verification and is healthy: in a folder, or in what a user names."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.checkpoint import file_format
from hyper_parallel.checkpoint.durable import explain, publish
from hyper_parallel.checkpoint.file_format import LARGEST, seal, unseal
from hyper_parallel.checkpoint.rank_agreement import Alone, Ranks, agree, ranks_of
from hyper_parallel.errors import CheckpointError
from hyper_parallel.untrusted_files import open_within, printable, read_bytes

Skipped = tuple[tuple[Path, str], ...]
"""Checkpoints that were passed over, each with the reason in words."""
_THREADS = 4
"""Number of files read concurrently; hashing and reading both release the interpreter's lock."""


@dataclass(frozen=True)
class Found:
    """The newest verified checkpoint, and the newer ones that failed, each with the reason in words."""

    step: int
    path: Path
    skipped: Skipped = ()


def newest(folder: str | os.PathLike[str], group: dist.ProcessGroup | Ranks | None = None) -> Found | None:
    """The newest checkpoint in `folder` that verifies byte by byte and is not marked as ruined; None if there is none
    at all.

    Reads every byte of the candidates, newest first, until one is good. With `group` all its ranks call this
    together: they divide the files among them, and all get the same answer. Without it, this process reads them alone.

    Raises CheckpointError if there are checkpoints but none is good (a silent fresh start would be worse), or if the
    folder cannot be read.
    """
    ranks = Alone() if group is None else ranks_of(group, *_size_of(group))
    root = Path(folder).absolute()

    def reason(path: Path) -> str | None:
        return damage_on_ranks(path, ranks, reason_to_pass_over(path) if ranks.rank == 0 else None)

    path, skipped = first_good([root / name for name in _listed(root, ranks)], reason)
    if path is not None:
        return Found(_step_of(path.name), path, skipped)
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {root} can be loaded ({words_of(skipped)}); restore one from a copy, move them away to "
            "start from the beginning, or take one that is whole all the same with checkpoint.resume_from"
        )
    return None


def of_step(
    folder: str | os.PathLike[str], step: int, group: dist.ProcessGroup | Ranks | None = None
) -> Found:
    """The newest checkpoint of this step that verifies byte by byte, whatever its health. Called like `newest`.

    Raises CheckpointError if there is none, with the available steps, or if the folder cannot be read.
    """
    ranks = Alone() if group is None else ranks_of(group, *_size_of(group))
    root = Path(folder).absolute()
    there = _listed(root, ranks)
    candidates = [root / name for name in there if _step_of(name) == step]
    path, skipped = first_good(candidates, lambda path: damage_on_ranks(path, ranks))
    if path is not None:
        return Found(step, path, skipped)
    if skipped:
        raise CheckpointError(
            f"no checkpoint of step {step} in {root} can be loaded: {skipped[0][1]}; choose another step"
        )
    steps = ", ".join(str(_step_of(name)) for name in there) or "none"
    raise CheckpointError(f"{root} has no checkpoint of step {step}; there are those of {steps}")


def reason_to_pass_over(path: Path) -> str | None:
    """Why a checkpoint is marked as ruined (`health`), in words; None if it is not, or if its marker is damaged (see
    `damage`).
    """
    try:
        return unhealthy(path, read_marker(path))
    except CheckpointError:
        return None


def _listed(root: Path, ranks: Ranks) -> list[str]:
    """The committed checkpoints in a folder by their names, newest first, as rank 0 sees them."""
    error, listing = None, "[]"
    if ranks.rank == 0:
        try:
            listing = json.dumps([str(name) for name in file_format.committed(root)])
        except OSError as problem:
            error = explain(problem, root, "read")
    found: list[str] = json.loads(agree(ranks, error, listing))
    return found


def _step_of(name: str) -> int:
    return int(name.split("-")[1])


def first_good(paths: Iterable[Path], reason: Callable[[Path], str | None]) -> tuple[Path | None, Skipped]:
    """The first of some checkpoints that no `reason` speaks against, and those before it."""
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        if (why := reason(path)) is None:
            return path, tuple(skipped)
        skipped.append((path, why))
    return None, tuple(skipped)


def words_of(skipped: Skipped) -> str:
    """The names and reasons, for a message."""
    return "; ".join(f"{path.name}: {reason}" for path, reason in skipped)


def damage_on_ranks(path: Path, ranks: Ranks, known: str | None = None) -> str | None:
    """Why a checkpoint is rejected, `known` or found in one rank's share of the bytes; the same on every rank."""
    reasons = ranks.gather(known or "")
    if not any(reasons):
        reasons = ranks.gather(damage(path, ranks.rank, ranks.world) or "")
    return next(filter(None, reasons), None)


def damage(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """The damage to a checkpoint, in words, or None if every byte is as written.

    The files are divided among `shares` processes; all read the marker.
    """
    try:
        marker = read_marker(path)
    except CheckpointError as error:
        return str(error)
    if marker["step"] != _step_of(path.name):
        return f"{file_format.COMMIT}: is of step {marker['step']}"
    # Large files first, so that the shares come out even.
    files = sorted(marker["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))[share::shares]

    def check(item: tuple[str, dict[str, Any]]) -> str | None:
        file, written = item
        return file_damage(path, file, written)

    with ThreadPoolExecutor(_THREADS) as pool:
        return next(filter(None, pool.map(check, files)), None)


def read_marker(path: Path) -> dict[str, Any]:
    """The verified content of ``commit.json``. Raises CheckpointError with the reason, without the path."""
    try:
        marker = unseal(read_bytes(open_within(path, file_format.COMMIT), LARGEST))
    except FileNotFoundError as error:
        raise CheckpointError("no commit marker") from error
    except OSError as error:
        raise CheckpointError(f"{file_format.COMMIT}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file_format.COMMIT}: {error}") from error
    if marker.get("version") != file_format.VERSION:
        raise CheckpointError(
            f"{file_format.COMMIT}: format version {marker.get('version')}, this program reads version "
            f"{file_format.VERSION}; "
            "update it"
        )
    try:
        file_format.marker(marker)
    except ValueError as error:
        raise CheckpointError(f"{file_format.COMMIT}: {error}") from error
    return marker


def read_file(path: Path, file: str, marker: dict[str, Any]) -> bytes:
    """The verified bytes of one small file of a checkpoint. Raises CheckpointError."""
    written = marker["files"][file]
    try:
        data = read_bytes(open_within(path, file), written["bytes"])
    except OSError as error:
        raise CheckpointError(f"{path}: {file}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != written["sha256"]:
        raise CheckpointError(f"{path}: {file}: sha256 differs")
    return data


def file_damage(path: Path, file: str, written: dict[str, Any]) -> str | None:
    """The damage to one file that was written with `bytes` and `sha256`; `file`: its name in the folder `path`."""
    try:
        with open_within(path, file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < written["bytes"]:
                return f"{file}: truncated: {size} of {written['bytes']} bytes"
            if size > written["bytes"]:
                return f"{file}: {size} bytes instead of {written['bytes']}"
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{file}: missing"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    return None if digest == written["sha256"] else f"{file}: sha256 differs"


def _size_of(group: dist.ProcessGroup | Ranks) -> tuple[int, int]:
    if isinstance(group, Ranks):
        return group.world, group.rank
    return dist.get_world_size(group), dist.get_rank(group)


# Checkpoint health: whether the saved weights are finite and sensible enough to resume from.
#
# Three records mark a checkpoint as ruined: the commit marker, if a tensor has elements that no step can compute with
# (`unusable` in the ranks' indexes); the run's state, under ``health.ruined``; and ``verdict.json``, which the run adds
# later, since only the step after a save shows whether the saved weights are healthy. The verdict is sealed like the
# marker but separate from it. A ruined checkpoint can still be loaded by naming it.

VERDICT = "verdict.json"
LARGEST_WEIGHT = torch.finfo(torch.float32).max ** 0.5
"""1.8e19: the square of a larger weight is infinite in every dtype that steps compute in, and so is their norm."""
LARGEST_FINITE = torch.finfo(torch.float64).max
_SHOWN = 3
_LARGEST = 2**20


def usable(values: torch.Tensor, largest: float) -> bool:
    """Whether all elements are finite and none is larger in magnitude than `largest`."""
    # A comparison with NaN is false.
    return values.numel() == 0 or bool(values.abs().amax().item() <= largest)


def unusable(tensors: Sequence[str]) -> str:
    """A message that these tensors have elements that are not `usable`."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f"not finite, or beyond what a step can compute with: {', '.join(tensors[:_SHOWN])}{more}"


def unhealthy(path: Path, marker: Mapping[str, Any]) -> str | None:
    """Why a checkpoint is ruined, in words; None if nothing marks it as ruined."""
    names = marker.get("unusable")
    if isinstance(names, list) and names:
        return f"ruined: {unusable([printable(str(name)) for name in names])}"
    health = marker["state"].get("health")
    if isinstance(health, Mapping) and health.get("ruined"):
        return printable(f"ruined: {health['ruined']}")
    try:
        return printable(str(unseal(read_bytes(open_within(path, VERDICT), _LARGEST))["why"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{VERDICT}: cannot be read: {error.strerror}"
    except (ValueError, KeyError) as error:
        return f"{VERDICT}: {error}"


def pass_over(path: Path, why: str) -> None:
    """Mark a committed checkpoint as ruined, so that readers skip it. Raises OSError."""
    publish(path / VERDICT, seal({"why": why}))


def find(folder: Path, tell: Callable[[str], object]) -> Path:
    """The folder itself if it is a checkpoint, else the newest intact checkpoint in it: in a run's folder, its
    `checkpoints` folder, or that of a Trainer's run. `tell` is given a line for each that is passed over.

    Raises CheckpointError if there is none.
    """
    if folder.name.startswith("step-"):
        return folder
    within = folder / "checkpoints"
    found = newest(within if within.is_dir() else folder)
    for one in [] if found is not None else _of_a_trainer(folder):
        try:
            found = newest(one)
        except CheckpointError as error:
            tell(f"passed over {one}: {error}")
        if found is not None:
            break
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give a run's folder or that of one checkpoint")
    for path, reason in found.skipped:
        tell(f"passed over {path}: {reason}")
    return found.path


def _of_a_trainer(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` in a folder, newest first."""
    found = [(re.fullmatch(r"checkpoint-([0-9]+)", path.name), path) for path in folder.iterdir()]
    return [
        path for _, path in sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
    ]
