"""Forged and damaged checkpoints: the digests of each are right, what they say is not.

A checkpoint of two ranks is written by the real writer; each case changes a copy of it, after which whoever forged it
has computed every digest anew. `CASES` are named by what they try; `mutated` puts drawn values at drawn places.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from harness.hostile.replaced import replace
from hyper_parallel.checkpoint import Piece, Writer
from hyper_parallel.layout import Layout, Mesh

Case = Callable[[Path, Path], object]
"""Changes the checkpoint in a folder; the second path is a folder that nothing may be written to."""
MESH = Mesh(("shard", 2))
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


class _Ranks:
    """Two ranks that are threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, texts: list[str]) -> None:
        self.rank, self.world, self._barrier, self._texts = rank, 2, barrier, texts

    def gather(self, text: str) -> list[str]:
        """As `checkpoint.Ranks`."""
        self._texts[self.rank] = text
        self._barrier.wait()
        found = list(self._texts)
        self._barrier.wait()
        return found


def pristine(folder: Path) -> Path:
    """A real checkpoint of two ranks, with two assets."""
    layouts = {
        "model.w": Layout(MESH, (8, 4), (("shard",), ())),
        "model.n": Layout.replicated(MESH, (4,)),
        "optimizer.exp_avg.w": Layout(MESH, (8, 4), (("shard",), ())),
    }
    barrier, texts = threading.Barrier(2, timeout=60), ["", ""]

    def save(rank: int) -> None:
        pieces = {
            name: Piece(torch.full(layout.local_shape(MESH.coordinate(rank)), float(rank)), layout)
            for name, layout in layouts.items()
        }
        with Writer(folder, MESH.world, rank, group=_Ranks(rank, barrier, texts), background=False) as writer:
            assets = {"tokenizer.json": b"{}", "generation_config.json": b"{}"}
            writer.save(3, pieces, {"model_config": CONFIG}, assets=assets)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
    return folder / "step-00000003"


# What a forger has: the files' form, and SHA-256.


def sealed(body: Any) -> bytes:
    """A sealed file for any body, also one that JSON has no text for."""
    text = json.dumps(body, sort_keys=True)
    if not isinstance(body, dict):
        return text.encode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True).encode() + b"\n"


def unsealed(path: Path) -> Any:
    """The body of a sealed file."""
    body = json.loads(path.read_bytes())
    body.pop("sha256", None)
    return body


def marker(change: Callable[[Any], Any]) -> Case:
    """Change ``commit.json``; what `change` returns, if anything, takes its place."""

    def case(path: Path, canary: Path) -> None:
        body = unsealed(path / "commit.json")
        other = change(body)
        (path / "commit.json").write_bytes(sealed(body if other is None else other))

    return case


def index(change: Callable[[Any], Any], rank: int = 0) -> Case:
    """Change a rank's index, and its digest in ``commit.json``."""

    def case(path: Path, canary: Path) -> None:
        file = path / f"rank-{rank:05d}.json"
        body = unsealed(file)
        other = change(body)
        raw = sealed(body if other is None else other)
        file.write_bytes(raw)
        _tell(path, file.name, raw)

    return case


def both(change: Callable[[Any], Any]) -> Case:
    """Change the indexes of both ranks."""

    def case(path: Path, canary: Path) -> None:
        for rank in (0, 1):
            index(change, rank)(path, canary)

    return case


def _tell(path: Path, name: str, data: bytes) -> None:
    body = unsealed(path / "commit.json")
    body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "commit.json").write_bytes(sealed(body))


def _at(body: Any, *keys: Any) -> Callable[[Any], None]:
    for key in keys[:-1]:
        body = body[key]

    def put(value: Any) -> None:
        body[keys[-1]] = value

    return put


def put(kind: Callable[..., Case], *keys: Any, value: Any) -> Case:
    """A value at a place of the marker or of an index."""
    return kind(lambda body: _at(body, *keys)(value))


def tensor(key: str, value: Any, name: str = "model.w") -> Case:
    """A value in what the first rank's index says of a tensor."""
    return put(index, "tensors", name, key, value=value)


def block(key: str, value: Any, name: str = "model.w") -> Case:
    """A value in the first block of a tensor."""
    return put(index, "tensors", name, "pieces", 0, key, value=value)


def asset(name: str, inside: bool = True) -> Case:
    """An asset of any name, written to where that name leads if it is `inside`, else put where it has to be found."""

    def case(path: Path, canary: Path) -> None:
        data = b"alias ls='rm -rf ~'\n"
        full = name.replace("CANARY", str(canary))
        if inside:
            target = path / "assets" / full
            if target.resolve().is_relative_to(path.resolve()):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        _tell(path, f"assets/{full}", data)

    return case


def replaced(name: str, how: str) -> Case:
    """Another kind of thing instead of a file, with the file's name."""
    return lambda path, canary: replace(path, name, how)


def _link_assets(path: Path, canary: Path) -> None:
    (path / "assets").rename(path.parent / "assets-elsewhere")
    (path / "assets").symlink_to(path.parent / "assets-elsewhere")


