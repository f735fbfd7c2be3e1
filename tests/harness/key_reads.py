"""Which keys of a file a command reads: every attribute of a section that code reads, by the key's path in the file.

Reads of validators are not counted: a key that only its own validation looks at is ignored. A section is known by
where it was read from: `config.roles` of a watched config is `roles`, and its copies (`model_copy`) are, too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args, get_origin

import torch
from pydantic import BaseModel

from hyper_parallel.compat import backend
from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.admission import token_of
from hyper_parallel.launch.roles.protocol import Future, Instruction
from hyper_parallel.launch.worker import Worker
from hyper_parallel.rl.roles.host import RoleHost
from hyper_parallel.strategy.section import Section


class KeyReads:
    """Watches sections of this process."""

    def __init__(self, roots: Mapping[type[BaseModel], Mapping[str, str]]) -> None:
        """`roots`: classes of whole files, each with the fields of it that are known by other paths (by their own
        names where there are none)."""
        self.read: set[str] = set()
        self._roots = roots
        self._paths: dict[int, tuple[Any, str]] = {}
        """By id, with the section, so that no other gets its id."""
        self._validating = threading.local()

    def install(self) -> Callable[[], None]:
        """Begin to watch; the function that ends it."""
        plain = Section.__getattribute__
        changed = {name: getattr(Section, name) for name in ("__init__", "model_copy", "model_dump")}
        whole = Section.__dict__.get("model_validate"), BaseModel.model_validate.__func__  # type: ignore[attr-defined]

        def getattribute(section: Any, name: str) -> Any:
            value = plain(section, name)
            if name in type(section).model_fields and not getattr(self._validating, "depth", 0):
                value = self._note(section, name, value)
            return value

        def init(section: Any, **given: Any) -> None:
            with self._unwatched():
                changed["__init__"](section, **given)

        def validate(kind: type[BaseModel], *given: Any, **options: Any) -> Any:
            with self._unwatched():
                return whole[1](kind, *given, **options)

        def copy(section: Any, **options: Any) -> Any:
            made = changed["model_copy"](section, **options)
            if id(section) in self._paths:
                self._paths[id(made)] = made, self._paths[id(section)][1]
            return made

        def dump(section: Any, **options: Any) -> Any:
            # Of a section without others in it: all that it has goes where this goes.
            kind = type(section)
            if not any(list(sections_in(field.annotation)) for field in kind.model_fields.values()):
                for name in kind.model_fields:
                    getattr(section, name)
            return changed["model_dump"](section, **options)

        Section.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
        Section.__init__ = init  # type: ignore[method-assign]
        Section.model_validate = classmethod(validate)  # type: ignore[method-assign, assignment]
        Section.model_copy = copy  # type: ignore[method-assign]
        Section.model_dump = dump  # type: ignore[method-assign]

        def end() -> None:
            for name in ("__getattribute__", "__init__", "model_validate", "model_copy", "model_dump"):
                delattr(Section, name)

        return end

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._validating.depth = getattr(self._validating, "depth", 0) + 1
        try:
            yield
        finally:
            self._validating.depth -= 1

    def _note(self, section: Any, name: str, value: Any) -> Any:
        """The value; a section of its own where the same object is at another path too, as defaults are."""
        kind = type(section)
        if kind in self._roots:
            path = self._roots[kind].get(name, "" if self._roots[kind] else name)
        elif id(section) in self._paths:
            path = f"{self._paths[id(section)][1]}.{name}"
        else:
            return value
        if not path:
            return value
        self.read.add(path)
        if isinstance(value, BaseModel) and self._paths.setdefault(id(value), (value, path))[1] != path:
            value = BaseModel.model_copy(value)
            section.__dict__[name] = value
            self._paths[id(value)] = value, path
        return value


@contextlib.contextmanager
def key_reads(roots: Mapping[type[BaseModel], Mapping[str, str]]) -> Iterator[set[str]]:
    """Inside, the paths that are read are added to what this gives."""
    reads = KeyReads(roots)
    end = reads.install()
    try:
        yield reads.read
    finally:
        end()


def leaves(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """The keys of a file that are no sections, by dotted path; of a section of several kinds those of each kind."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if field.exclude or (isinstance(extra, dict) and extra.get("readOnly")):
            continue  # derived from other keys
        sections = list(sections_in(field.annotation))
        for section in sections:
            yield from leaves(section, f"{before}{name}.")
        if not sections:
            yield f"{before}{name}"


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections of a type; none of a mapping, whose keys are names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for inner in get_args(annotation):
            yield from sections_in(inner)


