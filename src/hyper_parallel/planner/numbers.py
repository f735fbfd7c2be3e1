"""Numbers as people write them in questions: `8k`, `1M`, `64..4096`, `15T`."""

from __future__ import annotations

import re

from hyper_parallel.errors import ConfigError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGbBtT]?)")
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def whole(option: str, text: str, least: int = 1) -> int:
    """`8192`, or `8k` for as many; a count of devices, sequences or tokens of a sequence, at least `least`.

    Raises ConfigError, which names `option`.
    """
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * _BINARY.get(found[2].lower(), 0) if found else -1.0
    if value < least or not value.is_integer():
        raise ConfigError(
            f"{option}: {text!r} is no whole number of at least {least}; write 8192, or 8k for the same"
        )
    return int(value)


def span(option: str, text: str) -> tuple[int, ...]:
    """`64..4096` as 64, 128, … 4096: doubled from the first, and the last; one number as itself."""
    first, dots, last = text.partition("..")
    least = whole(option, first)
    if not dots:
        return (least,)
    most = whole(option, last)
    if most < least:
        raise ConfigError(f"{option}: {text!r} ends before it begins; write {most}..{least}")
    found = [least]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return (*found, most) if found[-1] < most else tuple(found)


def tokens(option: str, text: str) -> float:
    """`15T`: tokens of a run, in powers of a thousand."""
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * _DECIMAL.get(found[2].lower(), 0.0) if found else 0.0
    if value < 1:
        raise ConfigError(f"{option}: {text!r} is no number of tokens; write 15T, 300B or the number itself")
    return value


def fixed(texts: tuple[str, ...]) -> dict[str, object]:
    """Parse `tensor_x=8` and `recompute=full,none` for `Question.fix`: a value, or a list of allowed values."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ConfigError(f"--fix {text!r}: write NAME=VALUE, as in tensor_x=8")
        values = [one.strip() for one in value.split(",")]
        found[name.strip()] = values[0] if len(values) == 1 else values
    return found
