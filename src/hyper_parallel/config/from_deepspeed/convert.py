"""Conversion of a DeepSpeed JSON: reading, and the order in which its sections are converted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.config.from_deepspeed.conversion import Conversion
from hyper_parallel.config.from_deepspeed.memory import (
    convert_offload,
    convert_overlap,
    convert_recomputation,
)
from hyper_parallel.config.from_deepspeed.optimizer import convert_optimizer, convert_schedule
from hyper_parallel.config.from_deepspeed.parallelism import convert_axes
from hyper_parallel.config.from_deepspeed.reasons import resembles
from hyper_parallel.config.from_deepspeed.source import Source
from hyper_parallel.config.from_deepspeed.training import (
    convert_batch,
    convert_clipping,
    convert_logging,
    convert_precision,
)
from hyper_parallel.errors import ConfigError
from hyper_parallel.untrusted import open_regular, parse_json, read_bytes

LARGEST = 2**20
"""Upper limit for the bytes of a DeepSpeed JSON."""


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
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object; remove one")
    return found


def convert(
    content: Mapping[str, Any],
    *,
    devices: int | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    arguments: Sequence[str] = (),
    name: str = "ds_config.json",
) -> Conversion:
    """The fragment of a run file that trains as a DeepSpeed JSON says.

    `devices`: number of devices, for the degrees of axes and the global batch. `device_memory`, `host_memory`: bytes of
    the budget where the JSON offloads. `arguments`: training arguments of Transformers as ``name=value``, which fill
    `auto`. `name`: the file, for messages. Raises ConfigError for a value that DeepSpeed would refuse, too.
    """
    if content and not any(resembles(key) for key in content):
        found = ", ".join(map(repr, list(content)[:4]))
        raise ConfigError(
            f"{name}: is no DeepSpeed JSON: it has none of its keys, such as zero_optimization (it has {found}); give "
            "the file of deepspeed --deepspeed_config"
        )
    source = Source(content, name, arguments)
    data = convert_axes(source, devices)
    convert_batch(source, data)
    convert_optimizer(source)
    convert_schedule(source)
    convert_clipping(source)
    convert_precision(source)
    convert_offload(source, device_memory, host_memory)
    convert_recomputation(source)
    convert_overlap(source)
    convert_logging(source)
    keys = ("train.batch", "train.steps", "train.optimizer", "train.schedule")
    missing = ("version", "out", "model", "data", *(key for key in keys if not source.wrote(key)))
    return Conversion(
        name=name, settings=source.settings(), unconverted=source.unconverted(), missing=missing
    )
