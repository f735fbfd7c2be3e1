"""Verified checkpoints inside a Trainer's `checkpoint-N`, and selection of complete ones.

    checkpoint-N/
      step-0000000N/       ours (docs/checkpoints.md): ``model.*``, ``optimizer.*``, digests, committed last
      scheduler.pt …       the Trainer's small files; ours has the digest of this one
      trainer_state.json   written last, by the Trainer
      verified.json        ours: size and digest of every file beside `step-…` (`manifest`)

Of a model with adapters the trained parameters are saved, and the adapters' own; the others are the base model's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import Piece, Ranks, Writer, file_format, verify
from hyper_parallel.checkpoint.adapters import MODEL
from hyper_parallel.checkpoint.durable import explain, publish
from hyper_parallel.checkpoint.file_format import LARGEST, seal, unseal
from hyper_parallel.checkpoint.rank_agreement import Alone, RankAgreement, agree
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.verify import file_damage
from hyper_parallel.compat import fsdp
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration.optimizer_state import OPTIMIZER, collect, restore
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.lora_adapters import name_in_base, without_adapters
from hyper_parallel.train.checkpoint_state import model_names, model_shards
from hyper_parallel.untrusted_files import is_plain_name, open_within, read_bytes

TRAINER_STATE = "trainer_state.json"
SCHEDULER = "scheduler.pt"
_PLAIN = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
"""What a folder without our checkpoint has weights in (`save_only_model`)."""
_NAME = re.compile(r"checkpoint-([0-9]+)")


def save(
    folder: Path,
    handle: ShardedModel,
    optimizer: Any,
    step: int,
    state: Mapping[str, Any],
    *,
    assets: Mapping[str, bytes] | None = None,
) -> None:
    """Write the model, and the optimizer unless it is None, as they are now into `folder`. A collective.

    `optimizer` is one that `on_local` was called for, as it is or inside of Accelerate's; or a step's own. `state` is
    JSON, kept beside; with the model's config as ``model_config`` the checkpoint can be exported. `assets`:
    `checkpoint.Writer.save`.

    Raises CheckpointError, on all ranks, if the folder cannot be written.
    """
    ranks = ranks_of(handle)
    fsdp.free_gathered(handle.model)
    pieces, kept = saved_tensors(handle, optimizer)
    own: dict[str, Any] = {"adapters": _adapted(handle), "optimizer": kept, "files": {}}
    if (schedule := folder / SCHEDULER).is_file():
        own["files"] = {SCHEDULER: hashlib.sha256(schedule.read_bytes()).hexdigest()}
    # Nothing trains meanwhile, so nothing has to be copied first.
    with Writer(folder, handle.world, handle.rank, keep=1, streamed=True, group=ranks) as writer:
        writer.save(step, pieces, {**state, **own}, assets=assets)


def saved_tensors(handle: ShardedModel, optimizer: Any) -> tuple[dict[str, Piece], dict[str, Any] | None]:
    """What a checkpoint has of the model and, unless it is None, the optimizer: tensors by name, and the optimizer's
    JSON. A collective."""
    pieces = _model(handle)
    if optimizer is None:
        return pieces, None
    if _is_of_step(optimizer):
        return {**pieces, **optimizer.pieces()}, optimizer.state()
    moments, kept = collect(optimizer, ranks_of(handle))
    return {**pieces, **moments}, kept


def _is_of_step(optimizer: Any) -> bool:
    """Whether it is one of `step.optimizer`, and not PyTorch's."""
    return hasattr(optimizer, "load_state")


def load(folder: Path, handle: ShardedModel, optimizer: Any) -> dict[str, Any]:
    """Fill the model, and the optimizer unless it is None, from `folder`; the state. A collective.

    Saved and loading strategy may differ in everything. Every byte is verified before it is used.

    Raises CheckpointError, on all ranks, if there is none, or it is damaged or of another model or optimizer; what
    was filled by then is a mixture.
    """
    ranks = ranks_of(handle)
    fsdp.free_gathered(handle.model)
    with together(ranks, folder, "read"):
        checkpoint = Checkpoint(committed(folder))
        pieces = _model(handle)
        checkpoint.match(pieces, MODEL, _saved_names(handle))
        checkpoint.fill(pieces, handle.rank)
    if optimizer is not None:
        load_optimizer(folder, handle, optimizer)
    return checkpoint.state


