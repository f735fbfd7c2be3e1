"""Recognition of a file of another format by its keys; the message names the command that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError

_MARKS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"data", "train", "out"}), "a run file of `train`", "hyper-parallel train {path}"),
    (frozenset({"task", "roles", "rl"}), "a file of reinforcement learning", "hyper-parallel rl {path}"),
    (frozenset({"simulation"}), "a simulation of reinforcement learning", "hyper-parallel simulate {path}"),
    (
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
        "a DeepSpeed JSON",
        "hyper-parallel convert {path} --devices N --out base.yaml",
    ),
)
"""Top-level keys of a format, what it is, and the command that reads it."""
_MODEL = frozenset({"model_type", "architectures", "torch_dtype", "transformers_version"})


def refuse_other_kind(path: Path, content: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ConfigError where the keys are those of another format. `known`: the top-level keys of the one wanted."""
    strange = content.keys() - known
    if len(strange & _MODEL) >= 2 and "model_type" in strange:
        raise ConfigError(
            f"{path}: is the config of a Transformers model; write a run file that names its folder: "
            f"model: {{path: {path.parent}}}"
        )
    for marks, what, command in _MARKS:
        if len(strange & marks) >= min(2, len(marks)) and not marks <= known:
            found = ", ".join(sorted(strange & marks))
            raise ConfigError(f"{path}: is {what} (its keys: {found}); run: {command.format(path=path)}")


def folder_hint(path: Path) -> str:
    """What to give instead of a folder, where its content tells."""
    if (path / "run.yaml").is_file():
        return f"; give {path / 'run.yaml'}"
    if (path / "config.json").is_file():
        return f"; it is a model: name it in a run file as model: {{path: {path}}}"
    return "; give the run file in it"
