"""The result of a conversion, and its text: a YAML fragment with a comment on each line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.merge import merge, nest
from hyper_parallel.untrusted import printable

Path = tuple[str, ...]
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
    sources: tuple[Path, ...]
    """Keys of the JSON; none for a default of DeepSpeed that differs from ours."""
    comment: str
    """One line: the keys of the JSON with their values, and what differs."""


@dataclass(frozen=True, kw_only=True)
class Unconverted:
    """A key of the JSON that has no setting, with the reason in one line."""

    path: Path
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


def shown(path: Path, value: Any) -> str:
    """``zero_optimization.stage = 2``, in printable characters, shortened."""
    text = json.dumps(value)
    return f"{printable('.'.join(path))[:120]} = {text if len(text) <= 60 else text[:57] + '...'}"


def _lines(section: Mapping[str, Any], above: Path, comments: Mapping[str, str]) -> Iterator[str]:
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
