"""Scalars by YAML 1.2's core schema, duplicate keys refused, errors with their line."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.config import yaml12
from hyper_parallel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), ("-2.5e+1", -25.0), (".5", 0.5), ("1.", 1.0), ("1_000.5", 1000.5),
        ("12", 12), ("-7", -7), ("1_000_000", 1_000_000), ("0o17", 15), ("0x1f", 31), ("010", 10),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("on", "on"), ("2026-01-01", "2026-01-01"), ("10:30", "10:30"), ("e3", "e3"), ("1e", "1e"),
        ("'1e-3'", "1e-3"), (".inf", math.inf), ("-.inf", -math.inf), ("127.0.0.1:0", "127.0.0.1:0"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    read = yaml12.parse(f"key: {text}", "x")["key"]
    assert read == value
    assert type(read) is type(value)


def test_a_duplicate_key_names_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml:4: .*'lr' stands twice, on lines 2 and 4; remove one$"):
        yaml12.parse("a:\n  lr: 1\n  b: 2\n  lr: 3\n", "run.yaml")
    assert yaml12.parse("a: {x: 1}\nb: {x: 2}\n", "run.yaml") == {"a": {"x": 1}, "b": {"x": 2}}


def test_merge_keys_are_no_duplicates() -> None:
    text = "base: &b {x: 1, y: 2}\nd: {e: &e {<<: *b, x: 3}}\nf: {<<: *e, y: 4}\n"
    assert yaml12.parse(text, "run.yaml")["f"] == {"x": 3, "y": 4}


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: ]\n", 2), ("a: 1\n\tb: 2\n", 2), ("x: 1\ny: !!python/name:os.system ''\n", 2),
                       ("a: 1\n? [b]\n: 2\n", 2), ("a: *nobody\n", 1)]
)  # fmt: skip
def test_a_mistake_names_file_and_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^run.yaml:{line}: not valid YAML: [^\n]+$"):
        yaml12.parse(text, "run.yaml")


@pytest.mark.parametrize("text", ["a: \x00", "[" * 1500, "--- 1\n--- 2\n"])
def test_odd_bytes_deep_nesting_and_several_documents_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        yaml12.parse(text, "run.yaml")
