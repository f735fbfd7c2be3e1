"""Hostile run files: small texts that stand for much, large ones, broken ones.

Each case writes ``run.yaml`` and what it builds on into a folder in which ``text.txt`` and ``good.yaml`` are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

GOOD = """\
version: 1
out: out
model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
                 num_attention_heads: 2, max_position_embeddings: 64}}
data: {train: text.txt, sequence: 32}
trackers: []
"""
Case = Callable[[Path], object]


def text(content: str | bytes) -> Case:
    """A run file of this content."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda folder: (folder / "run.yaml").write_bytes(data)


def also(content: str) -> Case:
    """A good run file and more."""
    return text(GOOD + content)


def key(dotted: str, value: str) -> Case:
    """A good run file with a value at one key."""
    *sections, last = dotted.split(".")
    lines = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections))
    lines += f"{'  ' * len(sections)}{last}: {value}\n"

    def case(folder: Path) -> None:
        (folder / "run.yaml").write_text("extends: good.yaml\n" + lines)

    return case


def extends(name: str, content: str | bytes | None = None) -> Case:
    """A run file that builds on `name`, which has this content."""

    def case(folder: Path) -> None:
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        (folder / "run.yaml").write_text(f"extends: {name}\nout: out\n")

    return case


def _chain(folder: Path) -> None:
    for number in range(200):
        (folder / f"f{number}.yaml").write_text(f"extends: f{number + 1}.yaml\nseed: {number}\n")
    (folder / "f200.yaml").write_text(GOOD)
    (folder / "run.yaml").write_text("extends: f0.yaml\n")


def _through_links(folder: Path) -> None:
    (folder / "a").symlink_to(".")
    (folder / "run.yaml").write_text("extends: a/run.yaml\n")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "run.yaml")


def _built_on_pipe(folder: Path) -> None:
    os.mkfifo(folder / "base.yaml")
    (folder / "run.yaml").write_text("extends: base.yaml\n")


def _sparse(folder: Path) -> None:
    with (folder / "run.yaml").open("wb") as out:
        out.truncate(2**40)


def _laughs(kind: str) -> str:
    """Ten levels of ten aliases each."""
    lines = ["a0: &a0 {x: 1}" if kind == "map" else "a0: &a0 [1]"]
    for level in range(1, 11):
        names = ", ".join([f"*a{level - 1}"] * 10)
        body = {"list": f"[{names}]", "merge": f"{{<<: [{names}]}}", "map": f"{{<<: [{names}], y{level}: 1}}"}
        lines.append(f"a{level}: &a{level} {body[kind]}")
    return "\n".join(lines).replace("&a0 [1]", "&a0 {x: 1}" if kind == "merge" else "&a0 [1]") + "\n"


def _deep_aliases() -> str:
    return "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))