OTHERS: dict[str, Any] = {
    "rank": 4,
    "targets": ["q_proj"],
    "alpha": 8,
    "rslora": True,
    "dora": True,
    "dropout": 0.1,
    "attention": "eager",
    "nodes": 2,
    "node_rank": 1,
    "rendezvous": "10.0.0.1:29500",
    "grace": 5,
    "workers": 2,
    "resume_from": 3,
    "allow_other_data": True,
    "schedule": "usual",
    "cluster": "h100",
    "pieces": True,
    "tries": 3,
    "tries_seconds": 5,
    "method": "ring",
    "ulysses": 2,
    "every": 10,
    "limit": 1.5,
    "replicas": 1,
    "device": "1GiB",
    "host": "1GiB",
    "pool": "1GiB",
    "flash": "/tmp",
    "update": "host",
    "expert_load": 2.0,
    "virtual": 2,
    "layers": [1, 1],
    "overlap_forward_backward": True,
    "submodels": {"a": {"modules": ["model.layers"], "devices": 1}, "b": {"devices": 1}},
    "sequence": True,
    "expert_replicas": {"a": [1]},
    "recompute": "layer",
    "recompute_layers": 1,
    "shard": "optimizer",
    "gathered": "again",
    "reshard_after_forward": True,
    "param": "bfloat16",
    "compute": "bfloat16",
    "reduce": "bfloat16",
    "modules": {"*norm*": "float32"},
    "threads": 1,
    "collectives": "flat",
    "pipeline": 2,
    "context": 2,
}
"""Another value than the default, by a key's last part."""


NEEDS = {
    "model.adapter.": ["model.adapter.rank=4"],
    "roles.reference.": ["rl.kl=0.1"],
    "roles.reward.": ["roles.reward.model=folder", "task.reward=model"],
}
"""What a key needs beside it, by how it begins."""


def refusal(model: type[BaseModel], base: dict[str, Any], key: str) -> str | None:
    """The line that refuses a key that is written; None where it is taken."""
    name = key.rpartition(".")[2]
    needs = [one for prefix, others in NEEDS.items() if key.startswith(prefix) for one in others]
    if key.startswith("model.") and "model" not in base:
        needs.append("model.config={model_type: llama}")
    try:
        build(model, [("run.yaml", base)], [*needs, f"{key}={json.dumps(OTHERS[name])}"])
    except ConfigError as error:
        return str(error)
    return None


def ignored_keys(model: type[BaseModel], base: dict[str, Any], read: Collection[str]) -> list[str]:
    """The keys of a file that are not among those that were read, and that no line refuses when they are written.
    `base`: a file without them."""
    ignored = []
    for key in sorted(set(leaves(model)) - set(read)):
        known = key.rpartition(".")[2] in OTHERS
        line = refusal(model, base, key) if known else "no other value to try"
        parts = key.split(".")[-2:]
        if line is None or "\n" in line or not any(f"'{one}" in line or f".{one}" in line for one in parts):
            ignored.append(f"{key}: {line}")
    return ignored


RL_ROOTS: Mapping[type[BaseModel], Mapping[str, str]] = {RLConfig: {}, RoleLaunch: {"launch": "launch"}}


class InlineEngine:
    """Runs groups of one worker in threads of this process, whose default process group has one rank."""

    def __enter__(self) -> InlineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.close()

    def __init__(self) -> None:
        self._groups: list[_InlineGroup] = []

    def start(self, config: RoleLaunch, *, timeout_s: float) -> _InlineGroup:
        """As `Engine.start`."""
        self._groups.append(_InlineGroup(config, timeout_s))
        return self._groups[-1]


class _InlineGroup:
    def __init__(self, config: RoleLaunch, timeout_s: float) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._host: Any = None

        def begin() -> list[Any]:
            token_of(config.launch)  # as workers do when they meet
            device = torch.device(config.launch.device)
            found = backend(config.launch.device)
            self._host = RoleHost(config, Worker(0, 0, 1, 1, device, found))
            return []

        self.ready = self._begun(begin, timeout_s)

    def call(self, instructions: Sequence[Instruction], *, timeout_s: float, what: str = "") -> Future:
        return self._begun(
            lambda: [[getattr(self._host, one.operation)(**one.arguments) for one in instructions]], timeout_s
        )

    def close(self) -> None:
        self._thread.submit(self._host.close).result()
        self._thread.shutdown()

    def _begun(self, work: Callable[[], list[Any]], timeout_s: float) -> Future:
        future = Future("inline", time.monotonic() + timeout_s)

        def done() -> None:
            try:
                future.finish(work())
            except BaseException as error:
                future.finish(error)

        self._thread.submit(done)
        return future