def load_optimizer(folder: Path, handle: ShardedModel, optimizer: Any) -> None:
    """Fill the optimizer alone, as `load` does. A collective."""
    ranks, pieces = ranks_of(handle), dict[str, Piece]()
    everywhere: set[str] = set()
    if _is_of_step(optimizer):
        pieces = optimizer.pieces()
        everywhere = {name for names in ranks.gather(json.dumps([*pieces])) for name in json.loads(names)}
    with together(ranks, folder, "read"):
        checkpoint = Checkpoint(committed(folder))
        saved = checkpoint.state.get("optimizer")
        if saved is None:
            raise CheckpointError(
                f"{checkpoint.path} holds no optimizer's state; it was saved for the model's sake"
            )
        if not _is_of_step(optimizer):
            restore(optimizer, checkpoint, saved)
            return
        checkpoint.match(pieces, OPTIMIZER, everywhere - pieces.keys())
        checkpoint.fill(pieces, handle.rank)
        optimizer.load_state(saved)


def holds_ours(folder: Path) -> bool:
    """Whether there is a checkpoint of ours in a Trainer's folder; not whether it is whole."""
    return bool(file_format.committed(folder))


def committed(folder: Path) -> Path:
    """Our newest checkpoint in a Trainer's folder. Raises CheckpointError if there is none."""
    found = file_format.committed(folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no step-… folder, in which HyperParallel keeps weights and optimizer; it was half "
            "written, or another trainer wrote it"
        )
    return folder / str(found[0])


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint of a Trainer, None if there is none at all, and the newer ones that are not."""

    path: Path | None
    skipped: verify.Skipped = ()


def newest(out: Path, handle: ShardedModel) -> Newest:
    """The newest `checkpoint-N` in a Trainer's output folder that is whole. A collective; reads every byte of it.

    Raises CheckpointError if there are some and none is whole, or if the folder cannot be read.
    """
    ranks = ranks_of(handle)
    found: list[str] = []
    with together(ranks, out, "read"):
        if ranks.rank == 0 and out.is_dir():
            steps = (_NAME.fullmatch(path.name) for path in out.iterdir() if path.is_dir())
            found = [match[0] for match in sorted(filter(None, steps), key=lambda match: -int(match[1]))]
    found = json.loads(ranks.gather(json.dumps(found))[0])
    path, skipped = verify.first_good([out / name for name in found], lambda path: damage(path, ranks))
    if path is None and skipped:
        raise CheckpointError(
            f"no checkpoint in {out} can be loaded ({verify.words_of(skipped)}); restore one from a copy, or move them "
            "away to start from the beginning"
        )
    return Newest(path, skipped)


def damage(folder: Path, ranks: Ranks) -> str | None:
    """The damage of a `checkpoint-N`, in words; None if all is there and ours is what was written. A collective.

    The weights of a folder without ours (`save_only_model`) have no digests, and only have to be there.
    """
    answer = _look(folder) if ranks.rank == 0 else (None, None)
    reason: str | None
    reason, inner = json.loads(ranks.gather(json.dumps(answer))[0])
    if reason is None and inner is not None:
        reason = verify.damage_on_ranks(folder / inner, ranks)
    return reason


def refuse_damaged(folder: Path, handle: ShardedModel) -> None:
    """Raise CheckpointError, on all ranks, if a look at a `checkpoint-N` shows that it cannot be resumed. A collective.

    Tensors are verified when they are read.
    """
    ranks = ranks_of(handle)
    reason = json.loads(ranks.gather(json.dumps(_look(folder)))[0])[0]
    if reason is not None:
        raise CheckpointError(
            f"{folder} cannot be resumed: {reason}; give another checkpoint, or resume_from_checkpoint=True for the "
            "newest whole one"
        )


def _look(folder: Path) -> tuple[str | None, str | None]:
    """The damage that the small files show, and the name of our checkpoint to be verified, if there is one."""
    try:
        step = json.loads((folder / TRAINER_STATE).read_text())["global_step"]
    except FileNotFoundError:
        return f"{TRAINER_STATE}, which is written last, is missing", None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{TRAINER_STATE} cannot be read: {type(error).__name__}", None
    match = _NAME.fullmatch(folder.name)
    if match is not None and step != int(match[1]):
        return f"{TRAINER_STATE} is of step {step}", None
    if (reason := manifest_damage(folder)) is not None:
        return reason, None
    if not holds_ours(folder):
        if (folder / "optimizer.pt").is_file():
            return "another trainer wrote it; to begin from its weights, give the folder as the model's", None
        if any((folder / name).is_file() for name in _PLAIN) and not (folder / SCHEDULER).is_file():
            return None, None
        return "the step-… folder with weights and optimizer is missing", None
    inner = committed(folder)
    try:
        files = verify.read_marker(inner)["state"].get("files", {})
    except CheckpointError as error:
        return f"{inner.name}: {error}", None
    if not isinstance(files, dict):
        return f"{inner.name}: its state names no files", None
    for name, digest in files.items():
        try:
            if hashlib.file_digest(open_within(folder, name), "sha256").hexdigest() != digest:
                return f"{name}: sha256 differs", None
        except OSError as error:
            return f"{name}: {error.strerror}", None
    return None, inner.name


def _model(handle: ShardedModel) -> dict[str, Piece]:
    kept = _saved_names(handle)
    return {name: piece for name, piece in model_shards(handle).items() if name in kept}


def _saved_names(handle: ShardedModel) -> set[str]:
    """The tensors of the model that are saved, on whatever ranks."""
    names = adapter_names(handle)
    return set(model_names(handle)) if names is None else {f"{MODEL}{name}" for name in names}


def adapter_names(handle: ShardedModel) -> set[str] | None:
    """The parameters of adapters, and what is trained beside them; None where there are no adapters."""
    if not _adapted(handle):
        return None
    return {
        p.name
        for p in handle.parameters()
        if p.parameter.requires_grad or name_in_base(p.name, handle.model) is None
    }


def _adapted(handle: ShardedModel) -> bool:
    return without_adapters(handle.model) is not handle.model


# Manifest of the files beside our checkpoint in a Trainer's `checkpoint-N`: sizes and digests.
#
# The Trainer writes its small files before and after ours, so that none of ours can have their digests. The manifest is
# written when all but the Trainer's last file are there, and replaced by one that has that file too. It is a sealed
# file (`checkpoint.file_format`). A folder without one was saved by an earlier release, or its owner has changed a file
# on purpose and removed it.

MANIFEST = "verified.json"
_FORMAT = "hyper-parallel manifest"


def write_manifest(folder: Path) -> None:
    """Write the manifest of what is in `folder` now, but for our checkpoint, which has its own. Raises OSError."""
    ours = {str(name) for name in file_format.committed(folder)}
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        regular = path.is_file() and not path.is_symlink() and all(map(is_plain_name, name.parts))
        if regular and name.parts[0] not in ours and str(name) != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[name.as_posix()] = {"bytes": file.tell(), "sha256": digest}
    publish(folder / MANIFEST, seal({"format": _FORMAT, "files": files}))


def manifest_damage(folder: Path) -> str | None:
    """The damage of the files that the manifest has, in words; None if nothing is, or if there is no manifest."""
    try:
        body = unseal(read_bytes(open_within(folder, MANIFEST), LARGEST))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    files = body.get("files")
    if body.get("format") != _FORMAT or not isinstance(files, dict):
        return f"{MANIFEST}: it is no manifest"
    for name, written in files.items():
        sized = isinstance(written, dict) and isinstance(written.get("bytes"), int)
        if not sized or not isinstance(written.get("sha256"), str):
            return f"{MANIFEST}: {name!r} has no size or no digest"
        if (reason := file_damage(folder, name, written)) is not None:
            return f"{reason} (if you changed it yourself, remove {MANIFEST})"
    return None


def ranks_of(handle: ShardedModel) -> Ranks:
    """The ranks that a model is spread over, as this one sees them."""
    return RankAgreement() if handle.world > 1 else Alone()


@contextlib.contextmanager
def together(ranks: Ranks, path: Path, action: str = "write") -> Iterator[None]:
    """What goes wrong inside on one rank is raised on all, so that none waits for it in a collective.

    Raises CheckpointError for what the file system refuses and on the ranks where nothing went wrong; else what was
    raised inside. All ranks call this at the same point, and none communicates inside.
    """
    try:
        yield
    except OSError as problem:
        agree(ranks, explain(problem, path, action))
    except CheckpointError as problem:
        agree(ranks, problem)
    except Exception as problem:
        with contextlib.suppress(CheckpointError):
            agree(ranks, CheckpointError(f"{path}: {type(problem).__name__}: {problem}"))
        raise
    else:
        agree(ranks, None)