def _sparse_data(path: Path, canary: Path) -> None:
    """A file of a tebibyte without a block on the disk, and a tensor that takes all of it."""
    file, size = path / "rank-00000.safetensors", 2**40
    with file.open("r+b") as out:
        out.truncate(size)
    body = unsealed(path / "rank-00000.json")
    body["data"]["bytes"] = size
    body["tensors"] = {
        "model.w": {
            "shape": [size // 4],
            "dtype": "float32",
            "layout": "[1]",
            "pieces": [
                {"key": "", "offset": [0], "size": [size // 4], "bytes": [0, size], "sha256": "0" * 64}
            ],
        }
    }
    raw = sealed(body)
    (path / "rank-00000.json").write_bytes(raw)
    other = unsealed(path / "rank-00001.json")
    other["tensors"] = {}
    (path / "rank-00001.json").write_bytes(sealed(other))
    _tell(path, "rank-00000.json", raw)
    _tell(path, "rank-00001.json", sealed(other))
    marked = unsealed(path / "commit.json")
    marked["files"]["rank-00000.safetensors"]["bytes"] = size
    (path / "commit.json").write_bytes(sealed(marked))


def _same_bytes(body: Any) -> None:
    """A tensor of a thousand rows, all of which are the same bytes of the file."""
    first = body["tensors"]["model.n"]["pieces"] or body["tensors"]["model.w"]["pieces"]
    span, digest = first[0]["bytes"], first[0]["sha256"]
    columns = (span[1] - span[0]) // 4
    body["tensors"]["model.x"] = {
        "shape": [1000, columns],
        "dtype": "float32",
        "layout": "[1]",
        "pieces": [
            {"key": "", "offset": [row, 0], "size": [1, columns], "bytes": span, "sha256": digest}
            for row in range(1000)
        ],
    }


def _overlap(body: Any) -> None:
    """Both halves of what a rank has of a tensor are its first half: the others' places stay as memory was."""
    (one,) = body["tensors"]["model.w"]["pieces"]
    start, stop = one["bytes"]
    half = (start + stop) // 2
    rows = one["size"][0] // 2
    body["tensors"]["model.w"]["pieces"] = [
        {**one, "size": [rows, one["size"][1]], "bytes": [start, half]},
        {**one, "size": [rows, one["size"][1]], "bytes": [half, stop]},
    ]


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _raw(name: str, data: bytes) -> Case:
    return lambda path, canary: (path / name).write_bytes(data)


CASES: dict[str, Case] = {
    "an asset that leads up": asset("../../CANARY/x", inside=False),
    "an asset with an absolute path": asset("CANARY/.bash_profile", inside=False),
    "an asset behind two slashes": asset("/CANARY/.bash_profile", inside=False),
    "an asset two folders up": asset("../../escaped"),
    "a hidden asset": asset(".bash_profile"),
    "an asset in a folder": asset("sub/x"),
    "an asset with a line break": asset("a\nhyper-parallel: all is well"),
    "an asset with an escape sequence": asset("a\x1b[2Jb"),
    "an asset with a backslash": asset("..\\..\\x"),
    "an asset with a long name": asset("a" * 300, inside=False),
    "an asset with a null byte": asset("a\0b", inside=False),
    "an asset with half a surrogate": asset("a\ud800b", inside=False),
    "an asset that turns the text round": asset("a\u202eb"),
    "an asset without a name": asset("", inside=False),
    "an asset that is the config": asset("config.json"),
    "an asset that is the weights": asset("model.safetensors"),
    "a data file elsewhere": put(marker, "ranks", 0, "data", value="../step-00000002/rank-00000.safetensors"),
    "an index elsewhere": put(marker, "ranks", 0, "index", value="/etc/passwd"),
    "an index that is a number": put(marker, "ranks", 0, "index", value=3),
    "a file of a device": put(marker, "files", "/dev/zero", value={"bytes": 1, "sha256": "0" * 64}),
    "a file that leads up": put(marker, "files", "../x", value={"bytes": 1, "sha256": "0" * 64}),
    "a million ranks": put(marker, "world", value=2**20),
    "no ranks": put(marker, "world", value=0),
    "ranks below zero": put(marker, "world", value=-2),
    "a world that is a text": put(marker, "world", value="2"),
    "a mesh of another size": put(marker, "mesh", value=[["shard", 4]]),
    "a mesh of a hundred thousand axes": put(marker, "mesh", value=[["shard", 1]] * 10**5),
    "a mesh that is a text": put(marker, "mesh", value="shard"),
    "a step that is a text": put(marker, "step", value="3"),
    "a step below zero": put(marker, "step", value=-3),
    "a step of a hundred digits": put(marker, "step", value=10**100),
    "a step of five thousand digits": _raw("commit.json", b'{"step": ' + b"9" * 5000 + b', "sha256": ""}'),
    "a state that is a list": put(marker, "state", value=[]),
    "a state nested deeply": put(marker, "state", "x", value=nested(900)),
    "a config nested deeply": put(marker, "state", "model_config", "x", value=nested(100)),
    "a config that is a list": put(marker, "state", "model_config", value=[1, 2]),
    "a config that names code": put(
        marker, "state", "model_config", "auto_map", value={"AutoConfig": "evil--x.Config"}
    ),
    "adapters that are a text": put(marker, "state", "adapters", value="yes"),
    "files that are a list": put(marker, "files", value=[]),
    "a file below zero bytes": put(marker, "files", "rank-00000.json", "bytes", value=-1),
    "an asset of an exabyte": put(marker, "files", "assets/tokenizer.json", "bytes", value=2**60),
    "a digest that is a number": put(marker, "files", "rank-00000.json", "sha256", value=0),
    "a file without a digest": put(marker, "files", "rank-00000.json", value={}),
    "another program's format": put(marker, "format", value="another"),
    "a version that is a text": put(marker, "version", value="1"),
    "a marker that is a list": marker(lambda body: [body]),
    "a marker without anything": marker(lambda body: {}),
    "a marker in UTF-16": _raw("commit.json", '{"sha256": ""}'.encode("utf-16")),
    "a marker nested a million times": _raw("commit.json", b"[" * 10**6),
    "a shape below zero": tensor("shape", [-8, 4]),
    "a shape of an exabyte": tensor("shape", [2**58, 4]),
    "a shape whose product overflows": tensor("shape", [2**62, 2**62, 0]),
    "a shape of texts": tensor("shape", ["8", "4"]),
    "a shape of a thousand dims": tensor("shape", [1] * 1000),
    "a shape that another rank does not have": tensor("shape", [16, 4]),
    "an element type that is a function": tensor("dtype", "load"),
    "an element type that is a module": tensor("dtype", "nn"),
    "an element type that is a list": tensor("dtype", ["float32"]),
    "an element type of another size": tensor("dtype", "float64"),
    "an element type that another rank does not have": tensor("dtype", "int32"),
    "a layout that is a number": tensor("layout", 3),
    "blocks that are a text": tensor("pieces", "none"),
    "no blocks": tensor("pieces", []),
    "a block outside of its tensor": block("offset", [100, 0]),
    "a block below zero": block("offset", [-1, 0]),
    "a block of fewer dims": block("offset", [0]),
    "a block of a size below zero": block("size", [-4, -4]),
    "a block larger than its bytes": block("size", [8, 4]),
    "a block beyond its file": block("bytes", [2**40, 2**40 + 64]),
    "a block of an exabyte": block("bytes", [0, 2**60]),
    "a block that ends before it begins": block("bytes", [64, 0]),
    "a block whose bytes are a text": block("bytes", "all"),
    "a block without a digest": block("sha256", None),
    "a block that is a text": put(index, "tensors", "model.w", "pieces", 0, value="x"),
    "blocks that hold the same elements": index(_overlap),
    "blocks that share bytes": index(_same_bytes),
    "a tensor with the name of the metadata": both(
        lambda body: body["tensors"].update({"model.__metadata__": body["tensors"].pop("model.n")})
    ),
    "a tensor with a line break in its name": index(
        lambda body: body["tensors"].update({"model.a\nb": body["tensors"].pop("model.n")})
    ),
    "a tensor without a name": index(
        lambda body: body["tensors"].update({"": body["tensors"].pop("model.n")})
    ),
    "tensors that are a list": put(index, "tensors", value=[]),
    "an index of another rank": put(index, "rank", value=1),
    "an index of another step": put(index, "step", value=2),
    "an index of another file": put(index, "data", "file", value="/etc/passwd"),
    "an index that is a list": index(lambda body: [body]),
    "a tebibyte of holes": _sparse_data,
    "assets that are a link": _link_assets,
    **{
        f"{name}: {how}": replaced(name, how)
        for name in ("commit.json", "rank-00000.json", "rank-00001.safetensors")
        for how in ("pipe", "folder", "socket", "empty", "cut", "zeros", "loop", "link", "text")
    },
    "commit.json: sparse": replaced("commit.json", "sparse"),
    "rank-00000.json: sparse": replaced("rank-00000.json", "sparse"),
    "rank-00000.safetensors: sparse": replaced("rank-00000.safetensors", "sparse"),
}

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    1.5,
    "",
    "x",
    "../../x",
    "/etc/passwd",
    "\x1b[31m",
    [],
    [[]],
    {},
    {"x": 1},
    nested(70),
]


def mutated(draw: random.Random) -> tuple[str, Case]:
    """A drawn value at a drawn place of the marker or of an index, or a place taken out."""
    which, value, drop = draw.choice(("marker", "index")), draw.choice(VALUES), draw.random() < 0.2
    turns = [draw.random() for _ in range(12)]
    stop = draw.choice((1, 2, 3, 4, 5, 6))

    def change(body: Any) -> None:
        at, taken = body, iter(turns)
        for _ in range(stop):
            keys = list(at.keys()) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return
            key = keys[int(next(taken) * len(keys))]
            if not isinstance(at[key], dict | list) or _ == stop - 1:
                break
            at = at[key]
        if drop:
            del at[key]
        else:
            at[key] = value

    what = "taken out" if drop else f"{value!r:.20}"
    return f"{which}, {stop} deep: {what}", (marker if which == "marker" else index)(change)
