"""Dataclasses from plain data: cluster files in YAML, lossless both ways, and facts about published machines with their
sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from hyper_parallel.config.yaml12 import parse
from hyper_parallel.errors import ConfigError, nearest

VERSION = 1
Tree = dict[str, Any]
"""A cluster as plain data: sections of fields."""
Kind = TypeVar("Kind")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def load(kind: type[Kind], path: str | Path) -> Kind:
    """Load a cluster file as a `kind`, a Cluster. Raises ConfigError with all problems if it is missing or invalid."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: the cluster file cannot be read: {reason}") from None
    tree = parse(content, str(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: a cluster file holds keys with values; got {type(tree).__name__}")
    version = tree.get("version", VERSION)
    if version != VERSION:
        raise ConfigError(f"{path}: version {version} is not known; this release reads version {VERSION}")
    return build(kind, {key: value for key, value in tree.items() if key != "version"}, str(path))


def build(kind: type[Kind], tree: Mapping[str, Any], where: str) -> Kind:
    """Return a dataclass from plain data. Raises ConfigError with a line for each problem, each prefixed by `where`."""
    problems = [f"{where}: {problem}" for problem in _unknown(kind, tree, ())]
    try:
        instance: Kind = _adapter(kind).validate_python(tree)
    except ValidationError as error:
        details = {detail["loc"]: detail for detail in error.errors()}
        problems += [
            f"{where}: {'.'.join(map(str, place))}: {detail['msg']} (got {str(detail['input'])[:60]})"
            if place
            else f"{where}: {detail['msg'].removeprefix('Value error, ')}"
            for place, detail in details.items()
            if detail["type"] != "unexpected_keyword_argument"
        ]
        raise ConfigError("\n".join(problems) or f"{where}: {error}") from None
    if problems:
        raise ConfigError("\n".join(problems))
    return instance


def text(cluster: Any) -> str:
    """Return the YAML of a cluster; fields at their default are left out."""
    tree = {"version": VERSION, **plain(cluster)}
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _unknown(kind: Any, value: Any, place: tuple[str, ...]) -> list[str]:
    """A line for each unknown key, with the nearest known one."""
    found = []
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        known = [_key(field) for field in fields(kind)]
        hints |= {_key(field): hints[field.name] for field in fields(kind)}
        found += [
            f"{_key(field)} and {field.name} are the same number; keep {_key(field)}"
            for field in fields(kind)
            if _key(field) != field.name and {_key(field), field.name} <= value.keys()
        ]
        for key, inner in value.items():
            if key in hints:
                found += _unknown(hints[key], inner, (*place, str(key)))
            else:
                hint = nearest(str(key), known) or f"; the keys here are {', '.join(known)}"
                found.append(f"{'.'.join((*place, str(key)))}: unknown key{hint}")
        return found
    # Of `X | None`, tuple[X, ...] and Mapping[str, X] the dataclass within.
    inner_kinds = [inner for inner in get_args(kind) if is_dataclass(inner)]
    for inner_kind in inner_kinds:
        if isinstance(value, Mapping) and len(get_args(kind)) == 2 and type(None) not in get_args(kind):
            for key, inner in value.items():
                found += _unknown(inner_kind, inner, (*place, str(key)))
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                found += _unknown(inner_kind, inner, (*place, str(index)))
        else:
            found += _unknown(inner_kind, value, place)
    return found


def _key(field: Field[Any]) -> str:
    """The key of a dataclass's field in a file."""
    return str(field.metadata.get("key", field.name))


def plain(value: Any) -> Any:
    """A cluster, or a part of one, as plain data under the keys of its file; fields at their default are left out."""
    if is_dataclass(value):
        tree = {}
        for field in fields(value):
            inner = getattr(value, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if inner != default:
                tree[_key(field)] = plain(inner)
        return tree
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Rows of numbers on one line, numbers as short as they can be written without loss."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_number(self, data: float) -> yaml.ScalarNode:
        """The shortest text that parses to the same number."""
        number = repr(data)
        if abs(data) >= 1e6 or 0 < abs(data) < 1e-3:
            number = next(shown for digits in range(1, 18) if float(shown := f"{data:.{digits}e}") == data)
        return self.represent_scalar("tag:yaml.org,2002:float", number)

    def represent_row(self, data: list[Any]) -> yaml.SequenceNode:
        """Lists of numbers on one line, other values one per line."""
        row = all(isinstance(item, int | float) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=row)


_Dumper.add_representer(float, _Dumper.represent_number)
_Dumper.add_representer(list, _Dumper.represent_row)


@dataclass(frozen=True)
class Fact:
    """A number or a table, with its source."""

    value: Any
    source: str
    public: bool = True
    """False if the maker does not publish it: `source` then says how it was estimated."""


def known(value: Any, source: str) -> Fact:
    """A number that a datasheet, a paper or a measurement states."""
    return Fact(value, source)


def estimate(value: Any, how: str) -> Fact:
    """A number that is not public."""
    return Fact(value, how, public=False)


MEMORY_CURVE = [{"points": [[1e5, 0.3], [1e6, 0.6], [1e7, 0.75], [1e8, 0.9]]}]
"""Points (bytes of an operator, share of the bandwidth that it reaches), as Calculon states them for the A100."""


def matmul_curve(best: float, half: Sequence[float] = (121.0, 192.0, 144.0)) -> list[dict[str, Any]]:
    """Efficiencies of products: the best share of the peak, and the sizes that reach half of it, here the A100's."""
    return [{"best": best, "half": list(half)}]


def attention_shares(forward: float, backward: float) -> list[dict[str, Any]]:
    """Efficiencies for causal attention: kernels that skip masked scores reach the same share as unmasked ones."""
    return [
        {"layout": f"{direction}{causal}", "best": best}
        for direction, best in (("forward", forward), ("backward", backward))
        for causal in ("", " causal")
    ]


Facts = Mapping[str, Fact]
"""Facts by dotted path into a cluster file, such as `device.memory.read`."""


def cluster_tree(name: str, device: str, source: str, facts: Facts) -> Tree:
    """Return the cluster that facts describe, as plain data; `sources` or `estimates` has every number's path.

    A memory without a `write` fact writes as fast as it reads.
    """
    cluster: Tree = {"name": name, "source": source, "device": {"name": device}}
    for path, fact in facts.items():
        *folders, leaf = path.split(".")
        section = cluster
        for folder in folders:
            section = section.setdefault(folder, {})
        section[leaf] = fact.value
    cluster["device"]["memory"]["name"] = "device"
    for tier in ("host", "pool", "flash"):
        if tier in cluster:
            cluster[tier]["name"] = tier
    for memory in (
        cluster["device"]["memory"],
        *(cluster[tier] for tier in ("host", "pool") if tier in cluster),
    ):
        memory.setdefault("write", memory["read"])
    for level, link in cluster.get("links", {}).items():
        link["level"] = level
    cluster["sources"] = {path: fact.source for path, fact in facts.items() if fact.public}
    cluster["estimates"] = {path: fact.source for path, fact in facts.items() if not fact.public}
    return cluster
