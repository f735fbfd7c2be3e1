"""Loads files and overrides into a RunConfig or a Strategy, and writes either back to a file.

A file may extend another one (`extends: base.yaml`, relative to itself): sections are merged key by key, a list or a
scalar replaces the base's, and so does a section of another kind (`train.optimizer.name`, `model.config.model_type`).
Overrides (`train.steps=100`) are then merged into the result in the same way, all at once; if two set the same key,
the later one wins. `auto` for all axes counts as `auto` for each axis, so that `strategy.axes.tensor=2` over it leaves
the other axes open. A file of another format is recognised by its keys; the message names the command that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hyper_parallel.config import schema, yaml12
from hyper_parallel.config.run import RunConfig
from hyper_parallel.config.schema import Kinds, merge, nest, one_tensor, present, spelled_out, without
from hyper_parallel.config.validation_errors import Where, explain
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import open_regular, read_bytes

LARGEST = 256 * 2**10
"""Upper limit for the bytes of a run file and all files that it extends."""
_MOST_FILES = 16
_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Paths under which a shell passes a pipe instead of a file; these are read without `open_regular`."""
VERSION = 1
"""The version of the files' format that this release reads."""

Model = TypeVar("Model", bound=BaseModel)
Layer = tuple[str, Any]
"""Keys and values with their origin: a file or an override."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a file describes, with dotted overrides (``"train.steps=100"``) applied.

    Raises ConfigError with one line for each problem: the file or override, the key, what it must be, what it is.
    """
    return load_file(RunConfig, path, overrides)


def load_strategy(path: str | Path, overrides: Sequence[str] = ()) -> Strategy:
    """The Strategy of a strategy file (`version`, `axes`, …), with overrides such as ``"axes.tensor=4"``.

    Raises ConfigError as `load` does.
    """
    return load_file(Strategy, path, overrides)


def from_dict(data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """The run that a mapping describes, as if it had been read from a file named `source`.

    Raises ConfigError as `load` does.
    """
    return build(RunConfig, [(source, dict(data))], overrides)


def dump(config: RunConfig | Strategy) -> str:
    """YAML with every key written out, that loads to an equal object."""
    return yaml12.write(config.model_dump(mode="json"))


def load_file(model: type[Model], path: str | Path, overrides: Sequence[str]) -> Model:
    """The model of a file of its sections, with overrides. Raises ConfigError as `load` does."""
    return build(model, _files(model, Path(path), (), LARGEST), overrides)


def build(model: type[Model], files: list[Layer], overrides: Sequence[str]) -> Model:
    """Merge files (base first) and overrides, and validate the result. Raises ConfigError as `load` does."""
    kinds, own = _kinds(model), files[-1][0]
    layers = list(files)
    data: Any = {}
    for name, content in files:
        if "version" in content:
            _check_version(name, content["version"])
        data = merge(data, spelled_out(content), kinds)
    over: Any = {}
    for at, text in enumerate(overrides):
        path, value = _override(model, text, overrides[at + 1 : at + 2])
        if isinstance(value, Mapping):
            # {replicate: 2} means that and nothing else; a single key of a section has its own path.
            data, over = without(data, path), without(over, path)
        nested = spelled_out(nest(path, value))
        layers.append((f"override {text}", nested))
        over = merge(over, nested, {})
    data = one_tensor(merge(data, over, kinds))
    if "version" in over:
        _check_version("override version", over["version"])
    if "version" not in data:
        raise ConfigError(
            f"{own}: version: is missing; add the line 'version: {VERSION}', the format's version"
        )

    def source(where: Where) -> str:
        # The layer that holds most of the place; of several, the last, for it is what counts.
        if not where or not isinstance(data, Mapping):
            return own
        depth, _, name = max((present(content, where), at, name) for at, (name, content) in enumerate(layers))
        return name if depth else own

    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, data, kinds, source))) from None


def _files(model: type[Model], path: Path, within: tuple[Path, ...], limit: int) -> list[Layer]:
    """The contents of a file and of all files that it extends, base first; `limit`: bytes of all of them
    together.
    """
    try:
        here = path.resolve()
        if not within and str(path).startswith(_PIPES):
            with open(path, "rb") as file:
                raw = file.read(limit + 1)
        else:
            raw = read_bytes(open_regular(path), LARGEST)
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_named_by(within)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); is this a YAML file?") from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        mend = folder_hint(path) if not within and path.is_dir() else ""
        raise ConfigError(f"{path}: cannot be read: {reason}{mend}{_named_by(within)}") from None
    if here in within:
        chain = " -> ".join(f.name for f in (*within[within.index(here) :], here))
        raise ConfigError(f"{path}: 'extends' forms a cycle: {chain}; remove one of them")
    if len(raw) > limit or len(within) > _MOST_FILES:
        raise ConfigError(
            f"{path}: run files that build on each other are {_MOST_FILES} at most, and have "
            f"{format_bytes(LARGEST)} at most{_named_by(within)}"
        )
    try:
        content = yaml12.parse(text, str(path))
    except ConfigError as error:
        if not within:
            raise
        # An untrusted run file may name any file, whose content must not reach the log.
        where = str(error).partition(": not valid YAML")[0]
        raise ConfigError(
            f"{where}: not valid YAML{_named_by(within)}; load that file alone to see the reason"
        ) from None
    if content is None:
        raise ConfigError(f"{path}: the file is empty; start from examples/quickstart.yaml")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must be keys with values, as in 'version: 1'; got a {type(content).__name__}"
        )
    if within and content and not content.keys() & {"extends", *model.model_fields}:
        raise ConfigError(f"{path}: is no run file, it has none of its keys{_named_by(within)}")
    if not within:
        refuse_other_kind(path, content, frozenset({"extends", *model.model_fields}))
    base = content.pop("extends", None)
    if base is None:
        return [(str(path), content)]
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: extends: must be the name of one file, relative to this one (got {base!r})"
        )
    return [*_files(model, path.parent / base, (*within, here), limit - len(raw)), (str(path), content)]


def _named_by(within: tuple[Path, ...]) -> str:
    return f" ('extends' in {within[-1].name} names it)" if within else ""


def _override(model: type[BaseModel], text: str, after: Sequence[str] = ()) -> tuple[tuple[str, ...], Any]:
    """The path and the value of ``train.steps=100``; the value is YAML. `after`: the next override, for messages."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"override {text}: write key=value, {_meant(model, text, after)}")
    if key == "extends":
        raise ConfigError(f"override {text}: 'extends' is allowed only in a file")
    return schema.split(model, key), yaml12.parse(value, f"override {text}", lines=False)


def _meant(model: type[BaseModel], text: str, after: Sequence[str]) -> str:
    """The override that was meant by one without an equals sign, else an example."""
    key, colon, value = text.partition(":")
    known = schema.field_at(model, tuple(key.split("."))) is not None
    if known and colon and value:
        return f"here {key}={value.strip()}"
    if known and after and "=" not in after[0]:
        return f"here {key}={after[0]}"
    return "for example train.steps=100"


def _check_version(source: str, version: Any) -> None:
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{source}: version: must be {VERSION}, the format that this release reads (got {version!r}); "
            "a file of a later format needs a later release of hyper-parallel"
        )


@cache
def _kinds(model: type[BaseModel]) -> Kinds:
    return schema.kinds(model)


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
    """A hint what to give instead of a folder, where its content tells."""
    if (path / "run.yaml").is_file():
        return f"; give {path / 'run.yaml'}"
    if (path / "config.json").is_file():
        return f"; it is a model: name it in a run file as model: {{path: {path}}}"
    return "; give the run file in it"