CASES: dict[str, Case] = {
    "a billion laughs": also(_laughs("list")),
    "a billion laughs in the config": text(
        _laughs("list") + GOOD.replace("model_type", "x: *a10, model_type")
    ),
    "merges of merges": also(_laughs("merge")),
    "merges of mappings": also(_laughs("map")),
    "aliases three thousand deep": also(_deep_aliases()),
    "a list that contains itself": also("a: &a [*a]\n"),
    "a mapping that contains itself": also("a: &a {b: *a}\n"),
    "a mapping that merges itself": also("a: &a {<<: *a}\n"),
    "a merge of a number": also("a: {<<: 3}\n"),
    "an alias of nothing": also("a: *nothing\n"),
    "a hundred thousand unknown keys": also("".join(f"k{i}: 1\n" for i in range(100_000))),
    "nine thousand unknown keys": also("".join(f"k{i}: 1\n" for i in range(9_000))),
    "three hundred unknown keys": also("".join(f"train{i}: 1\n" for i in range(300))),
    "a thousand unknown keys in a section": also(
        "launch: {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}\n"
    ),
    "a thousand wrong values": key("trackers", "[" + "x, " * 1000 + "x]"),
    "a thousand fields that no config has": text(
        GOOD.replace("model_type", "".join(f"f{i}: 1, " for i in range(1000)) + "model_type")
    ),
    "a key of a hundred thousand characters": also("k" * 100_000 + ": 1\n"),
    "a key with a line break": also('"a\\nhyper-parallel: done": 1\n'),
    "a key with an escape sequence": also('"\\e[2J": 1\n'),
    "a key that is a list": also("? [a, b]\n: 1\n"),
    "a key that is nothing": also("~: 1\n"),
    "a key that is no number": also(".nan: 1\n"),
    "a key twice": also("seed: 1\nseed: 2\n"),
    "a section twice": also("data: {train: text.txt}\n"),
    "five thousand digits": key("train.steps", "9" * 5000),
    "five thousand digits with underscores": key("train.steps", "9_" * 5000 + "9"),
    "five thousand hexadecimal digits": key("train.steps", "0x" + "f" * 5000),
    "five thousand octal digits": key("seed", "0o" + "7" * 5000),
    "thirty digits": key("seed", "9" * 30),
    "a number beyond 64 bits": key("data.sequence", str(2**63)),
    "a float of five thousand digits": key("train.optimizer.lr", "1." + "0" * 5000),
    "a float beyond all": key("train.optimizer.lr", "1e999"),
    "infinity": key("train.optimizer.lr", ".inf"),
    "not a number": key("train.optimizer.lr", ".nan"),
    "ten thousand brackets": also("a: " + "[" * 10_000 + "\n"),
    "ten thousand braces": also("a: " + "{a: " * 10_000 + "\n"),
    "sixty levels": also("a: " + "[" * 60 + "]" * 60 + "\n"),
    "two hundred thousand zeros": key("trackers", "[" + "0," * 100_000 + "0]"),
    "five megabytes": also("# " + "x" * 5_000_000 + "\n"),
    "a tebibyte of holes": _sparse,
    "a null byte": text(GOOD.encode() + b"\0"),
    "a null in a path": key("out", '"a\\0b"'),
    "a line break in a path": key("out", '"a\\nb"'),
    "a null in the text's path": key("data.train", '["a\\0b"]'),
    "a null in the model's path": text(GOOD.replace("config: {", 'path: "a\\0b", x: {')),
    "half a surrogate in a path": key("out", '"a\\uD800b"'),
    "a path of ten thousand characters": key("data.train", "x" * 10_000),
    "a pattern of files without an end": key("data.train", '"' + "*" * 200 + '"'),
    "invalid UTF-8": text(GOOD.encode() + b"\xff\xfe"),
    "UTF-16": text(GOOD.encode("utf-16")),
    "an overlong encoding": text(GOOD.encode() + b"a: \xc0\xaf\n"),
    "a byte order mark in the middle": also("a\ufeff: 1\n"),
    "nothing": text(""),
    "only a comment": text("# nothing\n"),
    "a list": text("[1, 2]\n"),
    "a text": text("root:x:0:0\n"),
    "two documents": text(GOOD + "---\n" + GOOD),
    "a hundred documents": text("---\na: 1\n" * 100),
    "a directive from the future": text("%YAML 9.9\n---\n" + GOOD),
    "a tag of Python": also("a: !!python/object/apply:os.system ['touch canary/x']\n"),
    "a tag of a name of Python": also("a: !!python/name:os.system\n"),
    "a tag of a time": also("a: !!timestamp 9999-99-99\n"),
    "a tag of bytes": also("a: !!binary '!'\n"),
    "a tag of a set": also("a: !!set {x}\n"),
    "a tag of pairs": also("a: !!omap [x: 1]\n"),
    "a tag that does not fit": also("a: !!int abc\n"),
    "a tag of a truth that is none": also("a: !!bool maybe\n"),
    "a tag of a number that is none": also("a: !!float [1]\n"),
    "a tag of a mapping on a text": also("a: !!map x\n"),
    "a tag of its own": also("a: !mine x\n"),
    "a date": key("train.steps", "2026-01-01"),
    "a time": key("train.steps", "12:30:45"),
    "a version that is a date": text(GOOD.replace("version: 1", "version: 2026-01-01")),
    "a version that is true": text(GOOD.replace("version: 1", "version: true")),
    "a version of many digits": text(GOOD.replace("version: 1", "version: " + "9" * 4000)),
    "a version that is a list": text(GOOD.replace("version: 1", "version: [1]")),
    "building on the users of the machine": extends("/etc/passwd"),
    "building on this folder": extends("."),
    "building on a device": extends("/dev/zero"),
    "building on a terminal": extends("/dev/tty"),
    "building on the memory of this process": extends("/proc/self/mem"),
    "building on a secret": extends("secret.yaml", "password: hunter2\ntoken: hunter2\n"),
    "building on a secret that is no YAML": extends("secret.txt", "hunter2: [hunter2\nhunter2\n"),
    "building on a secret in lines": extends("secret.txt", "hunter2\nhunter2\n"),
    "building on bytes": extends("base.yaml", b"\xff\xfe\x00"),
    "building on itself": extends("run.yaml"),
    "building on itself through links": _through_links,
    "building on two hundred files": _chain,
    "building on a pipe": _built_on_pipe,
    "building on a list": text("extends: [good.yaml]\n"),
    "building on a number": text("extends: 3\n"),
    "building on a null": text('extends: "a\\0b"\n'),
    "building on a long name": text("extends: " + "a" * 5000 + "\n"),
    "a pipe": _pipe,
    "a family that is a list": text(GOOD.replace("model_type: llama", "model_type: [llama]")),
    "a family that leads up": text(GOOD.replace("model_type: llama", "model_type: ../../x")),
    "a billion layers": text(GOOD.replace("num_hidden_layers: 1", "num_hidden_layers: 1000000000")),
    "everything is a number": text(
        "version: 1\nout: 1\nmodel: 1\ndata: 1\ntrain: 1\nstrategy: 1\nlaunch: 1\n"
    ),
    "everything is nothing": text("version: 1\nout:\nmodel:\ndata:\ntrain:\nstrategy:\nlaunch:\n"),
    "axes of a billion": key("strategy.axes.shard", "1000000000"),
    "rules that are patterns of catastrophe": key("strategy.rules", '{"' + "(a+)+" * 20 + '$": x}'),
}


def mutated(draw: random.Random) -> tuple[str, Case]:
    """A good file with some of its bytes exchanged, doubled or taken out."""
    data = bytearray(GOOD.encode())
    for _ in range(draw.choice((1, 2, 5, 20))):
        at = draw.randrange(len(data))
        how = draw.choice(("exchange", "double", "take"))
        if how == "exchange":
            data[at] = draw.choice(b"\0\xff{}[]&*!|>%@`:#- \n\t'\"9")
        elif how == "double":
            data[at:at] = data[max(0, at - 30) : at] * draw.choice((1, 50))
        else:
            del data[at : at + draw.choice((1, 10))]
    return "drawn changes of a good file", text(bytes(data))
