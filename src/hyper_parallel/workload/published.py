"""Shapes of published models by name, each with its source.

Names ignore case and punctuation: `Llama-3.1-405B`, `llama3-405b` and `LLAMA_3_405B` are one model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.published_hybrids import CONFIGS
from hyper_parallel.workload.published_shapes import ALIASES, LINES, SOURCES
from hyper_parallel.workload.shape import Shape

_ENDINGS = re.compile(r"(-(instruct|chat|base|hf|it|pt|v0\.\d|\d+k))+$")
"""Name parts of model variants with the same dimensions."""


def names() -> list[str]:
    """The models' names."""
    return [*(line[0] for line in LINES), *CONFIGS]


def shape(name: str) -> Shape:
    """A published model's shape. Raises ConfigError for an unknown name, with the nearest one.

    >>> shape("Llama-3.1-405B").layers
    126
    """
    found = known(name)
    if found is None:
        hint = nearest(name.lower(), [*names(), *ALIASES])
        # All names make a long line: they are listed only if none is similar.
        known_ones = f"; give one of {', '.join(names())}" if not hint else ""
        raise ConfigError(
            f"there is no model {name!r} among the published ones{hint}{known_ones}{' Or' if hint else '; or'} "
            "give the folder of a Transformers model with its config.json"
        )
    return found


def known(name: str) -> Shape | None:
    """The shape of a published model, or None for an unknown name."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    shapes = _shapes()
    return shapes.get(_key(plain)) or shapes.get(_key(_ENDINGS.sub("", plain)))


def _key(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _shapes() -> dict[str, Shape]:
    made = {line[0]: _shape(*line) for line in LINES}
    made |= {
        name: replace(Shape.of_config(config, name), source=source)
        for name, (source, config) in CONFIGS.items()
    }
    made |= {alias: made[name] for alias, name in ALIASES.items()}
    keyed = {_key(name): shape for name, shape in made.items()}
    assert len(keyed) == len(made), "no two names are one without punctuation"
    return keyed


def _shape(
    name: str,
    source: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    rest: dict[str, Any],
) -> Shape:
    fields: dict[str, Any] = {"gated": True, "head_dim": hidden // heads, **rest}
    latent = fields.get("latent")
    if latent is not None:
        fields["head_dim"] = latent.plain + latent.rotary
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        source=SOURCES[source],
        **fields,
    )
