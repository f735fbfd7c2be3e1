"""The JSON that is converted, a record of what became of each key, and the result with its text.

`auto` is Transformers' placeholder for one of its training arguments: it is filled from the arguments that the user
gives, else with Transformers' default.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config import yaml12
from hyper_parallel.config.from_deepspeed.keys import reason
from hyper_parallel.config.schema import merge, nest
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.untrusted_files import open_regular, parse_json, printable, read_bytes

AUTO, DEFAULT = "auto", "DeepSpeed's default"
LARGEST = 2**20
"""Upper limit for the bytes of a DeepSpeed JSON."""
ARGUMENTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "max_steps": -1,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
}
"""Transformers' training arguments that fill `auto`, with Transformers' defaults."""


def read(path: str | Path) -> dict[str, Any]:
    """The object in a DeepSpeed JSON. Raises ConfigError, also where a key stands twice."""
    try:
        data = read_bytes(open_regular(path), LARGEST)
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError(f"must be an object, as in {{...}}; got a {type(content).__name__}")
        return dict(json.loads(data, object_pairs_hook=_once))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the JSON of deepspeed --deepspeed_config") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object; remove one")
    return content


class Source:
    """A DeepSpeed JSON while it is converted. Readers raise ConfigError for a value of another kind."""

    def __init__(self, content: Mapping[str, Any], name: str, arguments: Sequence[str] = ()) -> None:
        self.name = name
        self._content = content
        self._arguments = _read_arguments(arguments)
        self._unused = set(self._arguments)
        self._settings: dict[str, Setting] = {}
        self._reasons: dict[KeyPath, str] = {}

    def value(self, key: str) -> Any:
        """The value of a dotted key, or None where it is left out (or null)."""
        found: Any = self._content
        for depth, part in enumerate(parts := key.split(".")):
            # `zero_optimization: true` is DeepSpeed's first format, without keys below.
            if found is None or (isinstance(found, bool) and parts[0] == "zero_optimization" and depth == 1):
                return None
            if not isinstance(found, Mapping):
                raise self.error(".".join(parts[:depth]), "must be an object {...}", found)
            found = found.get(part)
        return found

    def whole(self, key: str, least: int = 1) -> int | None:
        """A whole number of at least `least`; 1e3 counts as one. None where the key is left out, or is `auto`."""
        found = self.number(key, least)
        if found is not None and not float(found).is_integer():
            raise self.error(key, "must be a whole number", found)
        return None if found is None else int(found)

    def number(self, key: str, least: float = 0.0) -> float | None:
        """A finite number of at least `least`. None where the key is left out, or is `auto`."""
        found = self.value(key)
        if found is None or found == AUTO:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self.error(key, "must be a number, or auto", found)
        if not least <= found < 2**63:
            raise self.error(key, f"must be at least {least:g}", found)
        return found

    def flag(self, key: str) -> bool | None:
        """true or false. None where the key is left out, or is `auto`."""
        found = self.value(key)
        if found is None or found == AUTO:
            return None
        if not isinstance(found, bool):
            raise self.error(key, "must be true or false", found)
        return found

    def text(self, key: str) -> str | None:
        """A text. None where the key is left out."""
        found = self.value(key)
        if found is not None and not isinstance(found, str):
            raise self.error(key, "must be text", found)
        return found

    def is_auto(self, key: str) -> bool:
        """Whether a key is Transformers' placeholder."""
        return bool(self.value(key) == AUTO)

    def given(self, argument: str) -> Any:
        """A training argument that the user gave, or None."""
        self._unused.discard(argument)
        return self._arguments.get(argument)

    def origin(
        self, key: str, read: Callable[[str], Any], *arguments: str, default: Any = None
    ) -> tuple[Any, str]:
        """The value of a key, and where it comes from, in words, if the file does not say it.

        `read`: one of the readers above. `arguments` fill `auto`, several of them as a list; `default` is DeepSpeed's
        where the key is left out.
        """
        if arguments and self.is_auto(key):
            given = {argument: self.given(argument) for argument in arguments}
            values = [ARGUMENTS[name] if value is None else value for name, value in given.items()]
            first = arguments[0]
            words = f"filled with {first}={given[first]}"
            if given[first] is None:
                words = f"Transformers' default of {first}, check it"
            return values if len(values) > 1 else values[0], words
        value = read(key)
        return (default, DEFAULT) if value is None and default is not None else (value, "")

    def write(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Record a setting of the run file; `sources`: dotted keys; those that are left out do not count."""
        paths = tuple(tuple(one.split(".")) for one in sources if self.value(one) is not None)
        origin = ", ".join(shown(path, self.value(".".join(path))) for path in paths)
        comment = "; ".join(part for part in (origin, note) if part)
        self._settings[key] = Setting(key=key, value=value, sources=paths, comment=comment)

    def wrote(self, key: str) -> bool:
        """Whether there is a setting for this key, or for a key of this section."""
        return any(one == key or one.startswith(f"{key}.") for one in self._settings)

    def leave(self, key: str, why: str) -> None:
        """Record that a key has no setting, and why."""
        self._reasons[tuple(key.split("."))] = why

    def leave_kind(self, section: str, why: str) -> None:
        """Record that a section's `type` and its parameters have no settings, and why."""
        parameters = self.value(f"{section}.params")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise self.error(f"{section}.params", "must be an object {...}", parameters)
        for key in ("type", *(f"params.{name}" for name in parameters or () if "." not in name)):
            self.leave(f"{section}.{key}", why)

    def settings(self) -> tuple[Setting, ...]:
        """All settings, by section of the run file."""
        order = ["train", "strategy", "trackers"]
        return tuple(sorted(self._settings.values(), key=lambda one: order.index(one.key.split(".")[0])))

    def unconverted(self) -> tuple[Unconverted, ...]:
        """Every key of the JSON that no setting comes from. Raises ConfigError for an argument without use."""
        if self._unused:
            name = min(self._unused)
            raise ConfigError(
                f"argument {name}={self._arguments[name]}: no key of {self.name} is 'auto' for it; leave it out, and "
                "set the key of the run file"
            )
        used = {path for one in self._settings.values() for path in one.sources}
        return tuple(
            Unconverted(path=path, value=value, why=self._reasons.get(path) or reason(path, value))
            for path, value in _leaves(self._content, ())
            if path not in used
        )

    def error(self, key: str, needed: str, got: Any) -> ConfigError:
        """An error that says what a key must be, and what it is."""
        return ConfigError(f"{self.name}: {shown(tuple(key.split('.')), got)}: {needed}")


def _leaves(content: Any, above: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no section, and every section without keys."""
    if isinstance(content, Mapping) and (content or not above):
        for key, value in content.items():
            yield from _leaves(value, (*above, str(key)))
    else:
        yield above, content


def _read_arguments(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in ARGUMENTS:
            hint = nearest(name, ARGUMENTS) or f"; they are {', '.join(ARGUMENTS)}"
            raise ConfigError(
                f"argument {text}: write a training argument of Transformers as name=value{hint}"
            )
        read, default = yaml12.parse(value, f"argument {text}", lines=False), ARGUMENTS[name]
        numeric = isinstance(read, int | float) and not isinstance(read, bool)
        right = {bool: isinstance(read, bool), int: type(read) is int, float: numeric}[type(default)]
        least = 1 if name in ("per_device_train_batch_size", "gradient_accumulation_steps") else 0
        if not right or (numeric and not least <= read < 2**63):
            kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
            raise ConfigError(f"argument {text}: must be {kind}, not below {least}")
        found[name] = read
    return found


KeyPath = tuple[str, ...]
"""The keys that lead to a value of the JSON, outer first."""
_WIDTH = 36
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+[KMGT]iB")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of the run file with its value, and where both come from."""

    key: str
    """Dotted, such as ``train.optimizer.lr``."""
    value: Any
    sources: tuple[KeyPath, ...]
    """Keys of the JSON; none for a default of DeepSpeed that differs from ours."""
    comment: str
    """One line: the keys of the JSON with their values, and what differs."""


@dataclass(frozen=True, kw_only=True)
class Unconverted:
    """A key of the JSON that has no setting, with the reason in one line."""

    path: KeyPath
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Settings in the order of the run file's sections, and all keys that were not converted."""

    name: str
    """The file that was converted."""
    settings: tuple[Setting, ...]
    unconverted: tuple[Unconverted, ...]
    missing: tuple[str, ...]
    """Keys of a run file that the JSON does not decide."""

    @property
    def fragment(self) -> dict[str, Any]:
        """The settings as nested sections."""
        found: dict[str, Any] = {}
        for setting in self.settings:
            found = merge(found, nest(tuple(setting.key.split(".")), setting.value), {})
        return found

    @property
    def text(self) -> str:
        """The fragment as YAML with comments, then the keys that were not converted, as comments."""
        comments = {setting.key: setting.comment for setting in self.settings}
        lines = [
            f"# {printable(self.name)}, converted by hyper-parallel convert. A run file takes it with 'extends:';",
            "# its own keys then win over these.",
            *_lines(self.fragment, (), comments),
            "",
            f"# A run file still has to say: {', '.join(self.missing)}.",
        ]
        if self.unconverted:
            lines += ["", f"# Not converted ({len(self.unconverted)}):"]
            lines += [f"#   {shown(one.path, one.value)}: {one.why}" for one in self.unconverted]
        return "\n".join(lines) + "\n"


def joined(*notes: str) -> str:
    """Notes in one line, each once, without those that are empty."""
    return "; ".join(dict.fromkeys(note for note in notes if note))


def shown(path: KeyPath, value: Any) -> str:
    """``zero_optimization.stage = 2``, in printable characters, shortened."""
    text = json.dumps(value)
    return f"{printable('.'.join(path))[:120]} = {text if len(text) <= 60 else text[:57] + '...'}"


def _lines(section: Mapping[str, Any], above: KeyPath, comments: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(above)
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, (*above, key), comments)
        else:
            comment = comments[".".join((*above, key))]
            yield f"{f'{indent}{key}: {_scalar(value)}':{_WIDTH}}  # {comment}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
